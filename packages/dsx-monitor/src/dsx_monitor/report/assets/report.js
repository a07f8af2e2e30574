"use strict";
// Draws each panel as an SVG and redraws it when the size, the x axis, the smoothing or the choice of curves changes.
const { panels, starts } = JSON.parse(document.getElementById("data").textContent);
const state = { axis: "step", smooth: 0, at: null };
const charts = [];
const NS = "http://www.w3.org/2000/svg";
const M = { left: 62, right: 14, top: starts.length > 1 ? 26 : 10, bottom: 42 };
const DASHES = ["7 4", "2 3", "10 3 2 3"]; // of later starts: where two curves are the same, both are seen
const SPARSE = 40; // curves with fewer points get dots and no smoothing

function el(parent, name, attributes, text) {
  const node = document.createElementNS(NS, name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function short(v) {
  if (v === 0) return "0";
  const a = Math.abs(v);
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e5, "k"]])
    if (a >= size) return trim((v / (size === 1e5 ? 1e3 : size)).toPrecision(4)) + unit;
  if (a >= 1e3) return String(Math.round(v));
  return a < 1e-2 ? trim(v.toExponential(2)) : trim(v.toPrecision(4));
}
function trim(s) { return s.includes("e") ? s.replace(/\.?0+e/, "e") : s.includes(".") ? s.replace(/\.?0+$/, "") : s; }

function clock(seconds) {
  const s = Math.round(seconds), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  const two = n => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}

// Round numbers that cover [low, high] with about `count` steps.
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(f => f * power).find(s => s >= raw * 0.999);
  const result = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step)
    result.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return result;
}
function clockTicks(high, count) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
  const step = steps.find(s => s >= high / count) || 86400 * Math.ceil(high / count / 86400);
  const result = [];
  for (let v = 0; v <= high + 1e-6; v += step) result.push(v);
  return result;
}

// The exponential mean, divided by the weight it has so far, so that it starts at the first value.
function smoothed(y, weight) {
  if (!weight || y.length <= SPARSE) return y;
  let sum = 0, norm = 0;
  return y.map(v => {
    if (v === null) return null;
    sum = weight * sum + (1 - weight) * v;
    norm = weight * norm + 1 - weight;
    return sum / norm;
  });
}

// Parts of a sum: the curves of one start get areas that lie on each other. A curve that has no point at a place keeps
// its last value there; before its first it has none.
function stack(curves) {
  for (const start of new Set(curves.map(c => c.s.start))) {
    const parts = curves.filter(c => c.s.start === start && !c.s.line);
    const x = [...new Set(parts.flatMap(c => c.x))].sort((a, b) => a - b);
    let low = x.map(() => 0);
    for (const c of parts) {
      let k = -1, held = 0;
      const top = x.map((at, n) => {
        while (k + 1 < c.x.length && c.x[k + 1] <= at) { k++; if (c.s.y[k] !== null) held = c.s.y[k]; }
        return low[n] + held;
      });
      c.area = { x, low, top };
      low = top;
    }
  }
}

const origin = Math.min(...panels.flatMap(p => p.series.flatMap(s => s.t.length ? [s.t[0]] : [])));
const timed = panels.every(p => p.series.every(s => s.t.length === s.x.length));

// All charts share one x axis, so that what happened at the same moment stands at the same place.
function span() {
  let low = Infinity, high = -Infinity;
  for (const c of charts)
    for (const s of c.panel.series) for (const v of c.xs(s)) { low = Math.min(low, v); high = Math.max(high, v); }
  return [low, high];
}

