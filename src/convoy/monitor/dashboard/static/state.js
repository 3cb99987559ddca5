// What is known of the run, how a delta changes it, and what it says about slowness and waiting.
// Pure: nothing here looks at a clock or at the page, and no state is changed after it was made.

const MAX_LOG_ENTRIES = 500;
const LIVE_STATES = ["waiting", "running", "paused"];
const LITTLE_WAITING = 0.03;
const CLEAR_CHANGE = 0.02;
const ENOUGH_POINTS = 8;

export function emptyState() {
  return {
    run: {}, progress: {}, series: {}, nodes: [], waits: [], staleness: null,
    refused: [], timeline: null, log: [], counts: {},
  };
}

export function fromSnapshot(snapshot) {
  const { series, log, ...sections } = snapshot;
  return apply(emptyState(), { reset: true, sections, series, log });
}

/** Whether the delta continues what is known; if not, something was missed and all must be asked again. */
export function fits(state, delta) {
  if (delta.reset) return true;
  return Object.entries(delta.series ?? {}).every(([name, tail]) => {
    return !tail.from || continues(state.series[name], tail);
  });
}

export function apply(state, delta) {
  const before = delta.reset ? emptyState() : state;
  return {
    ...before,
    ...delta.sections,
    series: withTails(before.series, delta.series ?? {}),
    log: withEntries(before.log, delta.log),
  };
}

function withTails(series, tails) {
  const names = Object.keys(tails);
  if (names.length === 0) return series;
  const after = { ...series };
  for (const name of names) after[name] = withTail(series[name], tails[name]);
  return after;
}

function withTail(known, tail) {
  const { generation, columns } = tail;
  if (!continues(known, tail)) return { generation, columns };
  const from = lengthOf(known.columns);
  const more = lengthOf(columns);
  const names = new Set([...Object.keys(known.columns), ...Object.keys(columns)]);
  const joined = {};
  // A node that came or went in between is missing in one of both.
  for (const name of names) {
    joined[name] = (known.columns[name] ?? nulls(from)).concat(columns[name] ?? nulls(more));
  }
  return { generation, columns: joined };
}

function continues(known, tail) {
  if (known === undefined || known.generation !== tail.generation) return false;
  return (tail.from ?? 0) === lengthOf(known.columns);
}

function lengthOf(columns) {
  return columns.time?.length ?? 0;
}

function nulls(count) {
  return new Array(count).fill(null);
}

function withEntries(log, told) {
  const entries = Array.isArray(told) ? told : (told?.entries ?? []);
  const last = log.at(-1)?.number ?? -Infinity;
  const fresh = entries.filter((entry) => entry.number > last);
  return fresh.length === 0 ? log : log.concat(fresh).slice(-MAX_LOG_ENTRIES);
}

export function isLive(state) {
  return LIVE_STATES.includes(state.run.state);
}

/** The node's own name; people count from 1, and nodes of one machine may share a name. */
export function nodeName(state, node) {
  const name = state.nodes.find((candidate) => candidate.node === node)?.name;
  if (!name) return `node ${node + 1}`;
  const shared = state.nodes.filter((candidate) => candidate.name === name).length > 1;
  return shared ? `${name} (${node + 1})` : name;
}

/** The part of all nodes' time that went by in waiting; null while nothing was measured. */
export function waitingOverall(state) {
  const waited = total(state.nodes, "waiting_s");
  const time = waited + total(state.nodes, "busy_s");
  return time > 0 ? waited / time : null;
}

export function nobodyWaitsLong(state) {
  const waiting = waitingOverall(state);
  return waiting === null || waiting < LITTLE_WAITING;
}

/** The node that cost the run the most time, or null if none did. */
export function costliest(state) {
  return largest(state.nodes, "costs_s");
}

/** The node with the lowest speed of those that train, or null if there is nothing to compare. */
export function slowest(state) {
  const measured = state.nodes.filter((node) => node.state === "training" && node.speed > 0);
  if (measured.length < 2) return null;
  return measured.reduce((slow, node) => (node.speed < slow.speed ? node : slow));
}

export function waitsMost(state) {
  return largest(state.nodes, "waiting");
}

/** Whom the node waited for longest: {"for", "seconds"} or null. */
export function mostlyFor(state, node) {
  return largest(state.waits.filter((wait) => wait.node === node), "seconds");
}

/** Waiting at first and now, and what that means: better | worse | steady | unknown. */
export function waitingTrend(state) {
  const points = meansOfNodes(state.series.waiting?.columns ?? {});
  if (points.length < ENOUGH_POINTS) return { verdict: "unknown", first: null, now: null };
  const first = mean(points.slice(0, Math.ceil(points.length / 4)));
  const now = mean(points.slice(-Math.max(3, Math.ceil(points.length / 10))));
  if (Math.abs(now - first) < CLEAR_CHANGE) return { verdict: "steady", first, now };
  return { verdict: now < first ? "better" : "worse", first, now };
}

/** At each time, the mean over the nodes that were there; times without any are left out. */
function meansOfNodes(columns) {
  const nodes = Object.keys(columns).filter((name) => name !== "time").map((name) => columns[name]);
  return (columns.time ?? [])
    .map((time, place) => nodes.map((values) => values[place]).filter((value) => value !== null))
    .filter((values) => values.length > 0)
    .map(mean);
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function largest(items, key) {
  const positive = items.filter((item) => item[key] > 0);
  if (positive.length === 0) return null;
  return positive.reduce((best, item) => (item[key] > best[key] ? item : best));
}

function total(items, key) {
  return items.reduce((sum, item) => sum + (item[key] ?? 0), 0);
}
