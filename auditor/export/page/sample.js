// One sample: the judgement, its tokens coloured by |Δ|, and the three log-probabilities of each with their bits.

import { get, runPath } from "./api.js";
import { saveButton } from "./capsules.js";
import { difference, h, logprob, table, whole } from "./dom.js";
import { renew } from "./renew.js";
import { verdictOf } from "./step.js";

const CLASSES = [[0, "equal bits"], [1e-6, "up to 1e-6"], [1e-4, "up to 1e-4"], [1e-2, "up to 0.01"], [Infinity, "more"], [null, "NaN, infinite or missing"]];
const SHOWN = 2000;

export async function sampleView({ parts: [id, step, name], query, refresh }) {
  const sample = await get(`${runPath(id)}/samples/${step}/${encodeURIComponent(name)}`);
  if (sample.judgement.cause === "searching") renew(refresh, 5);
  const tokens = tokensOf(sample);
  const from = Number(query.get("from") || 0);
  return [
    h("h1", {}, `Sample ${name}, step ${step}`),
    h("p", {}, verdictOf(sample.judgement), explanation(sample.judgement)),
    layers(sample.judgement, sample),
    causes(sample.judgement),
    capsule(id, step, name, sample),
    ...(tokens.length ? tokenViews(tokens, from, (start) => `#/run/${encodeURIComponent(id)}/sample/${step}/${encodeURIComponent(name)}?from=${start}`) : [h("p", {}, "Neither side's tokens are here: not reported, or retired.")]),
    h("h2", {}, "What each side said of itself"),
    sides(sample),
  ].filter(Boolean);
}

function explanation(judgement) {
  switch (judgement.verdict) {
    case "match": return ` · ${whole(judgement.compared)} tokens, equal bits`;
    case "mismatch":
      return ` · wrong side: ${judgement.side} · ${whole(judgement.differing)} of ${whole(judgement.compared)} tokens differ, first at response token ${judgement.first_index ?? "–"}`
        + ` (${judgement.rollout_bits} / ${judgement.trainer_bits}) · max |Δ| ${difference(judgement.max_abs)}, ${judgement.max_ulp === null ? "–" : whole(judgement.max_ulp)} ULP`
        + (judgement.reference_error ? ` · the reference: ${judgement.reference_error}` : "");
    case "not_comparable":
      return ` · condition ${judgement.condition}: ${judgement.field} is ${judgement.rollout_value} for the rollout and ${judgement.trainer_value} for the trainer`;
    case "pending": return ` · waits for the ${judgement.missing}`;
    default: return ` · ${judgement.reference_error}`;
  }
}

/** Where it began, as far as the digests of layers say it; nothing where no side reports any. */
function layers(judgement, { rollout, trainer }) {
  const count = Math.max(rollout?.layer_digests?.length ?? 0, trainer?.layer_digests?.length ?? 0);
  const at = (layer) => (count && layer === count ? "behind the last layer" : `at layer ${layer}`);
  const said = [
    judgement.first_layer != null && `the sides part ${at(judgement.first_layer)}`,
    ...["rollout", "trainer"].map((side) => judgement[`${side}_first_layer`] != null && `the ${side} leaves the reference ${at(judgement[`${side}_first_layer`])}`),
  ].filter(Boolean);
  if (said.length) return h("p", {}, `Where it began, by the digests of layers (counted from 0): ${said.join("; ")}.`);
  return null;
}

/** A sample with both sides can be frozen, to be run again layer by layer. */
function capsule(id, step, name, sample) {
  if (!sample.rollout || !sample.trainer) return null;
  return h("p", { class: "row" }, saveButton(id, step, name, "Save as a capsule"),
    h("span", { class: "quiet" }, "for ", h("code", {}, "python -m auditor.replay")));
}

function causes({ cause, causes: found }) {
  if (cause === "searching") return h("p", {}, "Why: being searched for, or soon. The verdict does not wait for it.");
  if (cause === "undiagnosed") {
    return h("p", {}, found.length ? `Why: ${found[0].evidence}. As a capsule: ` : "Why: not searched for, as samples of this step or run were that came before it, or in vain. As a capsule: ",
      h("code", {}, "python -m auditor.replay --causes SECONDS"));
  }
  if (!found.length) return null;
  return table("Suspected causes, the likeliest first", [
    ["cause", (row) => row.cause], ["score", (row) => difference(row.score), true],
    ["side", (row) => row.side ?? "–"], ["evidence", (row) => row.evidence],
  ], found);
}

/** One object a token of the response, and the prompt before it as ids only. */
function tokensOf({ rollout, trainer, reference_logprobs: reference, reference_bits: referenceBits }) {
  const ids = rollout?.tokens ?? trainer?.tokens ?? [];
  const prompt = (rollout ?? trainer)?.prompt_len ?? 0;
  return ids.map((id, index) => {
    const at = index - prompt;
    if (at < 0) return { id, index, prompt: true };
    const token = {
      id, index, at, masked: (rollout ?? trainer).mask[at] === false,
      rollout: rollout?.logprobs[at] ?? null, trainer: trainer?.logprobs[at] ?? null, reference: reference?.[at] ?? null,
      bits: { rollout: rollout?.bits[at] ?? "", trainer: trainer?.bits[at] ?? "", reference: referenceBits?.[at] ?? "" },
    };
    const sides = Object.values(token.bits).filter(Boolean);
    token.differs = !token.masked && new Set(sides).size > 1;
    token.delta = token.rollout === null || token.trainer === null ? null : token.trainer - token.rollout;
    token.far = furthest(token);
    return token;
  });
}

/** The largest |Δ| between any two of the values that are there; null where one is not finite. */
function furthest(token) {
  const known = ["rollout", "trainer", "reference"].filter((side) => token.bits[side]).map((side) => token[side]);
  if (known.length < 2 || known.includes(null)) return null;
  return Math.max(...known) - Math.min(...known);
}

