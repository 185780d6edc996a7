// Elements without a framework. Everything from the API enters as text, never as HTML.

/** Make an element. Children are elements or strings; null and false are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  return fill(element, attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...present(children));
  return element;
}

/** Children in one list, without those that are null, false or missing. */
export function present(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== false && child !== undefined);
}

/** A table. columns: [heading, cell of a row, is it a number]. */
export function table(caption, columns, rows, empty = "nothing") {
  if (rows.length === 0) return h("p", { class: "quiet" }, `${caption}: ${empty}`);
  const heads = columns.map(([name, , number]) => h("th", { scope: "col", class: number ? "n" : null }, name));
  const body = rows.map((row) =>
    h("tr", {}, columns.map(([, cell, number]) => h("td", { class: number ? "n" : null }, cell(row)))),
  );
  return h("div", { class: "scroll" },
    h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, heads)), h("tbody", {}, body)));
}

/** A table of names and counts, the largest first. heading: what the names are. */
export function counts(caption, heading, byName, empty) {
  const rows = Object.entries(byName).sort((a, b) => b[1] - a[1]);
  return table(caption, [[heading, (row) => row[0]], ["samples", (row) => whole(row[1]), true]], rows, empty);
}

export const whole = (value) => value.toLocaleString("en");

/** A difference of log-probabilities. An exact zero is written as 0, nothing compared as a dash. */
export function difference(value) {
  if (value === null || value === undefined) return "–";
  return value === 0 ? "0" : value.toPrecision(3).replace(/\.?0+(e|$)/, "$1");
}

/** A log-probability with as many digits as tell every fp32 from its neighbours. */
export const logprob = (value) => (value === null ? "not finite" : value.toPrecision(9));

export const time = (seconds) => new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19) + "Z";
export const percent = (part, all) => (all ? `${((100 * part) / all).toPrecision(3).replace(/\.0+$/, "")} %` : "–");
