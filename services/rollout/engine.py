"""vLLM as the job's rollout engine: strict, or stock for the control group. The only place here that imports vLLM.

A strict engine proves itself before it samples for anybody: it generates a few tokens, asks every worker what served
each op and how often, compares the weights in memory with the folder, and has the reference decoder recompute the
tokens' logprobs to the bit. After every later call it looks at the model and the counts again. EvidenceError if any of
that fails. What a class's own code was changed to compute between two counted calls is for the auditor to find.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from rl_kernel.compare import compare_bits
from rl_kernel.contract import ModelContract
from rl_kernel.contracts import model_contract
from rl_kernel.environment import read_environment
from rl_kernel.errors import EvidenceError, ModelError, ShapeError, WeightDigestError
from rl_kernel.integrations import vllm as strict_vllm
from rl_kernel.integrations.evidence import Evidence
from rl_kernel.ops import arch_of, usable_device
from rl_kernel.reference.config import DecoderConfig
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.weights import weight_digest
from services.config import MIN_TEMPERATURE
from services.engines import NATIVE, EngineFacts, Generated
from services.records import Logprobs, Sampling
from services.rollout.options import EngineOptions, check_split, check_tensors, thread_binding

__all__ = ["EngineOptions", "RolloutEngine"]

# Past the first block of 64 keys; and new ones: where a product is cut, one logprob in three keeps its bits.
_WARM_UP_PROMPT: Final = 66
_WARM_UP_TOKENS: Final = 12
_ONCE_A_PASS: Final = "embedding.embedding"
_VOCAB_TILE: Final = 64  # vLLM pads the vocabulary to a multiple of it, as the contract does

# What vLLM must find in the environment, in this process and in those that it starts.
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
}
_CPU_ENVIRONMENT: Final = {"TORCH_COMPILE_DISABLE": "1"}
_GPU_ENVIRONMENT: Final = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
_GPU_SHARE: Final = 0.4  # of a GPU's memory that must be free: the trainer may live on the same one


class RolloutEngine:
    """One vLLM engine, in this process or in its own. Called by one thread."""

    def __init__(self, model: Path, options: EngineOptions) -> None:
        """Build the engine on the weights in `model`, a Hugging Face folder.

        Raises ModelError for a model or a split that has no contract, EvidenceError if strict numerics are not what
        really runs, WeightDigestError if the weights in memory are not the folder's.
        """
        self._options = options
        self._config = DecoderConfig.read(model)
        self._contract: ModelContract | None = None
        if options.numerics == "strict":
            self._contract = model_contract(options.profile, segments=options.segments)
        check_split(self._config, options)
        check_tensors(self._config, model)
        self._digest = weight_digest(model)
        self._per_pass: list[dict[str, int]] = []  # calls that a pass implies on each rank, once the engine is proven
        self._passes = 0  # since then
        self._device = usable_device(model_contract(options.profile, segments=options.segments))
        self._llm = _start(model, options, self._device)
        if self._contract is not None:
            try:
                self._prove(model, self._contract)
            except BaseException:
                self.close()
                raise

    @property
    def weight_digest(self) -> str:
        """Digest of the weights that the engine computes with; empty after a load that failed half-way."""
        return self._digest

    def facts(self) -> EngineFacts:
        """Describe this engine."""
        contract = self._contract
        padded = -(-self._config.vocab // _VOCAB_TILE) * _VOCAB_TILE
        tp_size = self._options.tp_size
        return EngineFacts(
            engine_id=self._options.engine_id,
            contract_digest=contract.digest() if contract else NATIVE,
            environment=read_environment(contract.profile.mma if contract else "native", arch_of(self._device)),
            tp_size=tp_size,
            vocab_size=self._config.vocab,
            padded_vocab_size=padded,
            vocab_shards=tuple(padded * rank // tp_size for rank in range(tp_size + 1)),
            rope_digest=self._config.rope_digest,
        )

    def load(self, folder: Path) -> str:
        """Replace the weights by those in `folder` and drop every cached key and value; return the digest.

        What is loaded is confirmed from the engine's own memory. A folder of another model, or one that is not
        complete, is refused with a ModelError before anything is replaced.
        """
        if DecoderConfig.read(folder) != self._config:
            raise ModelError(f"{folder} holds another model than the engine was built for: its config.json differs")
        check_tensors(self._config, folder)
        digest, self._digest = weight_digest(folder), ""
        self._llm.collective_rpc("replace_weights", args=(str(folder),))
        if not self._llm.reset_prefix_cache():
            raise EvidenceError("vLLM kept its prefix cache across a weight update: requests are still running")
        self._confirm(digest)
        self._digest = digest
        return digest

    def generate(self, prompts: Sequence[tuple[int, ...]], sampling: Sequence[Sampling]) -> list[Generated]:
        """One response a prompt, in order. A prompt may come more than once, with another seed.

        A temperature of 0 is greedy, with logprobs at temperature 1. ShapeError for a prompt that is empty, too long
        for the context, or has ids outside the vocabulary.
        """
        if not self._digest:
            raise WeightDigestError(f"{self._options.engine_id} holds no confirmed weights; its last load failed")
        for i, (prompt, how) in enumerate(zip(prompts, sampling, strict=True)):
            self._check_prompt(i, prompt, how)
        if not prompts:
            return []
        return [_generated(output) for output in self._run(prompts, [_sampling_params(how) for how in sampling])]

    def score(self, tokens: tuple[int, ...], prompt_len: int, temperature: float) -> Logprobs:
        """Log-probability of tokens[prompt_len:], each predicted by a prefill of what comes before it.

        One request a token: the way to ask vLLM about given tokens that shares nothing with its `prompt_logprobs`,
        which are wrong where a prefix is cached.
        """
        cuts = range(prompt_len, len(tokens))
        asked = [Sampling(temperature, seed=0, max_new_tokens=1) for _ in cuts]
        for cut, how in zip(cuts, asked, strict=True):
            self._check_prompt(cut, tokens[:cut], how)
        parameters = [_sampling_params(how, score=tokens[cut]) for cut, how in zip(cuts, asked, strict=True)]
        outputs = self._run([tokens[:cut] for cut in cuts], parameters)
        return np.array([output.logprobs.logprobs[1] for output in outputs], np.float32)

    def evidence(self) -> list[Evidence]:
        """What served each op on every rank since the engine was proven; empty for a native engine."""
        if self._contract is None:
            return []
        return [Evidence.of(fields) for fields in self._llm.collective_rpc("evidence")]

    def close(self) -> None:
        """Stop vLLM and whatever processes it started.

        In process, vLLM's communication groups belong to the process: another engine there ends with this one.
        """
        self._llm.llm_engine.engine_core.shutdown()

    def _run(self, prompts: Sequence[tuple[int, ...]], parameters: list[Any]) -> list[Any]:
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = [output.outputs[0] for output in self._llm.generate(inputs, parameters, use_tqdm=False)]
        self._require_whole_passes(max((len(output.token_ids) for output in outputs), default=0))
        return outputs

    def _require_whole_passes(self, longest: int) -> None:
        """Every op must have been ours in every forward pass, of which `longest` tokens took as many; EvidenceError."""
        least = self._passes + longest
        for evidence, per_pass in zip(self.evidence(), self._per_pass, strict=False):
            self._passes = max(evidence.calls().get(_ONCE_A_PASS, 0), least)
            evidence.require({name: n * self._passes for name, n in per_pass.items()})

    def _check_prompt(self, i: int, prompt: tuple[int, ...], how: Sampling) -> None:
        room = self._options.max_model_len
        if 0 < how.temperature < MIN_TEMPERATURE:
            raise ShapeError(
                f"prompt {i}: temperature {how.temperature} is below {MIN_TEMPERATURE}, to which vLLM would raise it "
                "silently; use 0 for greedy"
            )
        if not prompt:
            raise ShapeError(f"prompt {i} is empty; it needs at least one token")
        if len(prompt) + how.max_new_tokens > room:
            raise ShapeError(
                f"prompt {i} has {len(prompt)} tokens and asks for {how.max_new_tokens} more; "
                f"max_model_len {room} has no room for them"
            )
        if min(prompt) < 0 or max(prompt) >= self._config.vocab:
            raise ShapeError(f"prompt {i} has ids outside the vocabulary of {self._config.vocab}")

    def _confirm(self, digest: str) -> None:
        """Compare the weights in memory with the folder's digest."""
        name, (found, fault) = self._options.engine_id, self._llm.collective_rpc("confirm_weights")[0]
        if fault:
            raise WeightDigestError(f"{name}: {fault}")
        if found != digest:
            raise WeightDigestError(f"{name} holds weights with digest {found}, loaded was {digest}")

    def _prove(self, model: Path, contract: ModelContract) -> None:
        """Generate a little; every op must have been ours, as often as the model implies, with the reference's bits."""
        for evidence in self.evidence():
            evidence.refuse_foreign()
        self._confirm(self._digest)
        self._llm.collective_rpc("reset_evidence")
        room = self._options.max_model_len
        steps = min(_WARM_UP_TOKENS, room // 2)
        length = min(_WARM_UP_PROMPT, room - steps, self._options.max_num_batched_tokens)  # one pass reads it
        prompt = tuple(i * 7 % self._config.vocab for i in range(1, length + 1))
        response = self.generate([prompt], [Sampling(1.0, seed=0, max_new_tokens=steps)])[0]
        expected = self._llm.collective_rpc("expected_evidence", args=(steps,))
        for evidence, wanted in zip(self.evidence(), expected, strict=True):
            evidence.require(wanted)
        tokens = np.array(prompt + response.tokens, np.int64)
        reference = Decoder.open(model, contract).logprobs([tokens], [len(prompt)])[0]
        difference = compare_bits(response.logprobs, reference)
        if not difference.equal:
            raise EvidenceError(
                f"{self._options.engine_id}: {difference.differing} of {difference.compared} logprobs differ from the "
                f"reference decoder's (max |Δ| {difference.largest}); strict mode needs equal bits"
            )
        self._llm.reset_prefix_cache()
        self._llm.collective_rpc("reset_evidence")
        self._per_pass = self._llm.collective_rpc("expected_evidence", args=(1,))


def _start(model: Path, options: EngineOptions, device: str) -> Any:
    separate = options.tp_size > 1
    environment = _ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if separate else "0"}
    environment |= _CPU_ENVIRONMENT if device == "cpu" else _GPU_ENVIRONMENT
    if separate and device == "cpu":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = thread_binding(options)
    arguments = strict_vllm.native_engine_arguments(device=device)
    with _variables(environment):
        from vllm import LLM, envs  # noqa: PLC0415 (reads the environment)

        gc.freeze()  # what was imported: vLLM collects four times while it starts
        envs.disable_envs_cache()  # an engine that was built here before has frozen what vLLM sees of it
        if options.numerics == "strict":
            strict_vllm.register()
            strict_vllm.require_plugin()
            # What is foreign is asked for below: an error of a worker's own process would arrive here as vLLM's.
            arguments = strict_vllm.engine_arguments(
                profile=options.profile, segments=options.segments, enforce=False, device=device
            )
        if device != "cpu":
            arguments |= {"gpu_memory_utilization": _GPU_SHARE}
        elif not separate:
            _set_threads(options.threads)
        return LLM(
            str(model),
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            generation_config="vllm",
            tensor_parallel_size=options.tp_size,
            distributed_executor_backend="mp" if separate else None,
            kv_cache_memory_bytes=options.kv_cache_mb * 2**20,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
            enable_prefix_caching=options.prefix_caching,
            block_size=options.block_size,
            seed=0,
            **arguments,
        )


def _set_threads(threads: int) -> None:
    """Threads of this process; vLLM's worker later disables `torch.set_num_threads`, but not what is below it."""
    import torch  # noqa: PLC0415

    torch._C.set_num_threads(threads)


def _sampling_params(how: Sampling, score: int | None = None) -> Any:
    """score: an id whose logprob is wanted beside that of the sampled token."""
    from vllm import SamplingParams  # noqa: PLC0415

    return SamplingParams(
        temperature=how.temperature,
        seed=how.seed,
        max_tokens=how.max_new_tokens,
        stop_token_ids=list(how.stop_token_ids),
        ignore_eos=True,  # what stops a response is in its sampling, where the auditor sees it
        logprobs=0 if score is None else 1,
        logprob_token_ids=None if score is None else [score],
        flat_logprobs=True,
        detokenize=False,
    )


def _generated(output: Any) -> Generated:
    return Generated(
        tokens=tuple(output.token_ids),
        logprobs=np.array([output.logprobs.logprobs[i] for i in output.logprobs.start_indices], np.float32),
        finish_reason=output.finish_reason,
    )


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for as long as vLLM starts; its own processes inherit them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
