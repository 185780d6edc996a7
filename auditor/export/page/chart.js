// A curve as SVG. Arrow keys move a cursor over its points, Enter opens what is there; a table says the same in words.

import { h, s } from "./dom.js";

const WIDTH = 960;
const HEIGHT = 190;
const LEFT = 64;
const RIGHT = 14;
const TOP = 14;
const BOTTOM = 26;
const NOTHING = "Nothing was compared.";

/**
 * points: [{x, y (null: nothing was compared there), text}]. One of `one`, `two` names the colour.
 * ends: the first and the last step. log: decades on the y axis, with equal bits (0) on a line of their own below them.
 */
export function chart({ title, points, ends, colour, log, format, open }) {
  const [x0, x1] = [points[0].x, points.at(-1).x];
  const toX = (x) => LEFT + ((x - x0) / Math.max(1, x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const scale = log ? decades(points) : linear(points);
  const toY = (y) => TOP + (1 - scale.place(y)) * (HEIGHT - TOP - BOTTOM);
  const cursor = s("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const said = h("p", { class: "quiet", role: "status", "aria-live": "polite" }, "Arrow keys move over the points; Enter opens one.");
  let at = points.length - 1;

  const go = (index) => {
    at = Math.max(0, Math.min(points.length - 1, index));
    const x = toX(points[at].x);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    said.textContent = points[at].text;
  };
  const keys = { ArrowLeft: () => go(at - 1), ArrowRight: () => go(at + 1), Home: () => go(0), End: () => go(points.length - 1),
    PageUp: () => go(at - 20), PageDown: () => go(at + 20), Enter: () => open(points[at]) };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    return points.reduce((best, point, index) => (Math.abs(toX(point.x) - x) < Math.abs(toX(points[best].x) - x) ? index : best), 0);
  };
  const svg = s("svg", {
    class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "application", tabindex: 0, "aria-label": `${title}. ${summary(points, format)}`,
    onkeydown: (event) => { if (keys[event.key]) { event.preventDefault(); keys[event.key](); } },
    onpointermove: (event) => go(nearest(event)), onclick: (event) => { go(nearest(event)); open(points[at]); }, onfocus: () => go(at),
  },
  scale.ticks.map((tick) => [
    s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: toY(tick), y2: toY(tick) }),
    s("text", { x: LEFT - 6, y: toY(tick) + 4, "text-anchor": "end" }, scale.label(tick)),
  ]),
  (x0 === x1 ? [x0] : [x0, x1]).map((x, index) => s("text", { x: toX(x), y: HEIGHT - 8, "text-anchor": index ? "end" : "start" }, `step ${ends[index].toLocaleString("en")}`)),
  holes(points, toX),
  points.some((point) => point.y !== null) ? null : s("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: (TOP + HEIGHT - BOTTOM) / 2, "text-anchor": "middle" }, NOTHING),
  s("path", { class: `line ${colour}`, d: path(points, toX, toY) }),
  points.length <= 60 ? points.filter((p) => p.y !== null).map((p) => s("circle", { class: `dot ${colour}`, cx: toX(p.x), cy: toY(p.y), r: 2.5 })) : null,
  cursor);
  return h("figure", {}, h("figcaption", {}, title), svg, said);
}

/** A bar on the axis where nothing was compared, up to the neighbouring points: a gap must not look like a zero. */
function holes(points, toX) {
  const middle = (index, other) => (points[other] ? (toX(points[index].x) + toX(points[other].x)) / 2 : toX(points[index].x) + 3 * (other - index));
  return points.map((point, index) => (point.y !== null ? null
    : s("line", { class: "hole", x1: middle(index, index - 1), x2: middle(index, index + 1), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM })));
}

function path(points, toX, toY) {
  let pen = "M";
  return points.map((point) => {
    if (point.y === null) { pen = "M"; return ""; }
    const part = `${pen}${toX(point.x).toFixed(1)} ${toY(point.y).toFixed(1)}`;
    pen = "L";
    return part;
  }).join("");
}

function summary(points, format) {
  const values = points.map((point) => point.y).filter((y) => y !== null);
  if (values.length === 0) return NOTHING;
  return `Steps ${points[0].x} to ${points.at(-1).x}; from ${format(Math.min(...values))} to ${format(Math.max(...values))}.`;
}

function linear(points) {
  const top = Math.max(1, ...points.map((point) => point.y ?? 0));
  return { place: (y) => y / top, ticks: [0, top], label: (y) => y.toLocaleString("en") };
}

function decades(points) {
  const values = points.map((point) => point.y).filter((y) => y);
  const high = values.length ? Math.ceil(Math.log10(Math.max(...values))) : 0;
  const low = Math.min(high - 1, values.length ? Math.floor(Math.log10(Math.min(...values))) : -8);
  const place = (y) => (y === 0 ? 0 : 0.15 + 0.85 * ((Math.log10(y) - low) / (high - low)));
  const every = Math.ceil((high - low) / 4);
  const ticks = [0];
  for (let power = high; power >= low; power -= every) ticks.push(10 ** power);
  return { place, ticks, label: (y) => (y === 0 ? "0 (equal)" : `1e${Math.round(Math.log10(y))}`) };
}
