// The page around the curves: bars, which runs are shown, and in which order. Follows compare_chart.js in one script.

const { runs, curves, measures } = JSON.parse(document.getElementById("data").textContent);
runs.forEach((run, index) => (run.index = index));
const shown = runs.map(() => true);
let emphasised = null; // the run under the pointer in the legend
const byId = (id) => document.getElementById(id);

function options(select, entries) {
  for (const [value, text] of entries) select.append(element("option", { value }, text));
}
const chosen = (list, select) => list.find((measure) => measure.name === select.value);
const hint = (measure) => (measure.better ? `${measure.better} is better` : "");

const charts = [...document.querySelectorAll(".chart")].map((figure) => new Chart(figure));
function drawCurves() {
  if (!curves.length) return;
  const measure = chosen(curves, byId("curve-metric"));
  byId("curve-better").textContent = hint(measure);
  for (const chart of charts) chart.draw(measure.name, byId("logarithmic").checked, runs.filter((run) => shown[run.index]));
  emphasise();
}

// Bars

function drawBars() {
  if (!measures.length) return;
  const measure = chosen(measures, byId("bar-metric"));
  byId("bar-better").textContent = hint(measure);
  const values = runs.map((run) => run.values[measure.name]);
  const longest = Math.max(...values.filter((value, index) => value !== undefined && shown[index]), 0);
  const base = values[runs.findIndex((run) => run.baseline)];
  byId("bar-list").replaceChildren(...order().filter((index) => shown[index]).map((index) => {
    const run = runs[index];
    const bar = element("li");
    const track = element("div", { class: "track" });
    const share = (value) => `${(100 * Math.max(0, value)) / (longest || 1)}%`;
    let text = run.status === "FINISHED" ? "-" : run.status.toLowerCase();
    if (values[index] !== undefined) {
      const fill = element("div", { class: `fill colour${run.colour}` });
      fill.style.width = share(values[index]);
      track.append(fill);
      text = run.texts[measure.name];
      if (run.ratios[measure.name]) text += `  ${run.ratios[measure.name]}`;
      if (run.status !== "FINISHED") text += `, ${run.status.toLowerCase()}`;
    }
    if (runs.length > 1 && base > 0 && base <= longest) {
      const mark = element("div", { class: "mark", title: "baseline" });
      mark.style.left = share(base);
      track.append(mark);
    }
    bar.append(element("span", { class: "name" }, run.label), track, element("span", { class: "value" }, text));
    return bar;
  }));
}

// Which runs are shown, and in which order

function order() {
  const all = runs.map((_, index) => index);
  const measure = chosen(measures, byId("order"));
  if (!measure) return all;
  const sign = measure.better === "higher" ? -1 : 1;
  const rank = (index) => {
    const value = runs[index].values[measure.name];
    return value === undefined ? Infinity : sign * value;
  };
  return all.sort((one, other) => (rank(one) === rank(other) ? one - other : rank(one) - rank(other)));
}
function arrange() {
  const sorted = order();
  const arrangeIn = (parent, attribute) => {
    const items = new Map([...parent.children].filter((item) => attribute in item.dataset)
      .map((item) => [Number(item.dataset[attribute]), item]));
    for (const index of sorted) if (items.has(index)) parent.append(items.get(index));
  };
  arrangeIn(byId("legend"), "entry");
  for (const id of ["cards", "timelines"]) if (byId(id)) arrangeIn(byId(id), "run");
  for (const row of document.querySelectorAll(".scroll tr")) arrangeIn(row, "run");
}
function show() {
  for (const box of document.querySelectorAll("[data-toggle]")) box.checked = shown[Number(box.dataset.toggle)];
  for (const part of document.querySelectorAll("[data-run]")) part.hidden = !shown[Number(part.dataset.run)];
  byId("shown").textContent = `${shown.filter(Boolean).length} of ${runs.length} shown`;
  drawCurves();
  drawBars();
}
function emphasise(index = emphasised) {
  emphasised = index;
  for (const { plot } of charts) {
    plot.classList.toggle("dimmed", index !== null && shown[index]);
    for (const course of plot.querySelectorAll(".course")) {
      course.classList.toggle("chosen", course.dataset.course === String(index));
    }
  }
}

options(byId("curve-metric"), curves.map((measure) => [measure.name, measure.name]));
options(byId("bar-metric"), measures.map((measure) => [measure.name, measure.name]));
options(byId("order"), [["", "as given"], ...measures.map(({ name, better }) => [name, better ? `best ${name}` : name])]);
if (measures.some(({ name }) => name === "perf/images_per_second")) byId("bar-metric").value = "perf/images_per_second";
byId("curves").hidden = !curves.length;
byId("bars").hidden = !measures.length;
byId("chooser").hidden = false;

for (const entry of byId("legend").children) {
  const index = Number(entry.dataset.entry);
  entry.querySelector("path").setAttribute("stroke-dasharray", DASHES[runs[index].dash]);
  entry.addEventListener("pointerenter", () => emphasise(index));
  entry.addEventListener("pointerleave", () => emphasise(null));
  entry.querySelector("input").addEventListener("change", (event) => {
    shown[index] = event.target.checked;
    show();
  });
}
for (const [id, value] of [["show-all", true], ["show-none", false]]) {
  byId(id).addEventListener("click", () => {
    shown.fill(value);
    show();
  });
}
for (const id of ["curve-metric", "logarithmic"]) byId(id).addEventListener("change", drawCurves);
byId("bar-metric").addEventListener("change", drawBars);
byId("order").addEventListener("change", () => {
  arrange();
  drawBars();
});
let width = 0;
new ResizeObserver(([{ contentRect }]) => {
  if (contentRect.width === width) return;
  width = contentRect.width;
  drawCurves();
}).observe(document.querySelector(".charts"));
show();
