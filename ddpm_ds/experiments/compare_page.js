"use strict";
// Curves with a read-out; which runs are shown, and in which order. Text of users becomes text content, never HTML.

const { runs, metrics, clock, orders } = JSON.parse(document.getElementById("data").textContent);
const MOST_READ_OUT = 12;
const byId = (id) => document.getElementById(id);
const plot = byId("plot");
const shown = new Set(runs.keys());
let chart = null; // what is drawn: lines, ranges and scales, and where values are read out

function text(value, options = { maximumSignificantDigits: 4 }) {
  const tiny = value !== 0 && Math.abs(value) < 1e-4;
  return tiny ? value.toExponential(2) : value.toLocaleString("en", options);
}
function shape(name, attributes, content = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = content;
  return made;
}
const coloured = (run) => `--colour: var(--colour${run.colour})`;

// Multiples of 1, 2 or 5 times a power of ten; powers of ten, with steps between where there are few.
function ticks(low, high, most) {
  const least = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((size) => size * power >= least * 0.999999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, number) => (first + number) * step);
}
function decades(low, high) {
  const first = Math.floor(Math.log10(low));
  const powers = Array.from({ length: Math.ceil(Math.log10(high)) - first + 1 }, (_, number) => 10 ** (first + number));
  for (const digits of [[1], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]) {
    const inside = powers.flatMap((power) => digits.map((digit) => digit * power)).filter((y) => y >= low && y <= high);
    if (inside.length >= 3) return inside;
  }
  return ticks(low, high, 5);
}

