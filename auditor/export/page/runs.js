// The list of runs.

import { get } from "./api.js";
import { difference, h, table, time, whole } from "./dom.js";
import { renew } from "./renew.js";

/** The one sentence on a run or a step: green only where something was compared and all of it agreed. */
export function finding(counts) {
  const wrong = counts.mismatched_tokens + counts.recomputed_mismatched;
  const mismatches = counts.by_verdict.mismatch || 0;
  if (mismatches - (counts.by_side.none || 0) > 0 || wrong > 0) {
    return h("span", { class: "bad" }, `${whole(mismatches)} of ${whole(counts.samples)} samples mismatch`);
  }
  if (counts.compared_tokens === 0) return h("span", { class: "warn" }, "nothing compared");
  if (counts.by_verdict.not_comparable || counts.by_verdict.error) {
    return h("span", { class: "warn" }, `${whole((counts.by_verdict.not_comparable || 0) + (counts.by_verdict.error || 0))} samples not comparable`);
  }
  return h("span", { class: "good" }, "equal bits");
}

export async function runsView({ refresh }) {
  const { runs } = await get("/runs", { limit: 1000 });
  renew(refresh, runs.length ? 30 : 5);
  if (runs.length === 0) {
    return [
      h("h1", {}, "Runs"),
      h("p", {}, "The ledger is empty: no engine and no trainer has reported yet."),
      h("p", { class: "quiet" }, "A job reports with auditor.client.AuditClient; its run appears here with its first record."),
    ];
  }
  const columns = [
    ["run", (run) => h("a", { href: `#/run/${encodeURIComponent(run.run_id)}` }, run.run_id)],
    ["finding", finding],
    ["steps", (run) => whole(run.steps), true],
    ["tokens compared", (run) => whole(run.compared_tokens), true],
    ["mismatched", (run) => whole(run.mismatched_tokens), true],
    ["max |Δ|", (run) => difference(run.max_abs), true],
    ["recomputed", (run) => whole(run.recomputed_tokens), true],
    ["last record", (run) => time(run.last_at)],
  ];
  return [h("h1", {}, "Runs"), h("div", { class: "wide" }, table("The last active first", columns, runs))];
}
