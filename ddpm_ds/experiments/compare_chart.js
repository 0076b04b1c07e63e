"use strict";
// Curves with a read-out. What comes from users reaches the page as text content, never as HTML.

const DASHES = ["", "8 4", "2 4", "10 4 2 4", "18 4"];
const MOST_READ_OUT = 12;

function element(name, attributes = {}, text = "") {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}
function shape(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

// Numbers

function plain(value) {
  const size = Math.abs(value);
  if (size >= 1000 && size < 1e12) return Math.round(value).toLocaleString("en");
  if (size !== 0 && (size < 1e-4 || size >= 1e12)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}
function scaled(value, units) {
  const [size, unit] = units.find(([size]) => Math.abs(value) >= size) || units[units.length - 1];
  return `${plain(value / size)}${unit}`;
}
function number(name, value) {
  if (value === 0) return "0";
  if (/_fraction$|^perf\/(mfu|imbalance)$/.test(name)) return `${Number((100 * value).toPrecision(3))}%`;
  if (name.endsWith("_bytes")) return scaled(value, [[2 ** 30, " GiB"], [2 ** 20, " MiB"], [1024, " KiB"], [1, " B"]]);
  if (name.endsWith("_seconds")) return scaled(value, [[1, " s"], [1e-3, " ms"], [1e-6, " µs"]]);
  return plain(value);
}
const AXES = {
  images: (value) => (value === 0 ? "0" : scaled(value, [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]])),
  seconds: (value) => (value === 0 ? "0" : scaled(value, [[3600, " h"], [60, " min"], [1, " s"], [1e-3, " ms"]])),
};

// Ticks: 1, 2 or 5 times a power of ten; of time whole parts of minutes and hours; of logarithms decades.

function ticks(low, high, most, steps = [1, 2, 5, 10]) {
  const least = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = steps === CLOCK ? steps.find((size) => size >= least) || 86400 * Math.ceil(least / 86400)
    : power * steps.find((size) => size * power >= least * 0.999999);
  const all = [];
  for (let count = Math.ceil(low / step - 1e-9); count * step <= high + 1e-9 * step; count++) all.push(count * step);
  return all;
}
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
function decades(low, high) {
  for (const digits of [[1], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]) {
    const all = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const digit of digits) all.push(digit * 10 ** power);
    }
    const inside = all.filter((value) => value >= low * 0.999999 && value <= high * 1.000001);
    if (inside.length >= 3) return inside;
  }
  return ticks(low, high, 5);
}

// One figure of curves: `data-axis` of the figure says whether they are drawn against images or seconds.
class Chart {
  constructor(figure) {
    this.figure = figure;
    this.axis = figure.dataset.axis;
    this.plot = shape("svg", { class: "plot", role: "img", tabindex: "0" });
    this.readout = element("div", { class: "readout", role: "status", hidden: "" });
    this.empty = element("p", { class: "empty" }, "The runs shown have no such curve.");
    figure.append(this.plot, this.readout, this.empty);
    this.plot.addEventListener("pointermove", (event) => {
      const box = this.plot.getBoundingClientRect();
      this.read(event.clientX - box.left, event.clientY - box.top);
    });
    this.plot.addEventListener("pointerleave", () => this.forget());
    this.plot.addEventListener("blur", () => this.forget());
    this.plot.addEventListener("keydown", (event) => this.step(event));
  }

