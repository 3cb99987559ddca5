// The timeline: what ran where in the last step or pipeline cycle, as a Gantt chart.

import { formatCount, formatDuration, formatNumber, formatPercent } from "./format.js";
import { field, make, makeSvg, mark, whenResized, write } from "./elements.js";

const ROW_HEIGHT = 26;
const BAR_HEIGHT = 20;
const AXIS_HEIGHT = 22;
const CHARACTER_WIDTH = 6.4;
const MAX_SPANS = 3000;
const MAX_LABEL_WIDTH = 130;
// Each kind has a pattern besides its colour: lines of this path over it, if any.
const KINDS = {
  forward: "",
  error: "M0 6L6 0",
  gradient: "M0 3H6",
  combine: "M3 0V6",
  update: "M0 0L6 6M0 6L6 0",
  other: "M0 0L6 6",
};

let drawn = null;

export function startTimeline() {
  whenResized(field("timeline"), () => drawTimeline(drawn));
}

export function renderTimeline(state) {
  const { timeline } = state;
  drawn = timeline;
  const title = timeline ? `of the last ${timeline.kind}, number ${formatCount(timeline.step)}` : "";
  write(field("timeline-title"), title);
  write(field("timeline-sentence"), timeline ? timelineSentence(timeline) : "The executor gives no timeline.");
  for (const name of ["step", "kind", "balance"]) mark(field("timeline"), name, timeline?.[name]);
  mark(field("timeline"), "makespan", timeline?.makespan_s);
  mark(field("timeline"), "bound", timeline?.bound_s);
  mark(field("timeline"), "spans", timeline?.spans.length ?? 0);
  drawTimeline(timeline);
}

function timelineSentence({ kind, makespan_s: makespan, bound_s: bound, balance, spans }) {
  const parts = [`The ${kind} took ${formatDuration(makespan)}`];
  if (bound > 0) {
    const times = `${formatNumber(makespan / bound)} times the ${formatDuration(bound)} that no schedule can beat`;
    parts[0] += `, ${times}`;
  }
  if (balance !== null && balance !== undefined) parts.push(`balance ${formatPercent(balance)}`);
  const left = spans.length - MAX_SPANS;
  if (left > 0) parts.push(`the shortest ${formatCount(left)} of ${formatCount(spans.length)} spans are not drawn`);
  return `${parts.join("; ")}.`;
}

function drawTimeline(timeline) {
  const host = field("timeline");
  field("timeline-legend").replaceChildren(...(timeline ? timelineLegend(timeline) : []));
  host.replaceChildren(...(timeline ? [gantt(timeline, host.clientWidth)] : []));
}

function gantt(timeline, width) {
  const longest = Math.max(4, ...timeline.rows.map((name) => name.length));
  const left = Math.min(MAX_LABEL_WIDTH, longest * CHARACTER_WIDTH + 12);
  const height = timeline.rows.length * ROW_HEIGHT + AXIS_HEIGHT;
  const end = Math.max(1e-12, timeline.makespan_s, ...timeline.spans.map((span) => span[2]));
  const at = (seconds) => left + (seconds / end) * (width - left - 2);
  const label = `Timeline: ${timeline.rows.length} rows, ${timeline.spans.length} spans in ${formatDuration(timeline.makespan_s)}`;
  return makeSvg("svg", { width, height, role: "img", "aria-label": label },
    makeSvg("defs", {}, ...Object.entries(KINDS).map(([kind, lines]) => kindPattern(kind, lines))),
    ...ganttAxis(end, at, height), ...ganttRows(timeline.rows, left, width),
    ...drawnSpans(timeline.spans).map((span) => ganttSpan(span, at)));
}

/** The longest spans, critical ones last, so that their outlines lie on top. */
function drawnSpans(spans) {
  const length = ([, start, stop]) => stop - start;
  const longestFirst = [...spans].sort((a, b) => length(b) - length(a));
  return longestFirst.slice(0, MAX_SPANS).sort((a, b) => a[5] - b[5]);
}

function kindPattern(kind, lines) {
  return makeSvg("pattern", { id: `kind-${kind}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
    makeSvg("rect", { class: `kind-${kind}`, width: 6, height: 6 }), makeSvg("path", { class: "hatch", d: lines }));
}

function ganttAxis(end, at, height) {
  return [0, 0.25, 0.5, 0.75, 1].flatMap((part) => {
    const left = at(part * end);
    const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
    const text = makeSvg("text", { x: left, y: height - 6, "text-anchor": anchor, class: "axis" });
    text.textContent = formatDuration(part * end);
    return [makeSvg("line", { x1: left, x2: left, y1: 0, y2: height - AXIS_HEIGHT, class: "grid" }), text];
  });
}

function ganttRows(names, left, width) {
  return names.flatMap((name, row) => {
    const text = makeSvg("text", { x: 0, y: row * ROW_HEIGHT + 17 });
    text.textContent = fitted(name, left - 8);
    const bottom = (row + 1) * ROW_HEIGHT - 0.5;
    return [text, makeSvg("line", { x1: 0, x2: width, y1: bottom, y2: bottom, class: "grid" })];
  });
}

function ganttSpan([row, start, stop, label, kind, critical], at) {
  const known = kind in KINDS ? kind : "other";
  const [left, top] = [at(start), row * ROW_HEIGHT + (ROW_HEIGHT - BAR_HEIGHT) / 2];
  const width = Math.max(0.75, at(stop) - left - 0.5);
  const box = makeSvg("rect", {
    x: left, y: top, width, height: BAR_HEIGHT, rx: Math.min(3, width / 2),
    fill: `url(#kind-${known})`, class: critical ? "critical" : "span",
  });
  const title = makeSvg("title");
  const length = `${formatDuration(stop - start)}, from ${formatDuration(start)}`;
  title.textContent = `${label} (${kind}${critical ? ", critical" : ""}): ${length}`;
  return makeSvg("g", { "data-test": "span", "data-row": row, "data-kind": known, "data-critical": critical },
    box, title, ...spanCaption(fitted(label, width - 8), known, left + 4, top + 14));
}

function spanCaption(text, kind, x, y) {
  if (text === "") return [];
  const caption = makeSvg("text", { x, y, class: "caption" });
  // A halo in the span's own colour keeps its pattern from running through the letters.
  caption.style.stroke = `var(--kind-${kind})`;
  caption.textContent = text;
  return [caption];
}

function fitted(text, width) {
  const room = Math.floor(width / CHARACTER_WIDTH);
  if (text.length <= room) return text;
  return room > 3 ? `${text.slice(0, room - 1)}\u2026` : "";
}

function timelineLegend(timeline) {
  const present = Object.keys(KINDS).filter((kind) => timeline.spans.some((span) => span[4] === kind));
  const entries = present.map((kind) => legendItem(kind, `url(#kind-${kind})`, "span"));
  if (timeline.spans.some((span) => span[5])) entries.push(legendItem("critical path", "none", "critical"));
  return entries;
}

function legendItem(text, fill, className) {
  const box = makeSvg("rect", { x: 1, y: 1, width: 16, height: 10, rx: 2, fill, class: className });
  const view = { class: "swatch timeline-swatch", viewBox: "0 0 18 12", "aria-hidden": "true" };
  return make("li", {}, makeSvg("svg", view, box), text);
}
