// The charts. Each is described by a plan, from state to lines; uPlot draws them.

import { UNKNOWN, formatAxisTime, formatCompact, formatNumber, formatPercent } from "./format.js";
import { colour, make, makeSvg, mark, nodeColour, nodeGlyph, nodeShape, whenResized, write } from "./elements.js";
import { nodeName } from "./state.js";

const CHART_HEIGHT = 190;
const MARKER_SIZE = 3.6;
const MARKER_SPACING = 90;
const DASHED = [5, 4];
const FONT = "11px system-ui, sans-serif";
const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 604800,
];
const charts = [];

const PLANS = {
  loss: {
    axis: "choice", format: formatNumber, tick: formatCompact, range: fromZero,
    lines: (state, x) => learningLines(state, x, "loss"),
  },
  accuracy: {
    axis: "choice", format: (value) => formatPercent(value, 1), tick: formatPercent, range: upToOne,
    lines: (state, x) => learningLines(state, x, "accuracy"),
  },
  pace: {
    axis: "choice", format: formatNumber, tick: formatCompact, range: fromZero, right: formatNumber,
    lines: paceLines,
  },
  shares: {
    axis: "time", format: (value) => formatPercent(value, 1), tick: formatPercent, range: fromZero,
    lines: shareLines,
  },
  speed: {
    axis: "time", format: formatNumber, tick: formatCompact, range: fromZero,
    lines: (state) => nodeLines(state, "speed"),
  },
  waiting: {
    axis: "time", format: (value) => formatPercent(value, 1), tick: formatPercent, range: fromZero,
    lines: (state) => nodeLines(state, "waiting"),
  },
};

export function startCharts() {
  for (const [name, plan] of Object.entries(PLANS)) {
    const host = document.querySelector(`[data-chart="${name}"]`);
    charts.push(new Chart(host, name, plan));
  }
}

export function renderCharts(state, axis) {
  for (const chart of charts) chart.show(state, chart.plan.axis === "time" ? "time" : axis);
}

/** Draws again with the colours of the other theme. */
export function recolourCharts() {
  for (const chart of charts) chart.plot?.redraw(false, true);
}

function learningLines(state, x, what) {
  return [
    line(state.series.train, x, what, { label: "train", colour: "--train" }),
    line(state.series.test, x, `train_${what}`, { label: "train, epoch", colour: "--train", points: true, bare: true }),
    line(state.series.test, x, `test_${what}`, { label: "test", colour: "--test", dash: DASHED, points: true }),
  ];
}

function paceLines(state, x) {
  return [
    line(state.series.train, x, "samples_per_s", { label: "samples/s", colour: "--train" }),
    line(state.series.train, x, "learning_rate", {
      label: "learning rate", colour: "--test", dash: DASHED, scale: "right",
    }),
  ];
}

function shareLines(state) {
  const predicted = nodeLines(state, "predicted").map((each) => {
    return { ...each, dash: DASHED, shape: null, quiet: true };
  });
  return [...nodeLines(state, "real"), ...predicted];
}

function nodeLines(state, name) {
  const series = state.series[name];
  const nodes = Object.keys(series?.columns ?? {}).filter((column) => column !== "time").map(Number);
  return nodes.sort((a, b) => a - b).map((node) => {
    return line(series, "time", String(node), {
      label: nodeName(state, node), colour: nodeColour(node), shape: nodeShape(node), node,
    });
  });
}

function line(series, x, column, look) {
  return { ...look, x: series?.columns[x] ?? [], y: series?.columns[column] ?? [] };
}

function fromZero(plot, low, high) {
  return [0, high > 0 ? 1.08 * high : 1];
}

function upToOne(plot, low, high) {
  if (low === null) return [0, 1];
  const margin = Math.max(0.02, 0.08 * (high - low));
  return [Math.max(0, low - margin), Math.min(1, high + margin)];
}