  draw(name, logarithmic, runs) {
    this.name = name;
    this.forget();
    this.plot.replaceChildren();
    const usable = (value) => value !== null && (!logarithmic || value > 0);
    this.courses = [];
    for (const run of runs) {
      const curve = run.curves[name];
      if (!curve || !curve[this.axis]) continue;
      const points = curve.values.map((value, at) => ({ x: curve[this.axis][at], y: usable(value) ? value : null }));
      if (points.some((point) => point.y !== null)) this.courses.push({ run, points });
    }
    this.empty.hidden = this.courses.length > 0;
    this.plot.style.display = this.courses.length ? "" : "none";
    if (!this.courses.length) return;
    const width = this.width = this.plot.clientWidth || 600;
    const height = this.plot.clientHeight || 320;
    this.plot.classList.toggle("crowded", this.courses.length > 12);
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const said = this.courses.length === 1 ? "1 run" : `${this.courses.length} runs`;
    this.plot.setAttribute("aria-label", `${name} of ${said} ${this.figure.querySelector("figcaption").textContent}; ` +
      "arrow keys read values out");
    const ends = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)],
      [Infinity, -Infinity]);
    const known = this.courses.flatMap(({ points }) => points.filter((point) => point.y !== null));
    let [left, right] = ends(known.map((point) => point.x));
    let [low, high] = ends(known.map((point) => point.y));
    left = Math.min(left, 0);
    if (right === left) right = left + 1;
    if (logarithmic) [low, high] = low === high ? [low / 2, high * 2] : [low / 1.05, high * 1.05];
    else {
      const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
      low = low >= 0 ? Math.max(0, low - room) : low - room;
      high += room;
    }
    const marks = logarithmic ? decades(low, high) : ticks(low, high, 6);
    const labels = marks.map((mark) => number(name, mark));
    const margin = 14 + 7 * Math.max(...labels.map((label) => label.length));
    const [top, bottom, end] = [8, height - 26, width - 14];
    const scale = logarithmic ? Math.log : (value) => value;
    this.x = (value) => margin + ((value - left) / (right - left)) * (end - margin);
    this.y = (value) => bottom - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (bottom - top);
    this.range = { left, right, margin, end, top, bottom };
    marks.forEach((mark, at) => {
      const y = this.y(mark);
      this.plot.append(shape("line", { class: "grid", x1: margin, x2: end, y1: y, y2: y }),
        shape("text", { x: margin - 6, y: y + 4, "text-anchor": "end" }, labels[at]));
    });
    const spaces = Math.max(2, Math.floor((end - margin) / 90));
    for (const mark of ticks(left, right, spaces, this.axis === "seconds" && right > 60 ? CLOCK : undefined)) {
      const x = this.x(mark);
      this.plot.append(shape("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 5 }),
        shape("text", { x, y: bottom + 19, "text-anchor": x > end - 20 ? "end" : "middle" }, AXES[this.axis](mark)));
    }
    this.plot.append(shape("line", { class: "axis", x1: margin, x2: end, y1: bottom, y2: bottom }));
    for (const course of [...this.courses].sort((one, other) => other.run.baseline - one.run.baseline)) this.line(course);
    this.over = shape("g", {});
    this.plot.append(this.over);
  }

  line({ run, points }) {
    let path = "";
    let drawing = false;
    for (const { x, y } of points) {
      if (y !== null) path += `${drawing ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`;
      drawing = y !== null;
    }
    const kinds = `colour${run.colour}${run.baseline ? " baseline" : ""}`;
    this.plot.append(shape("path", { class: `course ${kinds}`, d: path, "data-course": run.index,
      "stroke-dasharray": DASHES[run.dash] }));
    const known = points.filter((point) => point.y !== null);
    if (known.length === 1) {
      this.plot.append(shape("circle", { class: `dot ${kinds}`, cx: this.x(known[0].x), cy: this.y(known[0].y), r: 4 }));
    }
  }

  // What the curves are worth at a place of the plot, nearest to the pointer first where they are too many.
  read(across, down) {
    if (!this.courses.length) return;
    const { left, right, margin, end, top, bottom } = this.range;
    const at = Math.min(right, Math.max(left, left + ((across - margin) / (end - margin)) * (right - left)));
    this.at = at;
    const slack = (right - left) / 40;
    let found = this.courses.flatMap(({ run, points }) => {
      const known = points.filter((point) => point.y !== null);
      const near = known.reduce((best, point) => (Math.abs(point.x - at) < Math.abs(best.x - at) ? point : best));
      const beyond = at < known[0].x - slack || at > known[known.length - 1].x + slack;
      return beyond ? [] : [{ run, ...near }];
    });
    const all = found.length;
    if (all > MOST_READ_OUT) {
      const distance = (point) => Math.abs(this.y(point.y) - down);
      found = found.sort((one, other) => distance(one) - distance(other)).slice(0, MOST_READ_OUT);
    }
    found.sort((one, other) => other.y - one.y);
    const x = this.x(at);
    this.over.replaceChildren(shape("line", { class: "cursor", x1: x, x2: x, y1: top, y2: bottom }),
      ...found.map(({ run, x, y }) => shape("circle", { class: `dot colour${run.colour}`, cx: this.x(x), cy: this.y(y), r: 4 })));
    const table = element("table");
    for (const { run, y } of found) {
      const row = table.insertRow();
      const swatch = shape("svg", { class: `swatch colour${run.colour}`, viewBox: "0 0 28 8", "aria-hidden": "true" });
      swatch.append(shape("path", { d: "M1 4H27", "stroke-dasharray": DASHES[run.dash] }));
      row.insertCell().append(swatch);
      row.insertCell().textContent = run.label;
      row.insertCell().textContent = number(this.name, y);
    }
    const place = this.axis === "images" ? `${plain(at)} images` : AXES.seconds(Number(at.toPrecision(3)));
    const more = all > found.length ? `, ${all - found.length} more runs there` : "";
    this.readout.replaceChildren(element("div", {}, place + more), table);
    this.readout.hidden = false;
    const rightHalf = x > (margin + end) / 2;
    this.readout.style.left = rightHalf ? "" : `${x + 20}px`;
    this.readout.style.right = rightHalf ? `${this.width - x + 20}px` : "";
  }

  step(event) {
    if (!this.courses.length) return;
    const { left, right, bottom } = this.range;
    const by = (right - left) / 40;
    const from = this.readout.hidden ? left : this.at;
    const to = { ArrowLeft: from - by, ArrowRight: from + by, Home: left, End: right }[event.key];
    if (event.key === "Escape") this.forget();
    if (to === undefined) return;
    event.preventDefault();
    this.read(this.x(Math.min(right, Math.max(left, to))), bottom);
  }

  forget() {
    this.readout.hidden = true;
    if (this.over) this.over.replaceChildren();
  }
}
