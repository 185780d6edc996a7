// One run: its two curves, what was found and why, what was covered, and its steps.

import { get, runPath } from "./api.js";
import { firstCapsules } from "./capsules.js";
import { chart } from "./chart.js";
import { counts, difference, h, percent, table, time, whole } from "./dom.js";
import { renew } from "./renew.js";
import { finding } from "./runs.js";

const PAGE = 50;
const FRESH_SECONDS = 600;

export async function runView({ parts: [id], query, refresh }) {
  const mismatching = query.get("only") === "mismatching";
  const first = Number(query.get("first") || 0);
  const range = query.get("last") ? { first, last: Number(query.get("last")) } : { first };
  const [run, curve, steps, capsules] = await Promise.all([
    get(runPath(id)),
    get(`${runPath(id)}/curve`, { points: 400 }),
    get(`${runPath(id)}/steps`, { ...range, mismatching, limit: PAGE }),
    firstCapsules(id),
  ]);
  renew(refresh, Date.now() / 1000 - run.last_at < FRESH_SECONDS ? 5 : 60);
  return [
    h("h1", {}, `Run ${id}`),
    h("p", {}, finding(run), ` · ${whole(run.samples)} samples in ${whole(run.steps)} steps · first record ${time(run.first_at)}, last ${time(run.last_at)}`),
    ...curves(id, curve.points),
    ...capsules,
    h("div", { class: "columns" }, verdicts(run), statistics(run)),
    ...stepList(id, steps, first, mismatching),
  ];
}

function curves(id, points) {
  if (points.length === 0) return [h("p", { class: "quiet" }, "No step has been reported.")];
  const where = (p) => (p.first_step === p.last_step ? `step ${p.first_step}` : `steps ${p.first_step} to ${p.last_step}`);
  const open = ({ point }) => {
    const run = `#/run/${encodeURIComponent(id)}`;
    location.hash = point.first_step === point.last_step ? `${run}/step/${point.first_step}`
      : `${run}?first=${point.first_step}&last=${point.last_step}${point.mismatched_tokens ? "&only=mismatching" : ""}`;
  };
  const ends = [points[0].first_step, points.at(-1).last_step];
  const merged = points.some((p) => p.steps > 1) ? "; each point is the worst of its steps" : "";
  const series = (value, text) => points.map((point) => ({ x: point.last_step, y: point.compared_tokens ? value(point) : null, point,
    text: `${where(point)}: ${point.compared_tokens ? text(point) : "nothing compared"}${point.incomplete ? `, ${point.incomplete} incomplete` : ""}` }));
  return [
    chart({ title: `Mismatched tokens a step${merged}`, colour: "one", log: false, format: whole, open, ends,
      points: series((p) => p.most_mismatched, (p) => `${whole(p.mismatched_tokens)} of ${whole(p.compared_tokens)} tokens mismatched`) }),
    chart({ title: `Largest |Δ log-probability| a step${merged}`, colour: "two", log: true, format: difference, open, ends,
      points: series((p) => p.max_abs, (p) => `max |Δ| ${difference(p.max_abs)}`) }),
    points.some((p) => !p.compared_tokens) ? h("p", { class: "quiet" }, h("span", { class: "gap" }), "on the axis: nothing was compared there") : null,
    h("details", {}, h("summary", {}, "The curves as a table"), table("Points of both curves", [
      ["steps", where], ["compared", (p) => whole(p.compared_tokens), true], ["mismatched", (p) => whole(p.mismatched_tokens), true],
      ["max |Δ|", (p) => difference(p.max_abs), true], ["recomputed", (p) => whole(p.recomputed_tokens), true],
      ["of those wrong", (p) => whole(p.recomputed_mismatched), true], ["not comparable", (p) => whole(p.not_comparable), true],
    ], points)),
  ];
}

export function verdicts(totals) {
  return h("section", {}, h("h2", {}, "Verdicts"),
    counts("Samples by verdict", "verdict", totals.by_verdict, "no sample"),
    counts("Not comparable, by the condition that failed", "condition", totals.by_condition, "none"),
    counts("Mismatches by the side that is wrong", "side", totals.by_side, "none"),
    counts("Mismatches by suspected cause", "cause", totals.by_cause, "none"),
    counts("Waiting for a side", "side", totals.missing, "none"));
}

export function statistics(totals) {
  const rows = Object.entries(totals.drift).filter(([name]) => name !== "tokens");
  return h("section", {}, h("h2", {}, "Coverage and statistics"), coverage(totals),
    table("Statistics (docs/metrics.md says who uses which name)",
      [["statistic", (row) => h("code", {}, row[0])], ["value", (row) => difference(row[1]), true]], rows));
}

/** What recomputing a share of the samples buys, as the auditor works it out. */
function coverage(totals) {
  const done = totals.by_reference.done || 0, skipped = totals.by_reference.skipped || 0;
  const compared = (totals.by_verdict.match || 0) + (totals.by_verdict.mismatch || 0);
  const missed = Object.entries(totals.detection?.missed ?? {}).sort((a, b) => a[0] - b[0]);
  return [
    h("p", {}, `Compared: ${whole(totals.compared_tokens)} tokens, every pair. Recomputed by the reference: ${whole(totals.recomputed_tokens)} tokens in ${whole(done)} of ${whole(compared)} samples (${percent(done, compared)}).${skipped ? ` ${whole(skipped)} were chosen and found no room to wait.` : ""}`),
    table("A fault that both sides share is missed", [
      ["if it is on", (row) => (row[0] === "1" ? "every sample" : `1 in ${whole(Math.round(1 / row[0]))} samples`)], ["with probability", (row) => difference(row[1]), true],
    ], missed, "no sample whose sides agree"),
    totals.weight_versions ? h("p", {}, versions(...totals.weight_versions)) : null,
  ];
}

const versions = (first, last) => (first === last ? `Weight version ${first}.` : `Weight versions ${first} to ${last}.`);

function stepList(id, { steps, next }, first, mismatching) {
  const base = `#/run/${encodeURIComponent(id)}`;
  const filter = mismatching ? "&only=mismatching" : "";
  return [
    h("h2", {}, "Steps"),
    h("p", { class: "row" },
      h("a", { href: `${base}?${mismatching ? "" : "only=mismatching"}` }, mismatching ? "All steps" : "Only mismatching steps"),
      first > 0 ? h("a", { href: `${base}?${filter}` }, "From the first step") : null,
      next !== null ? h("a", { href: `${base}?first=${next}${filter}` }, "Next steps") : null),
    h("div", { class: "wide" }, table(mismatching ? "Mismatching steps" : `Steps from ${first}`, [
      ["step", (step) => h("a", { href: `${base}/step/${step.step}` }, String(step.step))],
      ["finding", finding], ["samples", (step) => whole(step.samples), true],
      ["compared", (step) => whole(step.compared_tokens), true], ["mismatched", (step) => whole(step.mismatched_tokens), true],
      ["max |Δ|", (step) => difference(step.max_abs), true], ["recomputed", (step) => whole(step.recomputed_tokens), true],
    ], steps)),
  ];
}