function colour(token) {
  if (!token.differs) return "d0";
  if (token.far === null) return "d5";
  return `d${Math.max(1, CLASSES.findIndex(([limit]) => limit !== null && token.far <= limit))}`;
}

function describe(token) {
  if (token.prompt) return `prompt token ${token.index}, id ${token.id}`;
  const side = (name) => (token.bits[name] ? `${name} ${logprob(token[name])} (${token.bits[name]})` : `${name} –`);
  return `response token ${token.at}, id ${token.id}${token.masked ? ", masked" : ""}: ${side("rollout")}, ${side("trainer")}, ${side("reference")}; ${token.differs ? `differs, |Δ| ${difference(token.far)}` : "equal bits"}`;
}

function tokenViews(tokens, from, link) {
  const shown = tokens.slice(from, from + SHOWN);
  const response = shown.filter((token) => !token.prompt);
  const first = tokens.find((token) => token.differs);
  const said = h("p", { class: "mono", role: "status", "aria-live": "polite" }, "Choose a token: click, or arrow keys in the list.");
  return [
    h("h2", {}, "Tokens, coloured by the largest |Δ| between the sides"),
    h("p", { class: "legend" }, CLASSES.map(([, text], index) => h("span", {}, h("span", { class: `swatch d${index}` }), text)), h("span", { class: "differs" }, "underlined: bits differ"), h("span", { class: "quiet" }, "dashed: prompt; italic: masked")),
    h("p", { class: "row" },
      from > 0 ? h("a", { href: link(Math.max(0, from - SHOWN)) }, "Earlier tokens") : null,
      from + SHOWN < tokens.length ? h("a", { href: link(from + SHOWN) }, `Later tokens (of ${whole(tokens.length)})`) : null,
      first && !shown.includes(first) ? h("a", { href: link(Math.floor(first.index / SHOWN) * SHOWN) }, "To the first difference") : null),
    strip(shown, said, shown.includes(first) ? shown.indexOf(first) : 0), said,
    h("h2", {}, "Log-probabilities"),
    h("div", { class: "wide" }, table("Response tokens", [
      ["#", (t) => String(t.at), true], ["id", (t) => String(t.id), true],
      ["rollout", (t) => value(t, "rollout"), true], ["trainer", (t) => value(t, "trainer"), true], ["reference", (t) => value(t, "reference"), true],
      ["trainer − rollout", (t) => (t.masked ? "masked" : h("span", { class: t.differs ? "bad" : null }, difference(t.delta))), true],
    ], response, "only the prompt is on this page")),
  ];
}

/** A value and its bits; marked where they are not those of the reference. */
function value(token, side) {
  const bits = token.bits[side];
  if (!bits) return "–";
  const wrong = !token.masked && token.bits.reference && bits !== token.bits.reference;
  return h("span", { class: wrong ? "mono bad" : "mono" }, logprob(token[side]), " ", h("span", { class: "bits" }, bits),
    wrong ? h("span", { class: "unseen" }, " differs from the reference") : null);
}

/** A list with one stop for the Tab key; arrows move in it. */
function strip(tokens, said, start) {
  const items = tokens.map((token, index) => h("li", {
    role: "option", id: `token-${token.index}`, "aria-selected": "false", "aria-label": describe(token), tabindex: index === start ? 0 : -1,
    class: [colour(token), token.prompt && "prompt", token.masked && "masked", token.differs && "differs"].filter(Boolean).join(" "),
    onclick: () => choose(index),
  }, String(token.id)));
  let at = start;
  const choose = (index) => {
    items[at].setAttribute("aria-selected", "false");
    items[at].tabIndex = -1;
    at = Math.max(0, Math.min(items.length - 1, index));
    items[at].setAttribute("aria-selected", "true");
    items[at].tabIndex = 0;
    items[at].focus();
    said.textContent = describe(tokens[at]);
  };
  const next = (direction) => {
    for (let index = at + direction; tokens[index]; index += direction) if (tokens[index].differs) return index;
    return at;
  };
  const keys = { ArrowRight: () => choose(at + 1), ArrowLeft: () => choose(at - 1), Home: () => choose(0), End: () => choose(items.length - 1),
    ArrowDown: () => choose(next(1)), ArrowUp: () => choose(next(-1)), Enter: () => choose(at) };
  return h("ul", { class: "tokens mono", role: "listbox", "aria-label": "Tokens; left and right move, up and down go to the next difference",
    onkeydown: (event) => { if (keys[event.key]) { event.preventDefault(); keys[event.key](); } } }, items);
}

/** A long list by its first items: the API has all of them. */
function brief(items) {
  return items.length > 16 ? `${items.slice(0, 8)}, … ${items.length} in all` : items;
}

function sides(sample) {
  const fields = ["source_id", "weight_version", "weight_digest", "contract_digest", "environment", "sampling", "layout", "positions", "prompt_len", "tokens_digest"];
  const show = (side, field) => {
    if (!side) return "not reported";
    const found = side[field];
    return h("code", {}, typeof found === "object" ? Object.entries(found).map(([name, item]) => `${name}=${Array.isArray(item) ? `[${brief(item)}]` : item}`).join(" ") : String(found));
  };
  const same = (field) => JSON.stringify(sample.rollout?.[field]) === JSON.stringify(sample.trainer?.[field]);
  return h("div", { class: "wide" }, table("Rollout and trainer", [
    ["field", (field) => h("span", { class: same(field) || field === "source_id" ? null : "bad" }, field)],
    ["rollout", (field) => show(sample.rollout, field)], ["trainer", (field) => show(sample.trainer, field)],
  ], fields));
}
