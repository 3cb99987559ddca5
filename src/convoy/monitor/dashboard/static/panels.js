// The small panels: head, answers at a glance, staleness, counts, refused updates, events.

import { formatClockDuration, formatCompact, formatCount, formatDateTime, formatDuration, formatNumber, formatPercent, formatShortDateTime, formatTimeOfDay } from "./format.js";
import { field, make, mark, nodeGlyph, write } from "./elements.js";
import { costliest, isLive, mostlyFor, nobodyWaitsLong, nodeName, slowest, waitingTrend, waitsMost } from "./state.js";

const MAX_LOG_ROWS = 200;
const COUNTED = ["events", "faults", "joins", "leaves", "checkpoints"];
const TREND_WORDS = {
  better: "Yes, less waiting", worse: "No, more waiting", steady: "Steady", unknown: "Too early to say",
};

export function renderHead(state) {
  const { run, progress } = state;
  write(field("run-name"), run.name ?? "not started yet");
  write(field("state"), run.state ?? "waiting", run.state);
  write(field("reason"), run.reason ?? "");
  renderFacts(run);
  renderProgress(progress, run);
  writeFigure("test-accuracy", formatPercent(progress.test_accuracy, 2), progress.test_accuracy);
  writeFigure("best-test-accuracy", `best ${formatPercent(progress.best_test_accuracy, 2)}`, progress.best_test_accuracy);
  writeFigure("test-loss", formatNumber(progress.test_loss), progress.test_loss);
  writeFigure("loss", formatNumber(progress.loss), progress.loss);
  writeFigure("accuracy", `accuracy ${formatPercent(progress.accuracy, 1)}`, progress.accuracy);
  writeFigure("speed", formatNumber(progress.samples_per_s), progress.samples_per_s);
  writeFigure("samples", `${formatCompact(progress.samples)} samples`, progress.samples);
  writeFigure("learning-rate", formatNumber(progress.learning_rate), progress.learning_rate);
  writeFigure("batch", `batch ${formatCount(run.batch)}`, run.batch);
  document.title = pageTitle(state);
}

/** Writes the times that go on by themselves; age is how old the run's last word is. */
export function tickHead(state, age) {
  const { run, progress } = state;
  const running = run.state === "running";
  const elapsed = run.started === null ? null : run.elapsed_s + (running ? age : 0);
  writeFigure("elapsed", formatClockDuration(elapsed), run.elapsed_s);
  writeFigure("started", run.started ? `since ${formatShortDateTime(run.started)}` : "not started", run.started);
  const left = progress.left_s === null ? null : Math.max(0, progress.left_s - (running ? age : 0));
  writeFigure("left", isLive(state) ? formatClockDuration(left) : "none", progress.left_s);
  field("started").title = formatDateTime(run.started);
  field("ends").title = formatDateTime(run.ended ?? run.updated);
  writeFigure("ends", run.ended ? `ended ${formatShortDateTime(run.ended)}` : updatedText(run), run.ended ?? run.updated);
}

function updatedText(run) {
  return run.updated ? `as of ${formatTimeOfDay(run.updated)}` : "";
}

function writeFigure(name, text, value) {
  write(field(name), text, value ?? "");
}

function pageTitle({ run, progress }) {
  const part = isLive({ run }) && progress.fraction > 0 ? `${formatPercent(progress.fraction)} ` : "";
  return `${part}${run.state ?? ""} \u00b7 ${run.name ?? "Convoy"}`;
}

function renderFacts(run) {
  const facts = {
    Model: joined(run.model, counted(run.parameters, "parameters")),
    Data: joined(run.data, counted(run.train_samples, "train"), counted(run.test_samples, "test")),
    Strategy: run.strategy,
    Executor: joined(run.executor, counted(run.threads, run.threads === 1 ? "thread" : "threads")),
    Device: run.device,
    Precision: joined(run.precision, run.memory_format),
  };
  const known = Object.entries(facts).filter(([, text]) => text);
  const entries = known.map(([name, text]) => {
    const value = make("dd", { "data-test": `fact-${name.toLowerCase()}` }, String(text));
    return make("div", {}, make("dt", {}, name), value);
  });
  field("facts").replaceChildren(...entries);
}

function joined(...texts) {
  return texts.filter(Boolean).join(", ");
}

function counted(number, what) {
  return number ? `${formatCompact(number)} ${what}` : "";
}

function renderProgress(progress, run) {
  const track = field("progress");
  const fraction = progress.fraction ?? 0;
  track.firstElementChild.style.width = `${(100 * fraction).toFixed(2)}%`;
  track.setAttribute("aria-valuenow", (100 * fraction).toFixed(1));
  mark(track, "value", progress.fraction);
  mark(track, "state", run.state);
  write(field("fraction"), progress.fraction > 0 ? formatPercent(progress.fraction, 1) : "", progress.fraction);
  write(field("position"), progress.steps > 0 ? positionText(progress) : "");
}

function positionText(progress) {
  const epoch = `epoch ${formatCount(progress.epoch)} of ${formatCount(progress.epochs)}`;
  const step = `step ${formatCount(progress.step)} of ${formatCount(progress.steps)}`;
  const samples = `${formatCount(progress.samples)} of ${formatCount(progress.total_samples)} samples`;
  return [epoch, step, samples].join(" \u00b7 ");
}

/** Answers the three questions that the page is for. */
export function renderAnswers(state) {
  writeAnswer("who-is-slow", ...slowAnswer(state));
  writeAnswer("who-waits", ...waitsAnswer(state));
  writeAnswer("getting-better", ...trendAnswer(state));
}

