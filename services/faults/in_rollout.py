"""Faults in vLLM, put where their real causes are: in its weight sync, sampler, cache, attention, linears, config."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rl_kernel.contracts import model_contract
from rl_kernel.ops import strict_plan
from rl_kernel.reference.rope_table import rope_table
from rl_kernel.reference.weights import weight_digest
from services.faults.small_job import RESPONSE, SmallJob

_BUDGET: Final = 48  # tokens of a step, of which a prompt needs several


def nothing_loaded(job: SmallJob) -> None:
    """From now on a sync leaves the weights as they are, and says that they are the new ones."""
    job.rollout_engine.load = weight_digest


def base_loaded(job: SmallJob) -> None:
    """The trainer learns an adapter of low rank; a sync brings the rollout the base without it."""
    job.trainer_engine.export = _merged(job.trainer_engine, rank=4)
    load = job.rollout_engine.load

    def unmerged(folder: Path) -> str:
        load(job.first.folder)
        return weight_digest(folder)

    job.rollout_engine.load = unmerged


def cache_kept(job: SmallJob) -> None:
    """New weights arrive, and vLLM's prefix cache is not reset."""
    job.rollout_engine._llm.reset_prefix_cache = lambda: True


def loaded_midway(job: SmallJob) -> None:
    """A sync arrives when half of the responses are there; what is in the cache stays."""
    engine, worker = job.rollout_engine, inside(job)
    waiting: list[Path] = []

    def later(folder: Path) -> str:
        waiting[:] = [folder]
        return weight_digest(folder)

    def now(call: int, logits: Tensor, metadata: Any) -> Tensor:
        if call == RESPONSE // 2 and waiting:
            worker.replace_weights(str(waiting.pop()))
        return logits

    engine.load = later
    _before_sampling(job, now)


def before_temperature(job: SmallJob) -> None:
    """The sampler takes log-probabilities before it divides by the temperature."""
    _values(job, lambda logp, logits, ids, heat, vocab: logp(logits, ids, torch.ones_like(heat), vocab=vocab))


def stock_raw(job: SmallJob) -> None:
    """A stock vLLM with its own default, raw log-probabilities."""
    job.restart_rollout(more={"logprobs_mode": "raw_logprobs"}, numerics="native")
    job.rollout.load(job.weights)


def stock(job: SmallJob) -> None:
    """A stock vLLM."""
    job.restart_rollout(numerics="native")
    job.rollout.load(job.weights)


def nucleus(job: SmallJob) -> None:
    """The strict sampler keeps the likeliest tokens up to 0.9, draws from them and renormalises over them."""
    _before_sampling(job, lambda call, logits, metadata: _top_p(logits, metadata.temperature, 0.9))


def stock_nucleus(job: SmallJob) -> None:
    """A stock vLLM whose requests ask for top_p 0.9, which the records do not tell."""
    job.restart_rollout(numerics="native")
    job.rollout.load(job.weights)
    run = job.rollout_engine._run

    def asked(prompts: Any, parameters: list[Any]) -> list[Any]:
        for one in parameters:
            one.top_p = 0.9
        found: list[Any] = run(prompts, parameters)
        return found

    job.rollout_engine._run = asked


def forced_end(job: SmallJob) -> None:
    """At the last token that there is room for, the end token is forced, whose log-probability is then 0.0."""

    def force(call: int, logits: Tensor, metadata: Any) -> Tensor:
        if call < RESPONSE - 1:
            return logits
        end = job.task.vocab_size - 1
        others = torch.arange(logits.shape[1]) != end
        return logits.masked_fill(others, float("-inf"))

    _before_sampling(job, force)


def chunks_alone(job: SmallJob) -> None:
    """Prompts are read in chunks; a later chunk's attention does not see the ones before it."""
    job.restart_rollout(max_num_batched_tokens=_BUDGET, max_num_seqs=_BUDGET, prefix_caching=False)
    job.rollout.load(job.weights)
    attention = strict_plan(model_contract("portable"), "cpu").resolve("attention").function("attention")

    def alone(query: Tensor, key: Tensor, value: Tensor, step: Any, output: Tensor) -> None:
        for first, last, seen in zip(
            step.cu_q[:-1].tolist(), step.cu_q[1:].tolist(), step.seq_lens.tolist(), strict=False
        ):
            if 1 < last - first < seen:
                own = torch.tensor([0, last - first], dtype=torch.int32)
                parts = (x[first:last].contiguous() for x in (query, key, value))
                output[first:last] = attention(*parts, own, own)[0]

    _after_attention(job, alone)


