// Routes: #/  #/run/R  #/run/R/capsules  #/run/R/step/N  #/run/R/sample/N/S. Each view returns what `main` holds.

import { ApiError, setToken } from "./api.js";
import { capsulesView } from "./capsules.js";
import { h, present } from "./dom.js";
import { runView } from "./run.js";
import { runsView } from "./runs.js";
import { sampleView } from "./sample.js";
import { stepView } from "./step.js";

const main = document.getElementById("main");
const state = document.getElementById("state");
let current = 0;

const ROUTES = [
  [/^$/, () => ({ view: runsView, trail: [] })],
  [/^run\/([^/]+)$/, (run) => ({ view: runView, trail: [run] })],
  [/^run\/([^/]+)\/capsules$/, (run) => ({ view: capsulesView, trail: [run, "capsules"] })],
  [/^run\/([^/]+)\/step\/(\d+)$/, (run, step) => ({ view: stepView, trail: [run, ["step", step]] })],
  [/^run\/([^/]+)\/sample\/(\d+)\/([^/]+)$/, (run, step, sample) => ({ view: sampleView, trail: [run, ["step", step], ["sample", sample]] })],
];

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  for (const [pattern, make] of ROUTES) {
    const match = pattern.exec(path);
    if (match) {
      const parts = match.slice(1).map(decoded);
      if (parts.includes(null)) break;
      return { ...make(...parts), parts, query: new URLSearchParams(query || "") };
    }
  }
  return { view: () => Promise.resolve([h("h1", {}, "No such page"), h("p", {}, h("a", { href: "#/" }, "All runs"))]), trail: [], parts: [], query: new URLSearchParams() };
}

/** A part of the address; null where it is none that anybody encoded. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return null;
  }
}

function crumbs(trail) {
  const items = [h("a", { href: "#/" }, "Runs")];
  trail.forEach((part, index) => {
    const text = Array.isArray(part) ? part.join(" ") : part;
    const run = `#/run/${encodeURIComponent(trail[0])}`;
    const href = index === 0 ? run : index === 1 && Array.isArray(part) ? `${run}/step/${part[1]}` : location.hash;
    items.push(h("a", { href }, text));
  });
  items.at(-1).setAttribute("aria-current", "page");
  document.getElementById("crumbs").replaceChildren(...items.map((item) => h("li", {}, item)));
}

/** Show the view of the address. A later call overtakes an earlier one that is still loading. */
async function show(keepFocus = false) {
  const mine = ++current;
  const { view, trail, parts, query } = route();
  crumbs(trail);
  // A view that renews itself does so without a word.
  state.textContent = keepFocus ? "" : "loading";
  let content;
  try {
    content = await view({ parts, query, refresh: () => mine === current && show(true) });
    state.textContent = "";
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    content = error.status === 401 ? tokenForm() : [h("h1", {}, "Not to be shown"), h("p", { class: "bad", role: "alert" }, error.message)];
    state.textContent = "";
  }
  if (mine !== current) return;
  main.replaceChildren(...present(content));
  document.title = `${main.querySelector("h1").textContent} · Auditor`;
  if (!keepFocus) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
}

function tokenForm() {
  const input = h("input", { type: "password", id: "token", autocomplete: "off", required: true });
  const submit = (event) => {
    event.preventDefault();
    setToken(input.value.trim());
    show();
  };
  return [
    h("h1", {}, "This auditor wants a token"),
    h("form", { class: "row", onsubmit: submit }, h("label", { for: "token" }, "Bearer token"), input, h("button", {}, "Use for this tab")),
  ];
}

addEventListener("hashchange", () => show());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
show();
