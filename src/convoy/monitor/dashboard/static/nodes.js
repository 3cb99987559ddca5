// The table of nodes, and the matrix of who waits for whom.

import { UNKNOWN, formatAgo, formatCompact, formatCount, formatDateTime, formatDuration, formatNumber, formatPercent, formatTimeOfDay } from "./format.js";
import { field, make, makeSvg, mark, nodeColour, nodeGlyph, write } from "./elements.js";
import { costliest, isLive, nobodyWaitsLong, nodeName } from "./state.js";

const SPARK_POINTS = 60;
const SPARK_WIDTH = 72;
const SPARK_HEIGHT = 18;
const MAX_MATRIX_NODES = 12;
const NODE_COLUMNS = {
  name: "Node", state: "State", speed: "Speed", share: "Share", waiting: "Waiting", staleness: "Stale",
  samples: "Samples", "last-seen": "Last seen", faults: "Faults", costs: "Cost the run",
};
const nodeRows = new Map();

export function renderNodes(state) {
  const body = field("nodes").tBodies[0];
  const scale = nodeScale(state);
  for (const node of state.nodes) {
    if (!nodeRows.has(node.node)) nodeRows.set(node.node, nodeRow(node.node));
    writeNodeRow(nodeRows.get(node.node), node, state, scale);
  }
  for (const [node, row] of nodeRows) {
    if (state.nodes.some((each) => each.node === node)) continue;
    row.line.remove();
    nodeRows.delete(node);
  }
  const lines = state.nodes.map((node) => nodeRows.get(node.node).line);
  if (lines.some((line, index) => body.children[index] !== line)) body.replaceChildren(...lines);
  write(field("nodes-summary"), nodesSummary(state.nodes));
  field("nodes-empty").hidden = state.nodes.length > 0;
  field("nodes-filled").hidden = state.nodes.length === 0;
}

/** Writes how long ago each node was seen: the only cells that change while nothing happens. */
export function tickNodes(state, now, live) {
  for (const node of state.nodes) {
    const row = nodeRows.get(node.node);
    if (row === undefined) continue;
    const gone = node.state === "left" || node.state === "lost";
    const text = live && !gone ? formatAgo(now - node.last_seen) : formatTimeOfDay(node.last_seen);
    writeCell(row["last-seen"], node.last_seen === null ? UNKNOWN : text, node.last_seen);
    row["last-seen"].cell.title = formatDateTime(node.last_seen);
  }
}

