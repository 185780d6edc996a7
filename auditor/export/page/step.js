// One step: what was found, and its samples.

import { get, runPath } from "./api.js";
import { difference, h, table, whole } from "./dom.js";
import { statistics, verdicts } from "./run.js";
import { finding } from "./runs.js";

const PAGE = 100;
const VERDICTS = ["mismatch", "not_comparable", "match", "pending", "error"];

export async function stepView({ parts: [id, step], query }) {
  const verdict = query.get("verdict") || "";
  const after = query.get("after") || "";
  const [totals, page] = await Promise.all([
    get(`${runPath(id)}/steps/${step}`),
    get(`${runPath(id)}/steps/${step}/samples`, { limit: PAGE, verdict, after }),
  ]);
  const base = `#/run/${encodeURIComponent(id)}`;
  const link = (chosen, from = "") => `${base}/step/${step}?${new URLSearchParams({ verdict: chosen, after: from })}`;
  return [
    h("h1", {}, `Step ${step} of run ${id}`),
    h("p", {}, finding(totals), ` · ${whole(totals.samples)} samples · ${whole(totals.compared_tokens)} tokens compared · max |Δ| ${difference(totals.max_abs)}`),
    h("nav", { class: "row", "aria-label": "Samples by verdict" },
      h("a", { href: link(""), "aria-current": verdict === "" ? "true" : null }, "all"),
      VERDICTS.filter((name) => totals.by_verdict[name]).map((name) =>
        h("a", { href: link(name), "aria-current": verdict === name ? "true" : null }, `${name} (${whole(totals.by_verdict[name])})`))),
    h("div", { class: "wide" }, table("Samples", [
      ["sample", (row) => h("a", { href: `${base}/sample/${step}/${encodeURIComponent(row.sample_id)}` }, row.sample_id)],
      ["verdict", (row) => verdictOf(row.judgement)],
      ["side", (row) => (row.judgement.verdict === "mismatch" ? row.judgement.side : "")],
      ["why", (row) => why(row.judgement)],
      ["compared", (row) => whole(row.judgement.compared), true],
      ["mismatched", (row) => whole(row.judgement.differing), true],
      ["max |Δ|", (row) => (row.judgement.compared ? difference(row.judgement.max_abs) : "–"), true],
      ["reference", (row) => row.judgement.reference.replace("_", " ")],
    ], page.samples)),
    page.next === null ? null : h("p", {}, h("a", { href: link(verdict, page.next) }, "Next samples")),
    h("div", { class: "columns" }, verdicts(totals), statistics(totals)),
  ].filter(Boolean);
}

/** The verdict in the colour of its weight; explained differences are no alarm. */
export function verdictOf(judgement) {
  const kind = judgement.explained_by_arithmetic ? "warn" : { match: "good", mismatch: "bad" }[judgement.verdict] || "warn";
  const text = judgement.explained_by_arithmetic ? "explained by arithmetic" : judgement.verdict.replace("_", " ");
  return h("span", { class: kind }, text);
}

/** The condition that failed, the side that is waited for, the suspected cause: what there is of them. */
function why({ condition, missing, cause }) {
  const said = cause === "searching" ? "cause is searched for" : cause;
  return [condition, missing && `waits for the ${missing}`, said && condition ? `suspected: ${said}` : said].filter(Boolean).join("; ");
}