/** Lines of a few clocks on one: where a line has no value of its own, uPlot draws through. */
function aligned(lines) {
  const tables = new Map();
  for (const each of lines) {
    if (!tables.has(each.x)) tables.set(each.x, []);
    tables.get(each.x).push(each);
  }
  const joined = uPlot.join([...tables].map(([x, members]) => [x, ...members.map((each) => each.y)]));
  const order = [...tables.values()].flat();
  return [joined[0], ...lines.map((each) => joined[1 + order.indexOf(each)])];
}

class Chart {
  constructor(host, name, plan) {
    this.host = host;
    this.plan = plan;
    this.canvas = make("div", { class: "plot", role: "img" });
    this.legend = make("ul", { class: "legend" });
    this.empty = make("p", { class: "empty" }, "nothing measured yet");
    this.hidden = new Set();
    this.plot = null;
    this.key = null;
    mark(host, "test", `chart-${name}`);
    host.append(this.canvas, this.legend, this.empty);
    whenResized(host, () => this.plot?.setSize(this.size()));
  }

  show(state, axis) {
    const lines = this.plan.lines(state, axis).filter((each) => each.x.length > 0 && each.y.length > 0);
    this.empty.hidden = lines.length > 0;
    mark(this.host, "points", Math.max(0, ...lines.map((each) => each.x.length)));
    const key = JSON.stringify([axis, lines.map((each) => [each.label, each.quiet])]);
    const values = lines.flatMap((each) => [each.x, each.y]);
    if (key !== this.key) this.rebuild(key, lines, axis);
    else if (values.every((column, index) => column === this.values[index])) return;
    this.values = values;
    if (lines.length === 0) return;
    this.data = aligned(lines);
    this.plot.setData(this.data);
    this.writeLegend(null);
  }

  rebuild(key, lines, axis) {
    this.plot?.destroy();
    this.plot = null;
    this.key = key;
    this.lines = lines;
    this.entries = lines.filter((each) => !each.quiet).map((each) => this.legendEntry(each));
    this.legend.replaceChildren(...this.entries.map((entry) => entry.item));
    if (lines.length > 0) this.plot = new uPlot(this.options(lines, axis), undefined, this.canvas);
  }

  size() {
    return { width: Math.max(120, this.host.clientWidth), height: CHART_HEIGHT };
  }

  options(lines, axis) {
    const { plan } = this;
    return {
      ...this.size(),
      padding: [8, plan.right ? 0 : 18, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, y: false, sync: { key: axis }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: plan.range }, right: { range: fromZero } },
      axes: chartAxes(plan, axis),
      series: [{}, ...lines.map((each) => this.seriesOf(each))],
      hooks: {
        draw: [(plot) => drawMarkers(plot, lines)],
        setLegend: [(plot) => this.writeLegend(plot.legend.idxs)],
      },
    };
  }

  seriesOf(each) {
    return {
      label: each.label,
      scale: each.scale ?? "y",
      show: !this.hidden.has(each.label),
      stroke: () => colour(each.colour),
      width: each.bare ? 0 : each.quiet ? 1.25 : 1.75,
      dash: each.dash,
      points: {
        show: Boolean(each.points),
        size: each.bare ? 5 : 6,
        width: 1.25,
        stroke: () => colour(each.colour),
        fill: () => colour(each.bare ? each.colour : "--panel"),
      },
    };
  }

  /** Lines of one label (real and predicted of a node) share an entry, and come and go together. */
  legendEntry(each) {
    const value = make("span", { class: "value" });
    const button = make("button", { type: "button", class: "quiet" }, swatch(each), each.label, value);
    const press = () => button.setAttribute("aria-pressed", String(!this.hidden.has(each.label)));
    press();
    button.addEventListener("click", () => {
      if (!this.hidden.delete(each.label)) this.hidden.add(each.label);
      press();
      this.lines.forEach((other, index) => {
        if (other.label === each.label) this.plot.setSeries(index + 1, { show: !this.hidden.has(each.label) });
      });
    });
    return { label: each.label, value, item: make("li", {}, button) };
  }

  /** Writes what lies under the cursor; the last values if there is none. */
  writeLegend(places) {
    if (!this.data) return;
    const values = this.lines.map((each, index) => this.valueText(each, index + 1, places));
    const texts = this.entries.map(({ label, value }) => {
      const own = values.filter((text, index) => this.lines[index].label === label).join(" / ");
      write(value, own);
      return `${label} ${own}`;
    });
    const caption = this.host.firstElementChild.textContent;
    if (!places) this.canvas.setAttribute("aria-label", `${caption}. Last: ${texts.join(", ")}`);
  }

  valueText(each, index, places) {
    const place = places?.[index] ?? null;
    const value = place === null ? lastKnown(this.data[index]) : this.data[index][place];
    if (value === null || value === undefined) return UNKNOWN;
    return each.scale === "right" ? this.plan.right(value) : this.plan.format(value);
  }
}

