// Mismatches that can be frozen: what differs, why it may, and the file to run again layer by layer.

import { get, runPath, save } from "./api.js";
import { difference, h, table, whole } from "./dom.js";

const PAGE = 100;
const FIRST = 10;

/** The first few of a run, for its own page; nothing where there is none. */
export async function firstCapsules(id) {
  const { capsules, next } = await get(`${runPath(id)}/capsules`, { limit: FIRST });
  if (capsules.length === 0) return [];
  const all = `#/run/${encodeURIComponent(id)}/capsules`;
  return [h("h2", {}, "Capsules"), list(id, "The first mismatches", capsules), next === null ? null : h("p", {}, h("a", { href: all }, "All capsules"))].filter(Boolean);
}

export async function capsulesView({ parts: [id], query }) {
  const { capsules, next } = await get(`${runPath(id)}/capsules`, { limit: PAGE, after: query.get("after") || "" });
  return [
    h("h1", {}, `Capsules of run ${id}`),
    h("p", { class: "quiet" }, "Mismatches of which both sides' records are still held. ", h("code", {}, "python -m auditor.replay FILE --weights-root DIR"), " names the op."),
    list(id, "By step and sample", capsules),
    next === null ? null : h("p", {}, h("a", { href: `#/run/${encodeURIComponent(id)}/capsules?${new URLSearchParams({ after: next })}` }, "Next capsules")),
  ].filter(Boolean);
}

function list(id, caption, capsules) {
  const base = `#/run/${encodeURIComponent(id)}`;
  return h("div", { class: "wide" }, table(caption, [
    ["sample", (row) => h("a", { href: `${base}/sample/${row.step}/${encodeURIComponent(row.sample_id)}` }, `step ${row.step}, ${row.sample_id}`)],
    ["side", (row) => row.side], ["cause", (row) => row.cause || "–"], ["evidence", (row) => row.evidence || "–"],
    ["differing", (row) => `${whole(row.differing)} of ${whole(row.compared)}`, true],
    ["max |Δ|", (row) => difference(row.max_abs), true],
    ["file", (row) => saveButton(id, row.step, row.sample_id, "Save", `Save the capsule of sample ${row.sample_id}, step ${row.step}`)],
  ], capsules, "no mismatch whose records are still held"));
}

/** A button that saves one capsule, and says so where it cannot. */
export function saveButton(id, step, sample, text, label = null) {
  const said = h("span", { role: "status", "aria-live": "polite" });
  const path = `${runPath(id)}/capsules/${step}/${encodeURIComponent(sample)}`;
  const freeze = () => save(path, `${id}-${step}-${sample}.capsule`).catch((error) => { said.textContent = error.message; });
  return h("span", {}, h("button", { type: "button", onclick: freeze, "aria-label": label }, text), said);
}