class Chart {
  constructor(panel, parent) {
    this.panel = panel;
    this.hidden = new Set();
    const card = document.createElement("div");
    card.className = "chart";
    const title = document.createElement("h2");
    title.textContent = panel.title;
    const unit = document.createElement("small");
    unit.textContent = panel.unit;
    title.appendChild(unit);
    this.legend = document.createElement("div");
    this.legend.className = "legend";
    this.svg = document.createElementNS(NS, "svg");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("aria-label", panel.title);
    card.append(title, this.legend, this.svg);
    parent.appendChild(card);
    this.values = panel.series.map((series, i) => this.entry(series, i));
    this.svg.addEventListener("pointermove", e => hover(this, e));
    this.svg.addEventListener("pointerleave", () => hover(null));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  entry(series, i) {
    const button = document.createElement("button");
    button.title = series.label + " (click to hide)";
    button.setAttribute("aria-pressed", "true");
    const line = document.createElement("i");
    line.style.background = `var(--c${i % 8})`;
    const value = document.createElement("b");
    button.append(line, series.name, value);
    button.addEventListener("click", () => {
      this.hidden.has(i) ? this.hidden.delete(i) : this.hidden.add(i);
      button.setAttribute("aria-pressed", String(!this.hidden.has(i)));
      this.draw();
    });
    this.legend.appendChild(button);
    return value;
  }

  xs(series) { return state.axis === "time" ? series.t.map(t => t - origin) : series.x; }

  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const shown = this.panel.series
      .map((s, i) => ({ s, i, x: this.xs(s), y: smoothed(s.y, state.smooth) }))
      .filter(c => !this.hidden.has(c.i));
    this.shown = shown;
    if (this.panel.stacked) stack(shown);
    const allY = shown.flatMap(c => c.area ? c.area.top : c.s.y.filter(v => v !== null));
    if (!allY.length) {
      el(this.svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing to show");
      return;
    }
    let [x0, x1] = span();
    let y0 = allY.reduce((a, b) => Math.min(a, b)), y1 = allY.reduce((a, b) => Math.max(a, b));
    if (x1 === x0) x1 = x0 + 1;
    const log = this.panel.log && y0 > 0 && y1 / y0 > 20;
    const f = log ? Math.log10 : v => v;
    if (this.panel.stacked || (y0 > 0 && !log && y0 < 0.4 * y1)) y0 = 0;
    const pad = (f(y1) - f(y0)) * 0.06 || Math.abs(f(y1)) * 0.05 || 1;
    const low = y0 === 0 && !log ? 0 : f(y0) - pad, high = f(y1) + pad;
    const X = v => M.left + (v - x0) / (x1 - x0) * (width - M.left - M.right);
    const Y = v => height - M.bottom - (f(v) - low) / (high - low) * (height - M.top - M.bottom);
    this.scale = { X, Y, x0, x1 };
    this.axes(width, height, { low, high, log, x0, x1, X, Y });
    for (const { s, i, x, y, area } of shown) {
      if (area) { this.area(area, X, Y, i); continue; }
      if (y !== s.y) this.path(x, s.y, X, Y, i, s.start, "curve faint");
      this.path(x, y, X, Y, i, s.start, "curve");
    }
    this.cursor = el(this.svg, "g", {});
    this.show(state.at);
  }

  axes(width, height, { low, high, log, x0, x1, X, Y }) {
    for (const v of ticks(low, high, Math.max(2, height / 48))) {
      const value = log ? 10 ** v : v, y = Y(value);
      el(this.svg, "line", { x1: M.left, x2: width - M.right, y1: y, y2: y, class: "grid" });
      el(this.svg, "text", { x: M.left - 8, y: y + 4, "text-anchor": "end" }, short(value));
    }
    const time = state.axis === "time", marks = n => time ? clockTicks(x1, n).filter(v => v >= x0) : ticks(x0, x1, n);
    let count = Math.max(2, width / 110);
    while (marks(count).length < 2 && count < 16) count *= 2; // one number alone is no scale
    for (const v of marks(count))
      el(this.svg, "text", { x: X(v), y: height - 24, "text-anchor": "middle" }, time ? clock(v) : short(v));
    const middle = { x: (M.left + width - M.right) / 2, y: height - 7, "text-anchor": "middle" };
    el(this.svg, "text", middle, time ? "time since the start, h:mm:ss" : "samples");
    const base = height - M.bottom;
    el(this.svg, "line", { x1: M.left, x2: width - M.right, y1: base, y2: base, class: "axis" });
    if (time) return;
    for (const start of starts) {
      if (start.step <= x0 || start.step >= x1) continue;
      el(this.svg, "line", { x1: X(start.step), x2: X(start.step), y1: M.top - 4, y2: base, class: "start" });
      const right = X(start.step) > width - 150, ranks = start.ranks === 1 ? "1 process" : `${start.ranks} processes`;
      const at = { x: X(start.step) + (right ? 4 : -4), y: M.top - 8, "text-anchor": right ? "end" : "start" };
      el(this.svg, "text", at, `resumed on ${ranks}`);
    }
  }

  area({ x, low, top }, X, Y, i) {
    const edge = (ys, order) => order.map(k => `${X(x[k]).toFixed(1)},${Y(ys[k]).toFixed(1)}`).join(" ");
    const there = x.map((_, k) => k), points = `${edge(top, there)} ${edge(low, there.slice().reverse())}`;
    el(this.svg, "polygon", { points, class: "area", style: `fill:var(--c${i % 8});stroke:var(--c${i % 8})` });
  }

  path(x, y, X, Y, i, start, cls) {
    let d = "", pen = "M";
    for (let k = 0; k < y.length; k++) {
      if (y[k] === null) { pen = "M"; continue; }
      if (k && x[k] < x[k - 1]) pen = "M"; // steps that go back begin a new line
      d += `${pen}${X(x[k]).toFixed(1)},${Y(y[k]).toFixed(1)}`;
      pen = "L";
    }
    const dash = start > 1 ? `;stroke-dasharray:${DASHES[(start - 2) % DASHES.length]}` : "";
    el(this.svg, "path", { d, class: cls, style: `stroke:var(--c${i % 8})${dash}` });
    const known = y.filter(v => v !== null).length;
    if (known <= SPARSE && cls === "curve")
      for (let k = 0; k < y.length; k++)
        if (y[k] !== null)
          el(this.svg, "circle", { cx: X(x[k]), cy: Y(y[k]), r: 2.4, style: `fill:var(--c${i % 8})` });
  }

  // Values at `at` (null: the last ones) in the legend, and a line through the chart.
  show(at) {
    if (!this.scale) return;
    this.cursor.replaceChildren();
    this.values.forEach(v => { v.textContent = ""; });
    if (at !== null && at >= this.scale.x0 && at <= this.scale.x1) {
      const px = this.scale.X(at);
      el(this.cursor, "line", { x1: px, x2: px, y1: M.top, y2: this.svg.clientHeight - M.bottom, class: "cursor" });
      const right = px > this.svg.clientWidth - 80;
      const where = { x: px + (right ? -6 : 6), y: M.top + 10, "text-anchor": right ? "end" : "start" };
      el(this.cursor, "text", where, state.axis === "time" ? clock(at) : short(at));
    }
    for (const { s, i, x, y, area } of this.shown) {
      const k = at === null ? last(y) : nearest(x, y, at);
      if (k < 0) continue;
      this.values[i].textContent = s.y[k] === null ? "not finite" : short(y[k]);
      if (at === null || y[k] === null) continue;
      const style = `fill:var(--c${i % 8});stroke:var(--card);stroke-width:1.5`;
      const top = area ? area.top[area.x.indexOf(x[k])] : y[k];
      el(this.cursor, "circle", { cx: this.scale.X(x[k]), cy: this.scale.Y(top), r: 4, style });
    }
  }
}

function last(y) { let k = y.length - 1; while (k > 0 && y[k] === null) k--; return k; }
function nearest(x, y, at) {
  let best = -1, distance = Infinity;
  x.forEach((v, k) => { const d = Math.abs(v - at); if (d < distance) { distance = d; best = k; } });
  return best;
}

// One pointer, the same place in every chart.
function hover(chart, event) {
  let at = null;
  if (chart && chart.scale) {
    const box = chart.svg.getBoundingClientRect(), { x0, x1 } = chart.scale;
    at = x0 + (event.clientX - box.left - M.left) / (box.width - M.left - M.right) * (x1 - x0);
    at = Math.min(x1, Math.max(x0, at));
  }
  state.at = at;
  for (const c of charts) c.show(at);
}

for (const panel of panels)
  charts.push(new Chart(panel, document.getElementById(panel.main ? "charts" : "more-charts")));
if (!panels.some(p => !p.main)) document.getElementById("more").remove();
// Once by hand: an observer is first heard with a rendered frame, which a busy headless browser may never come to. The
// folded ones draw when unfolded.
for (const c of charts) if (c.panel.main) c.draw();
const axis = document.getElementById("axis");
if (!timed) axis.parentElement.remove();
axis.addEventListener("change", () => { state.axis = axis.value; state.at = null; charts.forEach(c => c.draw()); });
document.getElementById("smooth").addEventListener("input", e => {
  state.smooth = Number(e.target.value);
  charts.forEach(c => c.draw());
});
document.getElementById("more")?.addEventListener("toggle", () => charts.forEach(c => c.draw()));