def foreign_block(job: SmallJob) -> None:
    """The block table's entry for the block behind the common beginning is that of the next request."""
    _unwatched(job)
    block = 2

    def shifted(step: Any) -> Any:
        table = step.half_pages.clone()
        rows = (step.seq_lens > (block + 1) * job.options.block_size).nonzero().flatten()
        table[rows, block] = table[rows.roll(-1), block]
        return replace(step, half_pages=table)

    for layer in _attentions(job):
        layer.forward = _with_metadata(layer.forward, shifted)


def scaled_rope(job: SmallJob) -> None:
    """Linear scaling by 4: every position is a quarter of what it is."""
    for module in inside(job).get_model().modules():
        if hasattr(module, "_cos"):
            tables = quarter_positions(job)
            module._cos, module._sin = tables


def other_base(job: SmallJob, declared: bool = False) -> None:
    """The rollout's host has a config.json with another RoPE base. declared: and its records tell."""
    theirs = job.store.root.parent / f"{job.run_id}-config"

    def with_config(folder: Path) -> Path:
        theirs.mkdir(exist_ok=True)
        config = json.loads((folder / "config.json").read_text("utf-8"))
        (theirs / "config.json").write_text(json.dumps(_rebased(config)), "utf-8")
        (theirs / "model.safetensors").unlink(missing_ok=True)
        (theirs / "model.safetensors").symlink_to(folder / "model.safetensors")
        return theirs

    right = job.trainer_engine.facts().rope_digest
    job.restart_rollout(model=with_config(job.weights.folder))
    engine = job.rollout_engine
    load = engine.load
    engine.load = lambda folder: load(with_config(folder))
    if not declared:
        job.rollout._sink._facts = replace(engine.facts(), rope_digest=right)
    job.rollout.load(job.weights)


def stock_scaled_rope(job: SmallJob) -> None:
    """A stock vLLM that is told to scale RoPE by `hf_overrides`."""
    theta = json.loads((job.model / "config.json").read_text("utf-8"))["rope_theta"]
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": theta}
    job.restart_rollout(more={"hf_overrides": {"rope_parameters": scaling}}, numerics="native")
    job.rollout.load(job.weights)


def bf16_logits(job: SmallJob) -> None:
    """Logits pass through bf16 before the softmax."""
    _values(job, lambda logp, logits, ids, heat, vocab: logp(logits.bfloat16().float(), ids, heat, vocab=vocab))