function nodesSummary(nodes) {
  const counts = new Map();
  for (const { state } of nodes) counts.set(state, (counts.get(state) ?? 0) + 1);
  return [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
}

/** What a full bar stands for, so that bars of all nodes can be compared. */
function nodeScale(state) {
  const shares = state.nodes.flatMap((node) => [node.share ?? 0, node.predicted_share ?? 0]);
  const speeds = state.series.speed?.columns ?? {};
  const recent = state.nodes.flatMap((node) => (speeds[node.node] ?? []).slice(-SPARK_POINTS));
  return { share: 1.1 * Math.max(1e-9, ...shares), speed: 1.05 * Math.max(1e-9, ...recent) };
}

function nodeRow(node) {
  const line = make("tr", { "data-node": node, "data-test": "node" });
  const row = { line };
  for (const [column, label] of Object.entries(NODE_COLUMNS)) {
    const main = make("span", { class: "main" });
    const detail = make("span", { class: "detail" });
    const cell = make(column === "name" ? "th" : "td", { "data-col": column, "data-label": label }, main, detail);
    if (column === "name") cell.setAttribute("scope", "row");
    row[column] = { cell, main, detail };
    line.append(cell);
  }
  row.name.cell.prepend(nodeGlyph(node));
  row.spark = makeSvg("path");
  row.spark.style.fill = `var(${nodeColour(node)})`;
  const view = { viewBox: `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`, preserveAspectRatio: "none" };
  row.speed.main.after(makeSvg("svg", { class: "spark", "aria-hidden": "true", ...view }, row.spark));
  row.share.bar = bar(row.share.main, nodeColour(node));
  row.waiting.bar = bar(row.waiting.main, "--waiting");
  return row;
}

function bar(after, colourName) {
  const fill = make("span", { class: "fill" });
  fill.style.backgroundColor = `var(${colourName})`;
  const tick = make("span", { class: "tick", hidden: "" });
  after.after(make("span", { class: "bar", "aria-hidden": "true" }, fill, tick));
  return { fill, tick };
}

function writeNodeRow(row, node, state, scale) {
  mark(row.line, "state", node.state);
  writeCell(row.name, nodeName(state, node.node), node.node, deviceText(node));
  row.name.cell.title = `joined ${formatDateTime(node.joined)}`;
  writeCell(row.state, node.state, node.state, node.state === "training" ? "" : (node.reason ?? ""));
  row.state.cell.title = node.reason ?? "";
  writeCell(row.speed, formatNumber(node.speed), node.speed);
  row.spark.setAttribute("d", sparkPath(state.series.speed?.columns[node.node] ?? [], scale.speed));
  writeShare(row.share, node, scale.share);
  writeWaiting(row.waiting, node);
  writeCell(row.staleness, formatNumber(node.staleness), node.staleness);
  writeCell(row.samples, formatCompact(node.samples), node.samples);
  row.samples.cell.title = formatCount(node.samples);
  writeCell(row.faults, formatCount(node.faults), node.faults);
  mark(row.faults.cell, "some", node.faults > 0 ? "yes" : "no");
  const makes = node.makes_wait_s > 0 ? `others waited ${formatDuration(node.makes_wait_s)}` : "";
  writeCell(row.costs, formatDuration(node.costs_s), node.costs_s, makes);
}

function writeShare(parts, node, full) {
  const asked = node.predicted_share;
  writeCell(parts, formatPercent(node.share, 1), node.share, `asks for ${formatPercent(asked, 1)}`);
  mark(parts.cell, "predicted", asked);
  fillBar(parts.bar, node.share / full, asked > 0 ? asked / full : null);
}

function writeWaiting(parts, node) {
  const waited = formatDuration(node.waiting_s);
  writeCell(parts, formatPercent(node.waiting, 1), node.waiting, `${waited} in all`);
  parts.cell.title = `waited ${waited}, worked ${formatDuration(node.busy_s)}`;
  fillBar(parts.bar, node.waiting, null);
}

function deviceText(node) {
  const process = node.pid === null || node.pid === undefined ? "" : ` \u00b7 pid ${node.pid}`;
  return `${node.device ?? UNKNOWN}${process}`;
}

function writeCell(parts, text, value, detail = "") {
  write(parts.main, text);
  write(parts.detail, detail);
  mark(parts.cell, "value", value);
}

function fillBar({ fill, tick }, part, tickPart) {
  fill.style.width = percent(part);
  tick.hidden = tickPart === null;
  if (tickPart !== null) tick.style.left = percent(tickPart);
}

function percent(part) {
  return `${(100 * Math.min(1, Math.max(0, part || 0))).toFixed(1)}%`;
}

/** The speed of late as an area from zero: how high it is shows who is slow, its outline how steady it is. */
function sparkPath(values, highest) {
  const recent = values.slice(-SPARK_POINTS);
  const width = SPARK_WIDTH / Math.max(1, recent.length);
  const areas = recent.map((value, index) => {
    if (value === null) return "";
    const [left, right] = [(index * width).toFixed(1), ((index + 1) * width).toFixed(1)];
    return `M${left} ${SPARK_HEIGHT}V${(SPARK_HEIGHT * (1 - value / highest)).toFixed(1)}H${right}V${SPARK_HEIGHT}Z`;
  });
  return areas.join("");
}

export function renderWaits(state) {
  write(field("waits-sentence"), waitsSentence(state));
  const nodes = matrixNodes(state);
  const table = nodes.length > 0 ? [waitsTable(state, nodes)] : [];
  field("waits-matrix").replaceChildren(...table);
}

/** One sentence: who holds the others up, and by how much. */
export function waitsSentence(state) {
  if (state.nodes.length === 0) return "No node has joined yet.";
  if (state.nodes.length === 1) return "One node has nobody to wait for.";
  const culprit = costliest(state);
  if (culprit === null) return "Nobody waits long.";
  const name = nodeName(state, culprit.node);
  const far = isLive(state) ? " so far" : "";
  const others = `others waited ${formatDuration(culprit.makes_wait_s)} for it`;
  const sentence = `${name} is the slowest: it cost the run ${formatDuration(culprit.costs_s)}${far}; ${others}.`;
  return nobodyWaitsLong(state) ? `Nobody waits long. ${sentence}` : sentence;
}

/** The nodes with most waiting, by or for them, in their usual order. */
function matrixNodes(state) {
  const seconds = new Map();
  for (const wait of state.waits) {
    for (const node of [wait.node, wait.for]) seconds.set(node, (seconds.get(node) ?? 0) + wait.seconds);
  }
  return [...seconds.keys()]
    .sort((a, b) => seconds.get(b) - seconds.get(a))
    .slice(0, MAX_MATRIX_NODES)
    .sort((a, b) => a - b);
}

function waitsTable(state, nodes) {
  const longest = Math.max(1e-9, ...state.waits.map((wait) => wait.seconds));
  const seconds = new Map(state.waits.map((wait) => [`${wait.node} ${wait.for}`, wait.seconds]));
  const heads = nodes.map((node) => make("th", { scope: "col" }, nodeGlyph(node), make("span", {}, nodeName(state, node))));
  const rows = nodes.map((waiter) => {
    const cells = nodes.map((culprit) => waitsCell(waiter, culprit, seconds.get(`${waiter} ${culprit}`), longest));
    return make("tr", {}, make("th", { scope: "row" }, nodeGlyph(waiter), nodeName(state, waiter)), ...cells);
  });
  const corner = make("td", { class: "corner" }, "waits \u2193 for \u2192");
  return make("table", { class: "waits" },
    make("thead", {}, make("tr", {}, corner, ...heads)), make("tbody", {}, ...rows));
}

function waitsCell(waiter, culprit, seconds, longest) {
  if (waiter === culprit) return make("td", { class: "self" });
  const known = seconds ?? 0;
  const cell = make("td", { "data-test": "waits", "data-node": waiter, "data-for": culprit, "data-seconds": known });
  cell.textContent = known > 0 ? formatDuration(known) : UNKNOWN;
  cell.style.setProperty("--heat", percent(0.8 * (known / longest)));
  return cell;
}