function trendAnswer(state) {
  const { verdict, first, now } = waitingTrend(state);
  const word = TREND_WORDS[verdict];
  if (verdict === "unknown") return [word, "waiting was not measured often enough yet", verdict];
  const late = isLive(state) ? "now" : "at last";
  const change = `nodes waited ${formatPercent(first, 1)} of the time at first, ${formatPercent(now, 1)} ${late}`;
  return [word, change, verdict];
}

function slowAnswer(state) {
  const node = costliest(state) ?? slowest(state);
  if (node === null) return ["Nobody", "no node holds the others up", ""];
  const part = state.run.elapsed_s > 0 ? ` (${formatPercent(node.costs_s / state.run.elapsed_s, 1)} of its time)` : "";
  const cost = node.costs_s > 0 ? `cost the run ${formatDuration(node.costs_s)}${part}` : "cost the run nothing so far";
  return [nodeName(state, node.node), `${cost}; ${formatNumber(node.speed)} samples/s`, node.node];
}

function waitsAnswer(state) {
  const node = waitsMost(state);
  if (node === null || state.nodes.length < 2) return ["Nobody", "no node waits for another", ""];
  const culprit = mostlyFor(state, node.node);
  const whom = culprit ? `, mostly for ${nodeName(state, culprit.for)} (${formatDuration(culprit.seconds)})` : "";
  const detail = `${formatPercent(node.waiting, 1)} of the time${whom}`;
  if (nobodyWaitsLong(state)) return ["Nobody for long", `${nodeName(state, node.node)} the longest: ${detail}`, node.node];
  return [nodeName(state, node.node), detail, node.node];
}

function writeAnswer(name, word, detail, value) {
  const answer = field(name);
  if (answer.dataset.value !== String(value)) {
    answer.querySelector(".glyph")?.remove();
    if (typeof value === "number") answer.querySelector(".word").before(nodeGlyph(value));
  }
  write(answer.querySelector(".word"), word);
  write(answer.querySelector(".detail"), detail);
  mark(answer, "value", value);
}

export function renderStaleness(state) {
  const { staleness } = state;
  const counts = staleness?.counts ?? [];
  const sum = counts.reduce((all, count) => all + count, 0);
  const mean = `${formatCount(sum)} updates, ${formatNumber(staleness?.mean)} versions behind on average.`;
  write(field("staleness-sentence"), staleness === null ? "This strategy has no stale updates." : mean);
  const most = Math.max(1, ...counts);
  field("staleness").replaceChildren(...counts.map((count, place) => {
    const label = `${place}${place === counts.length - 1 && place > 0 ? "+" : ""}`;
    return stalenessBar(count, label, count / most);
  }));
}

function stalenessBar(count, label, height) {
  const column = make("span", { class: "column-bar", "aria-hidden": "true" });
  column.style.height = `${(100 * height).toFixed(1)}%`;
  const number = make("span", { class: "number" }, formatCompact(count));
  const title = `${formatCount(count)} updates were ${label} versions behind`;
  return make("li", { "data-test": "staleness-bar", "data-staleness": label, "data-count": count, title },
    make("span", { class: "well" }, number, column), make("span", { class: "place" }, label));
}

export function renderCounts(state) {
  const entries = COUNTED.map((name) => {
    const value = state.counts[name];
    const number = make("dd", { "data-test": `count-${name}`, "data-value": value ?? "" }, formatCount(value));
    return make("div", {}, make("dt", {}, name), number);
  });
  field("counts").replaceChildren(...entries);
}

export function renderRefused(state) {
  field("refused-empty").hidden = state.refused.length > 0;
  field("refused").replaceChildren(...state.refused.map(({ reason, count }) => {
    const number = make("span", { class: "number" }, formatCount(count));
    return make("li", { "data-test": "refused-row", "data-count": count }, number, String(reason));
  }));
}

/** The list of events: newest first, only ever added to at its top, and never longer than MAX_LOG_ROWS. */
export class EventList {
  constructor() {
    this.list = field("log");
    this.level = "all";
    this.last = -Infinity;
  }

  filter(level, state) {
    this.level = level;
    this.clear();
    this.show(state);
  }

  clear() {
    this.list.replaceChildren();
    this.last = -Infinity;
  }

  show(state) {
    const newest = state.log.at(-1)?.number ?? -Infinity;
    const fresh = state.log.filter((entry) => entry.number > this.last && this.passes(entry));
    this.last = newest;
    this.list.prepend(...fresh.slice(-MAX_LOG_ROWS).reverse().map((entry) => eventRow(entry, state)));
    while (this.list.childElementCount > MAX_LOG_ROWS) this.list.lastElementChild.remove();
    const empty = this.list.childElementCount === 0;
    write(field("log-empty"), this.level === "all" ? "nothing happened yet" : "no warnings and no faults");
    field("log-empty").hidden = !empty;
    this.list.hidden = empty;
  }

  passes(entry) {
    return this.level === "all" || entry.level !== "info";
  }
}

function eventRow({ number, time, event, node, level, text }, state) {
  const moment = make("time", { title: formatDateTime(time) }, formatTimeOfDay(time));
  const who = node === null || node === undefined ? "" : nodeName(state, node);
  const about = { "data-level": level, "data-number": number, "data-event": event ?? "", "data-node": node ?? "" };
  const cell = (name, content) => make("span", { class: name }, content);
  return make("li", { "data-test": "log-row", ...about },
    moment, cell("level", level), cell("who", who), cell("text", text ?? ""));
}