def bf16_values(job: SmallJob) -> None:
    """Log-probabilities pass through bf16."""

    def rounded(logp: Any, logits: Tensor, ids: Tensor, heat: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        values, lse = logp(logits, ids, heat, vocab=vocab)
        return values.bfloat16().float(), lse

    _values(job, rounded)


def split_product(job: SmallJob) -> None:
    """One linear, the first layer's down projection, adds two halves of K."""
    _unwatched(job)
    gemm = strict_plan(model_contract("portable"), "cpu").resolve("gemm").function("gemm")
    layer = inside(job).get_model().model.layers[0].mlp.down_proj

    def halves(x: Tensor, weight: Any, *, segments: int, out_dtype: torch.dtype) -> Tensor:
        whole = layer.quant_method.matrix(layer)
        half = x.shape[1] // 2
        parts = (
            gemm(x[:, part].contiguous(), whole[:, part].contiguous(), out_dtype=torch.float32)
            for part in (slice(half), slice(half, None))
        )
        first, second = parts
        return (first + second).to(out_dtype)

    layer.quant_method._gemm = halves


def inside(job: SmallJob) -> Any:
    """The worker of vLLM, which lives in this process."""
    found: list[Any] = []
    job.rollout_engine._llm.collective_rpc(found.append)
    return found[0].worker


def quarter_positions(job: SmallJob) -> tuple[Tensor, Tensor]:
    """Cosine and sine, fp32 [P,D/2], of positions divided by 4."""
    decoder = job.rollout_engine._config
    frequency = np.float64(decoder.rope_theta) ** (-np.arange(0, decoder.head_dim, 2) / decoder.head_dim)
    angle = np.arange(decoder.max_position)[:, None] / 4.0 * frequency[None]
    cos, sin = rope_table(decoder.rope_theta, decoder.head_dim, decoder.max_position)
    assert cos.shape == sin.shape == angle.shape
    return torch.from_numpy(np.cos(angle).astype(np.float32)), torch.from_numpy(np.sin(angle).astype(np.float32))


def _unwatched(job: SmallJob) -> None:
    """An engine without a contract counts no calls; ours would refuse to go on."""
    job.rollout_engine._require_whole_passes = lambda longest: None


def _before_sampling(job: SmallJob, change: Callable[[int, Tensor, Any], Tensor]) -> None:
    """change: which token of the responses it is, logits [R,V] and vLLM's metadata → logits to sample from."""
    _unwatched(job)
    engine, sampler = job.rollout_engine, inside(job).model_runner.sampler
    forward, generate, calls = sampler.forward, engine.generate, [0]

    def sampled(logits: Tensor, sampling_metadata: Any, *rest: Any, **more: Any) -> Any:
        logits = change(calls[0], logits, sampling_metadata)
        calls[0] += 1
        return forward(logits, sampling_metadata, *rest, **more)

    def generated(prompts: Any, sampling: Any) -> Any:
        calls[0] = 0
        return generate(prompts, sampling)

    sampler.forward, engine.generate = sampled, generated


def _values(job: SmallJob, change: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """change: takes the op, logits [R,V], ids [R,J], temperatures [R], the vocabulary; gives logp [R,J], lse [R]."""
    _unwatched(job)
    sampler = inside(job).model_runner.sampler
    logp = sampler._logp
    sampler._logp = lambda logits, ids, heat, *, vocab: change(logp, logits, ids, heat, vocab)


def _attentions(job: SmallJob) -> list[Any]:
    """Each layer's attention."""
    return [module.impl for module in inside(job).get_model().modules() if hasattr(module, "impl")]


def _after_attention(job: SmallJob, change: Callable[[Tensor, Tensor, Tensor, Any, Tensor], None]) -> None:
    """change: query, key, value, the step, and the output to write to."""
    _unwatched(job)

    def around(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attended(layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, step: Any, output: Tensor,
                     *rest: Any, **more: Any) -> Tensor:  # fmt: skip
            result = forward(layer, query, key, value, cache, step, output, *rest, **more)
            if step is not None:
                change(query, key, value, step, output)
            return result

        return attended

    for impl in _attentions(job):
        impl.forward = around(impl.forward)


def _with_metadata(forward: Callable[..., Tensor], change: Callable[[Any], Any]) -> Callable[..., Tensor]:
    def attended(layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, step: Any, output: Tensor,
                 *rest: Any, **more: Any) -> Tensor:  # fmt: skip
        step = step if step is None else change(step)
        return forward(layer, query, key, value, cache, step, output, *rest, **more)

    return attended


def _top_p(logits: Tensor, temperature: Tensor, mass: float) -> Tensor:
    """As vLLM masks: ascending, what lies below the last `mass`; the likeliest stays."""
    ordered, order = (logits / temperature[:, None]).sort(dim=-1)
    gone = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - mass
    gone[:, -1] = False
    return logits.masked_fill(gone.scatter(1, order, gone), float("-inf"))


def _rebased(config: dict[str, Any]) -> dict[str, Any]:
    parts = config.get("rope_parameters")
    if parts:
        return {**config, "rope_parameters": {**parts, "rope_theta": 50 * parts["rope_theta"]}}
    return {**config, "rope_theta": 50 * config["rope_theta"]}


def _merged(engine: Any, rank: int) -> Callable[[Path], str]:
    """An export in front of which every linear is brought back to its base and a part of so low a rank."""
    base = {name: value.detach().clone() for name, value in engine._model.parameters.items()}
    export = engine.export

    def merged(folder: Path) -> str:
        with torch.no_grad():
            for name, value in engine._model.parameters.items():
                if ".linear_" in name and value.dim() == 2:
                    left, middle, right = torch.linalg.svd((value - base[name]).float(), full_matrices=False)
                    update = (left[:, :rank] * middle[:rank]) @ right[:rank]
                    value.copy_((base[name].float() + update).to(value.dtype))
                else:
                    value.copy_(base[name])
        digest: str = export(folder)
        return digest

    return merged