function draw() {
  if (!plot) return;
  const metric = metrics[byId("metric").value];
  const [axis, logarithmic] = [byId("axis").value, byId("logarithmic").checked];
  const usable = (value) => value !== null && (!logarithmic || value > 0);
  const lines = [...shown].map((index) => {
    const { [axis]: along, values } = metric.curves[index];
    const points = (along || []).map((x, place) => ({ x, y: values[place] }));
    return { index, run: runs[index], points, known: points.filter(({ y }) => usable(y)) };
  }).filter(({ known }) => known.length);
  byId("better").textContent = metric.better && `${metric.better} is better`;
  plot.setAttribute("aria-label", `${metric.name} of ${lines.length} runs against ${axis}; arrow keys read values out`);
  const [width, height] = [plot.clientWidth || 600, plot.clientHeight || 360];
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  plot.replaceChildren();
  plot.classList.remove("dimmed");
  chart = null;
  readOut(null);
  if (!lines.length) {
    plot.append(shape("text", { x: 20, y: 30 }, "The runs shown have no such curve."));
    return;
  }
  const extent = (values) => values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const all = lines.flatMap(({ known }) => known);
  let [left, right] = extent([0, ...all.map(({ x }) => x)]);
  if (right === left) right = left + 1;
  let [low, high] = extent(all.map(({ y }) => y));
  if (logarithmic) [low, high] = [low / 1.1, high * 1.1];
  else {
    const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
    [low, high] = [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }
  const marks = (logarithmic ? decades : ticks)(low, high, 6);
  const labels = marks.map((mark) => text(mark) + metric.unit);
  const [begin, end, top, bottom] = [14 + 7 * Math.max(...labels.map(({ length }) => length)), width - 14, 8, height - 26];
  const scale = logarithmic ? Math.log : Number;
  const toX = (x) => begin + ((x - left) / (right - left)) * (end - begin);
  const toY = (y) => bottom - ((scale(y) - scale(low)) / (scale(high) - scale(low))) * (bottom - top);
  const line = (kind, x1, y1, x2, y2) => shape("line", { class: kind, x1, y1, x2, y2 });
  const dot = (run, { x, y }) => shape("circle", { class: "dot", style: coloured(run), cx: toX(x), cy: toY(y), r: 4 });
  const toValue = (x) => left + ((x - begin) / (end - begin)) * (right - left);
  const cursor = (x) => line("cursor", toX(x), top, toX(x), bottom);
  chart = { metric, axis, lines, left, right, toX, toY, toValue, cursor, dot, over: shape("g", {}), at: null };
  marks.forEach((mark, place) => plot.append(line("grid", begin, toY(mark), end, toY(mark)),
    shape("text", { x: begin - 6, y: toY(mark) + 4, "text-anchor": "end" }, labels[place])));
  for (const mark of ticks(left, right, Math.max(2, Math.floor((end - begin) / 90)))) {
    const label = axis === "images" ? text(mark, { notation: "compact", maximumSignificantDigits: 4 }) : `${text(mark)} ${clock}`;
    plot.append(line("axis", toX(mark), bottom, toX(mark), bottom + 5),
      shape("text", { x: toX(mark), y: bottom + 19, "text-anchor": toX(mark) > end - 20 ? "end" : "middle" }, label));
  }
  plot.append(line("axis", begin, bottom, end, bottom));
  for (const { index, run, points, known } of lines.sort((one, other) => other.run.baseline - one.run.baseline)) {
    const steps = points.map(({ x, y }, place) => (!usable(y) ? ""
      : `${place && usable(points[place - 1].y) ? "L" : "M"}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`));
    plot.append(shape("path", { class: `course${run.baseline ? " baseline" : ""}`, style: coloured(run), d: steps.join(""),
      "stroke-dasharray": run.dash, "data-course": index }));
    if (known.length === 1) plot.append(dot(run, known[0]));
  }
  plot.append(chart.over);
}

// Show the curves' values at `at`, those nearest to the pointer where they are many; nothing where `at` is null.
function readOut(at, down = Infinity) {
  const box = byId("readout");
  box.hidden = at === null || !chart;
  chart?.over.replaceChildren();
  if (chart) chart.at = at;
  if (box.hidden) return;
  const { metric, axis, lines, left, right, toX, toY } = chart;
  at = chart.at = Math.min(right, Math.max(left, at));
  const slack = (right - left) / 40;
  const reached = lines.filter(({ known }) => at >= known[0].x - slack && at <= known.at(-1).x + slack);
  const found = reached.map(({ run, known }) =>
    ({ run, ...known.reduce((best, point) => (Math.abs(point.x - at) < Math.abs(best.x - at) ? point : best)) }));
  found.sort((one, other) => Math.abs(toY(one.y) - down) - Math.abs(toY(other.y) - down)).splice(MOST_READ_OUT);
  found.sort((one, other) => other.y - one.y);
  chart.over.append(chart.cursor(at), ...found.map((point) => chart.dot(point.run, point)));
  const place = axis === "images" ? `${text(at, { maximumFractionDigits: 0 })} images` : `${text(at)} ${clock}`;
  const more = reached.length - found.length;
  const table = document.createElement("table");
  for (const { run, y } of found) {
    const row = table.insertRow();
    const swatch = shape("svg", { class: "swatch", style: coloured(run), viewBox: "0 0 28 8", "aria-hidden": "true" });
    swatch.append(shape("path", { d: "M1 4H27", "stroke-dasharray": run.dash }));
    row.insertCell().append(swatch);
    for (const words of [run.label, text(y) + metric.unit]) row.insertCell().textContent = words;
  }
  box.replaceChildren(more ? `${place}, ${more} more runs there` : place, table);
  const rightHalf = at > (left + right) / 2;
  box.style.left = rightHalf ? "" : `${toX(at) + 20}px`;
  box.style.right = rightHalf ? `${plot.clientWidth - toX(at) + 20}px` : "";
}

function emphasise(index) {
  plot?.classList.toggle("dimmed", shown.has(index));
  for (const course of document.querySelectorAll(".course")) {
    course.classList.toggle("chosen", course.dataset.course === String(index));
  }
}
function show() {
  for (const part of document.querySelectorAll("[data-run]")) {
    const box = part.querySelector("input");
    if (box) box.checked = shown.has(Number(part.dataset.run));
    else part.hidden = !shown.has(Number(part.dataset.run));
  }
  byId("shown").textContent = `${shown.size} of ${runs.length} shown`;
  draw();
}
function arrange() {
  const order = orders[byId("order").value] || [...runs.keys()];
  for (const parent of document.querySelectorAll("[data-runs]")) {
    const parts = new Map([...parent.children].map((part) => [Number(part.dataset.run), part]));
    for (const index of order) if (parts.has(index)) parent.append(parts.get(index));
  }
}

for (const name of Object.keys(orders)) byId("order").append(new Option(name, name));
byId("order").addEventListener("change", arrange);
for (const [id, change] of [["all", "add"], ["none", "delete"]]) {
  byId(id).addEventListener("click", () => {
    for (const index of runs.keys()) shown[change](index);
    show();
  });
}
for (const entry of byId("legend").children) {
  const index = Number(entry.dataset.run);
  entry.addEventListener("pointerenter", () => emphasise(index));
  entry.addEventListener("pointerleave", () => emphasise(null));
  entry.addEventListener("change", (event) => {
    shown[event.target.checked ? "add" : "delete"](index);
    show();
  });
}
if (plot) {
  metrics.forEach(({ name }, index) => byId("metric").append(new Option(name, index)));
  for (const id of ["metric", "axis", "logarithmic"]) byId(id).addEventListener("change", draw);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    readOut(chart && chart.toValue(event.clientX - box.left), event.clientY - box.top);
  });
  for (const kind of ["pointerleave", "blur"]) plot.addEventListener(kind, () => readOut(null));
  plot.addEventListener("keydown", (event) => {
    if (!chart) return;
    const { left, right, at } = chart;
    const from = at ?? left;
    const by = (right - left) / 40;
    const to = { ArrowLeft: from - by, ArrowRight: from + by, Home: left, End: right, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    readOut(to);
  });
  new ResizeObserver(draw).observe(plot);
}
show();
