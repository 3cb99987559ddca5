// Numbers and times as people read them. What is not known is a dash.

export const UNKNOWN = "\u2013";
const THIN_SPACE = "\u202f";
const MINUTE = 60;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function formatCount(value) {
  return known(value) ? COUNT.format(value) : UNKNOWN;
}

export function formatCompact(value) {
  return known(value) ? COMPACT.format(value) : UNKNOWN;
}

/** Three significant digits, so that 0.0123 and 1,234 both say enough. */
export function formatNumber(value) {
  if (!known(value)) return UNKNOWN;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100) return COUNT.format(value);
  if (size < 0.001) return value.toExponential(1);
  return value.toFixed(Math.max(0, 2 - Math.floor(Math.log10(size))));
}

export function formatPercent(fraction, digits = 0) {
  return known(fraction) ? `${(100 * fraction).toFixed(digits)}${THIN_SPACE}%` : UNKNOWN;
}

/** A duration in its two largest units: "0.42 s", "12.3 s", "4 min 12 s", "2 h 05 min", "3 d 4 h". */
export function formatDuration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 0.0995) return `${formatNumber(1000 * seconds)}${THIN_SPACE}ms`;
  if (seconds < 0.995) return `${seconds.toFixed(2)}${THIN_SPACE}s`;
  if (seconds < 59.95) return `${seconds.toFixed(1)}${THIN_SPACE}s`;
  return formatLongDuration(Math.round(seconds));
}

/** A duration that a person watches tick: whole seconds only. */
export function formatClockDuration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  const whole = Math.floor(Math.max(0, seconds));
  return whole < MINUTE ? `${whole}${THIN_SPACE}s` : formatLongDuration(whole);
}

function formatLongDuration(seconds) {
  const padded = (value) => String(Math.floor(value)).padStart(2, "0");
  if (seconds < HOUR) return `${Math.floor(seconds / MINUTE)} min ${padded(seconds % MINUTE)} s`;
  if (seconds < DAY) return `${Math.floor(seconds / HOUR)} h ${padded((seconds % HOUR) / MINUTE)} min`;
  return `${Math.floor(seconds / DAY)} d ${Math.floor((seconds % DAY) / HOUR)} h`;
}

/** A place on a time axis: "0:45", "12:30", "2:05:00". */
export function formatAxisTime(seconds) {
  const parts = [Math.floor((seconds % HOUR) / MINUTE), Math.floor(seconds % MINUTE)];
  const text = parts.map((part) => String(part).padStart(2, "0")).join(":");
  return seconds >= HOUR ? `${Math.floor(seconds / HOUR)}:${text}` : text.replace(/^0/, "");
}

export function formatAgo(seconds) {
  if (!known(seconds)) return UNKNOWN;
  return seconds < 1 ? "now" : `${formatClockDuration(seconds)} ago`;
}

export function formatTimeOfDay(unix) {
  if (!known(unix)) return UNKNOWN;
  return new Date(1000 * unix).toLocaleTimeString("en-GB");
}

/** For where there is little room: "17 Nov, 10:22". */
export function formatShortDateTime(unix) {
  if (!known(unix)) return UNKNOWN;
  const date = new Date(1000 * unix);
  const day = date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return `${day}, ${date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })}`;
}

export function formatDateTime(unix) {
  if (!known(unix)) return UNKNOWN;
  const date = new Date(1000 * unix);
  return `${date.toLocaleDateString("sv-SE")} ${date.toLocaleTimeString("en-GB")}`;
}