function chartAxes(plan, axis) {
  const common = {
    font: FONT,
    stroke: () => colour("--muted"),
    grid: { stroke: () => colour("--line"), width: 1 },
    ticks: { show: false },
  };
  const texts = (format) => (plot, values) => values.map((value) => format(value));
  const x = axis === "time" ? { values: texts(formatAxisTime), incrs: TIME_STEPS } : { values: texts(formatCompact) };
  const axes = [
    { ...common, ...x, space: 52, size: 26, gap: 4 },
    { ...common, values: texts(plan.tick), space: 34, size: 46, gap: 4 },
  ];
  if (plan.right) {
    const right = { scale: "right", side: 1, grid: { show: false }, values: texts(formatCompact) };
    axes.push({ ...common, ...right, space: 34, size: 46, gap: 4 });
  }
  return axes;
}

function lastKnown(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) {
    if (values[index] !== null && values[index] !== undefined) return values[index];
  }
  return null;
}

/** A marker of the node's shape now and then along its line, and one at its end. */
function drawMarkers(plot, lines) {
  const spacing = MARKER_SPACING * devicePixelRatio;
  lines.forEach((each, index) => {
    if (!each.shape || !plot.series[index + 1].show) return;
    const [xs, ys] = [plot.data[0], plot.data[index + 1]];
    // Lines that lie on each other would hide each other's markers, were they not staggered.
    let next = plot.bbox.left + spacing * ((index + 1) / (lines.length + 1));
    let last = null;
    for (let place = 0; place < xs.length; place += 1) {
      if (ys[place] === null || ys[place] === undefined) continue;
      last = place;
      const left = plot.valToPos(xs[place], "x", true);
      if (left < next) continue;
      drawMarker(plot, each, left, plot.valToPos(ys[place], "y", true));
      next += spacing * Math.ceil((left - next + 1) / spacing);
    }
    if (last === null) return;
    drawMarker(plot, each, plot.valToPos(xs[last], "x", true), plot.valToPos(ys[last], "y", true));
  });
}

function drawMarker(plot, each, left, top) {
  const { ctx } = plot;
  const size = MARKER_SIZE * devicePixelRatio;
  ctx.save();
  ctx.translate(left, top);
  ctx.scale(size, size);
  ctx.lineWidth = 0.5;
  ctx.strokeStyle = colour("--panel");
  ctx.fillStyle = colour(each.colour);
  const outline = new Path2D(each.shape);
  ctx.stroke(outline);
  ctx.fill(outline);
  ctx.restore();
}

function swatch(each) {
  if (each.shape) return nodeGlyph(each.node);
  const dot = makeSvg("circle", { cx: 9, cy: 4, r: 2.5 });
  const sample = each.bare ? dot : makeSvg("path", { d: "M0 4H18", "stroke-width": 2 });
  if (each.dash) sample.setAttribute("stroke-dasharray", each.dash.join(" "));
  if (each.bare) sample.style.fill = `var(${each.colour})`;
  sample.style.stroke = `var(${each.colour})`;
  return makeSvg("svg", { class: "swatch", viewBox: "0 0 18 8", "aria-hidden": "true" }, sample);
}
