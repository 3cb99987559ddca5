// Elements of the page: found, made and written to. Text from data only ever becomes textContent.

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";
const NODE_COLOURS = 7;
const fields = new Map();
const colours = new Map();

// Outlines in a box from -1 to 1: with the colour they tell nodes apart, for those who see no colours too.
export const NODE_SHAPES = [
  "M-.9 0A.9 .9 0 1 0 .9 0A.9 .9 0 1 0 -.9 0Z",
  "M-.8-.8H.8V.8H-.8Z",
  "M0-1L1 .8H-1Z",
  "M0-1.1L1.1 0L0 1.1L-1.1 0Z",
  "M0 1L1-.8H-1Z",
  "M-.35-1H.35V-.35H1V.35H.35V1H-.35V.35H-1V-.35H-.35Z",
  "M-1-1L0-.4L1-1L.4 0L1 1L0 .4L-1 1L-.4 0Z",
  "M-1-.5L0-1L1-.5V.5L0 1L-1 .5Z",
];

export function field(name) {
  if (!fields.has(name)) fields.set(name, document.querySelector(`[data-test="${name}"]`));
  return fields.get(name);
}

/** Writes text, and the number behind it, only where they differ: most of a page stays as it is. */
export function write(element, text, value) {
  if (element.textContent !== text) element.textContent = text;
  if (value !== undefined) mark(element, "value", value);
}

export function mark(element, name, value) {
  const text = value === null || value === undefined ? "" : String(value);
  if (element.dataset[name] !== text) element.dataset[name] = text;
}

export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

export function nodeColour(node) {
  return `--node-${node % NODE_COLOURS}`;
}

export function nodeShape(node) {
  return NODE_SHAPES[node % NODE_SHAPES.length];
}

export function nodeGlyph(node) {
  const glyph = makeSvg("svg", { class: "glyph", viewBox: "-1.3 -1.3 2.6 2.6", "aria-hidden": "true" });
  const outline = makeSvg("path", { d: nodeShape(node) });
  outline.style.fill = `var(${nodeColour(node)})`;
  glyph.append(outline);
  return glyph;
}

/** A colour of the style sheet as a canvas takes it; a canvas knows no variables. */
export function colour(name) {
  if (!colours.has(name)) {
    const probe = make("span");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}

export function forgetColours() {
  colours.clear();
}

export function whenResized(element, draw) {
  let width = element.clientWidth;
  new ResizeObserver(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    draw();
  }).observe(element);
}
