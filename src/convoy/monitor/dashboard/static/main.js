// The page: gets the state, from the server or from a report, and shows what of it changed.

import { formatClockDuration, formatTimeOfDay } from "./format.js";
import { apply, emptyState, fits, fromSnapshot, isLive } from "./state.js";
import { field, forgetColours, write } from "./elements.js";
import { recolourCharts, renderCharts, startCharts } from "./charts.js";
import { renderNodes, renderWaits, tickNodes } from "./nodes.js";
import { renderTimeline, startTimeline } from "./timeline.js";
import { EventList, renderAnswers, renderCounts, renderHead, renderRefused, renderStaleness, tickHead } from "./panels.js";

const RENDER_EVERY_MS = 300;
const TICK_MS = 1000;
const RETRY_MS = 2000;
const THEME_KEY = "convoy-theme";
const DARK_SYSTEM = matchMedia("(prefers-color-scheme: dark)");

/** Shows states, at most every RENDER_EVERY_MS and only the panels whose part of the state changed. */
class Page {
  constructor(report) {
    this.report = report;
    this.state = emptyState();
    this.shown = {};
    this.scheduled = false;
    this.axis = "time";
    this.told = Date.now();
    this.lost = null;
    this.events = new EventList();
    this.panels = [
      [["run", "progress"], renderHead],
      [["run", "nodes", "waits", "series"], renderAnswers],
      [["nodes", "series"], renderNodes],
      [["series", "nodes", "axis"], () => renderCharts(this.state, this.axis)],
      [["run", "nodes", "waits"], renderWaits],
      [["staleness"], renderStaleness],
      [["timeline"], renderTimeline],
      [["counts"], renderCounts],
      [["refused"], renderRefused],
      [["log"], () => this.events.show(this.state)],
    ];
  }

  update(state) {
    this.state = state;
    this.told = Date.now();
    window.convoyState = state;
    this.schedule();
  }

  /** Deltas that come in one interval, or while the page is hidden, are drawn together. */
  schedule() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.render();
      setTimeout(() => {
        this.scheduled = false;
        if (this.differs([...Object.keys(this.state), "axis"])) this.schedule();
      }, RENDER_EVERY_MS);
    });
  }

  render() {
    for (const [parts, draw] of this.panels) {
      if (this.differs(parts)) draw(this.state);
    }
    this.shown = { ...this.state, axis: this.axis };
    this.tick();
  }

  differs(parts) {
    return parts.some((part) => this.shown[part] !== (part === "axis" ? this.axis : this.state[part]));
  }

  tick() {
    if (this.state.run.state === undefined) return;
    const now = Date.now();
    const live = !this.report && isLive(this.state);
    tickHead(this.state, live ? ((this.lost ?? now) - this.told) / 1000 : 0);
    tickNodes(this.state, now / 1000, live);
  }

  /** What happened is read aloud once; the time since then only stands there. */
  tickBanner() {
    const banner = field("banner");
    banner.hidden = this.lost === null;
    if (this.lost === null) return;
    const known = this.state.run.state !== undefined;
    const over = known && !isLive(this.state);
    const since = formatClockDuration((Date.now() - this.lost) / 1000);
    const asOf = known ? ` This is what was known at ${formatTimeOfDay(this.told / 1000)}.` : "";
    banner.dataset.over = over ? "yes" : "no";
    write(field("banner-what"), over ? "The run is over, and its server is gone." : "Connection lost, trying again.");
    write(field("banner-since"), over ? asOf : `For ${since} now.${asOf}`);
  }
}

/** Follows the server's stream, and starts over whenever it ends or something was missed. */
class Stream {
  constructor(page) {
    this.page = page;
  }

  connect() {
    this.source = new EventSource("api/stream");
    this.source.onmessage = (message) => this.take(JSON.parse(message.data));
    this.source.onerror = () => this.lose();
  }

  take(delta) {
    if (!fits(this.page.state, delta)) {
      this.source.close();
      this.lose();
      return;
    }
    // A server that started again may number its events otherwise.
    if (delta.reset) this.page.events.clear();
    this.page.lost = null;
    this.page.tickBanner();
    this.page.update(apply(this.page.state, delta));
  }

  lose() {
    this.page.lost ??= Date.now();
    this.page.tickBanner();
    // The browser tries again by itself, unless the server answered with an error.
    if (this.source.readyState === EventSource.CLOSED) setTimeout(() => this.connect(), RETRY_MS);
  }
}

/** The reader's choice of theme; without one, the system's. */
function startTheme() {
  applyTheme(storedTheme());
  DARK_SYSTEM.addEventListener("change", () => applyTheme(storedTheme()));
  field("theme").addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    applyTheme(theme);
    try {
      localStorage.setItem(THEME_KEY, theme);
    } catch {
      // A page from a file, or a private window, may have no storage: the choice lasts while it is open.
    }
  });
}

function storedTheme() {
  try {
    return localStorage.getItem(THEME_KEY);
  } catch {
    return null;
  }
}

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : DARK_SYSTEM.matches;
}

function applyTheme(theme) {
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  write(field("theme"), isDark() ? "Light theme" : "Dark theme");
  forgetColours();
  recolourCharts();
}

function onChoice(name, choose) {
  for (const input of document.querySelectorAll(`input[name="${name}"]`)) {
    input.addEventListener("change", () => choose(input.value));
  }
}

function start() {
  const snapshot = document.getElementById("snapshot");
  startTheme();
  startCharts();
  startTimeline();
  const page = new Page(snapshot !== null);
  onChoice("level", (level) => page.events.filter(level, page.state));
  onChoice("axis", (axis) => {
    page.axis = axis;
    page.schedule();
  });
  if (snapshot !== null) {
    page.update(fromSnapshot(JSON.parse(snapshot.textContent)));
    return;
  }
  new Stream(page).connect();
  setInterval(() => {
    page.tick();
    page.tickBanner();
  }, TICK_MS);
}

start();
