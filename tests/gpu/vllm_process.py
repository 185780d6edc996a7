"""One vLLM engine on the GPU in a process of its own: `python -m tests.gpu.vllm_process SPEC.json RESULT.json`.

SPEC: model, mode (strict, native, invariant), segments, tp, arguments (of vLLM), mutant (or null), jobs. Each job is a
list [kind, arguments]; RESULT holds what each job returned, or `error`. Log-probabilities are hexadecimal bytes.
"""

import cProfile
import fcntl
import io
import json
import os
import pstats
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

TEMPERATURE = 0.7
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",  # a mutant's code must not be found by the engine of the next test
}


def build(spec: dict[str, Any]) -> Any:
    """The engine."""
    if spec["tp"] > 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if spec["mode"] == "invariant":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    from vllm import LLM

    from rl_kernel.integrations import vllm as strict

    strict.register()
    arguments = strict.native_engine_arguments(device="cuda")
    if spec["mode"] == "strict":
        arguments = strict.engine_arguments(profile="sm90", segments=spec["segments"], device="cuda")
    return LLM(
        spec["model"], skip_tokenizer_init=True, generation_config="vllm", seed=0, use_tqdm_on_load=False,
        tensor_parallel_size=spec["tp"], disable_log_stats=True,
        **({"distributed_executor_backend": "mp"} if spec["tp"] > 1 else {}),
        **(arguments | {"kv_cache_memory_bytes": 2**31} | spec["arguments"]),
    )  # fmt: skip


class Jobs:
    """What a test may ask of the engine; the names are the jobs' kinds."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def generate(self, prompts: list[list[int]], new_tokens: int, together: bool = True) -> list[Any]:
        """[tokens, logprobs] of each prompt; `together` in one batch, else one after another."""
        asked = [self._asked(i, new_tokens) for i in range(len(prompts))]
        if together:
            return self._run(prompts, asked)
        return [self._run([p], [how])[0] for p, how in zip(prompts, asked, strict=True)]

    def score(self, prompts: list[list[int]], responses: list[list[int]]) -> list[str]:
        """Log-probabilities of given responses, each token by a prefill of what comes before it."""
        found = []
        for prompt, response in zip(prompts, responses, strict=True):
            whole = prompt + response
            cuts = range(len(prompt), len(whole))
            asked = [self._asked(0, 1, score=whole[cut]) for cut in cuts]
            outputs = self._outputs([whole[:cut] for cut in cuts], asked)
            found.append(_hex([output.logprobs.logprobs[1] for output in outputs]))
        return found

    def forget(self) -> bool:
        """Empty the prefix cache."""
        return bool(self.engine.reset_prefix_cache())

    def reload(self, folder: str) -> list[Any]:
        """Replace the weights; return what the engine then says about those in memory."""
        self.engine.collective_rpc("replace_weights", args=(folder,))
        self.engine.reset_prefix_cache()
        return list(self.engine.collective_rpc("confirm_weights")[0])

    def confirm(self) -> list[Any]:
        """(digest of the weights in memory, fault)."""
        return list(self.engine.collective_rpc("confirm_weights")[0])

    def proof(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Generate `steps` tokens for all prompts, and require exactly the calls that the passes since then imply.

        In this process one step prefills all prompts; a separate engine may begin before it has them all.
        """
        from rl_kernel.integrations.evidence import Evidence

        self.engine.reset_prefix_cache()
        self.engine.collective_rpc("reset_evidence")
        self.generate(prompts, steps)
        seen = [Evidence.of(fields) for fields in self.engine.collective_rpc("evidence")]
        passes = seen[0].calls().get("embedding.embedding", 0)
        separate = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
        assert passes >= steps if separate else passes == steps, f"{passes} passes for {steps} tokens"
        expected = self.engine.collective_rpc("expected_evidence", args=(passes,))
        for evidence, wanted in zip(seen, expected, strict=True):
            evidence.require(wanted)
        return seen[0].calls()

    def kernels(self) -> list[dict[str, int]]:
        """Kernels in each captured piece."""
        return list(self.engine.collective_rpc("graph_kernels")[0])

    def facts(self) -> dict[str, Any]:
        """How vLLM runs."""
        config = self.engine.llm_engine.vllm_config
        compilation = config.compilation_config
        return {
            "v2": config.use_v2_model_runner,
            "mode": str(compilation.mode),
            "cudagraph_mode": str(compilation.cudagraph_mode),
            "capture_sizes": compilation.cudagraph_capture_sizes,
            "backend": str(config.attention_config.backend),
        }

    def meet(self, folder: str, name: str, engines: int) -> float:
        """Wait until `engines` engines have come to `folder`, or ended; return the seconds."""
        begin = time.perf_counter()
        Path(folder, f"{name}.here").touch()
        while len(list(Path(folder).glob("*.here"))) < engines:
            time.sleep(0.1)
        return time.perf_counter() - begin

    def speed(
        self, prompts: int, prompt_tokens: int, new_tokens: int, vocab: int, turn: str | None = None
    ) -> dict[str, float]:
        """Seconds and new tokens a second, prefill included, third run of three with fresh prompts each time.

        turn: a file that the engine locks meanwhile, so that others wait.
        """
        seconds = []
        with open(turn or os.devnull, "w") as held:
            if turn:
                fcntl.flock(held, fcntl.LOCK_EX)
            for seed in range(3):
                asked = self._random(prompts, prompt_tokens, vocab, seed)
                begin = time.perf_counter()
                self._outputs(asked, [self._asked(i, new_tokens) for i in range(prompts)])
                seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds[-1], "tokens_per_second": prompts * new_tokens / seconds[-1], "before": seconds[:-1]}

    def host(
        self, prompts: int, prompt_tokens: int, new_tokens: int, vocab: int, turn: str, lines: int = 60
    ) -> list[str]:
        """Where the host's time goes, by function: the lines of a profile of one warm run."""
        asked, how = (
            self._random(prompts, prompt_tokens, vocab, 9),
            [self._asked(i, new_tokens) for i in range(prompts)],
        )
        profile, found = cProfile.Profile(), io.StringIO()
        with open(turn, "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            profile.runcall(self._outputs, asked, how)
        pstats.Stats(profile, stream=found).sort_stats("tottime").print_stats(lines)
        return [line for line in found.getvalue().splitlines() if line.strip()]

    def _random(self, prompts: int, prompt_tokens: int, vocab: int, seed: int) -> list[list[int]]:
        asked: list[list[int]] = np.random.default_rng(seed).integers(0, vocab, (prompts, prompt_tokens)).tolist()
        return asked

    def _asked(self, seed: int, new_tokens: int, score: int | None = None) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=TEMPERATURE, seed=100 + seed, max_tokens=new_tokens, ignore_eos=True, detokenize=False,
            logprobs=0 if score is None else 1, logprob_token_ids=None if score is None else [score],
            flat_logprobs=True,
        )  # fmt: skip

    def _outputs(self, prompts: list[list[int]], asked: list[Any]) -> list[Any]:
        inputs = [{"prompt_token_ids": list(p)} for p in prompts]
        return [output.outputs[0] for output in self.engine.generate(inputs, asked, use_tqdm=False)]

    def _run(self, prompts: list[list[int]], asked: list[Any]) -> list[Any]:
        return [
            [list(o.token_ids), _hex([o.logprobs.logprobs[i] for i in o.logprobs.start_indices])]
            for o in self._outputs(prompts, asked)
        ]


def _hex(logprobs: list[float]) -> str:
    return np.array(logprobs, np.float32).tobytes().hex()


def main() -> None:
    """Run the jobs of a spec; what goes wrong is part of the result."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(ENVIRONMENT | spec.get("environment", {}))
    if spec.get("mutant"):
        from tests.gpu import vllm_mutants

        getattr(vllm_mutants, spec["mutant"])()
    result: dict[str, Any] = {}
    begin = time.perf_counter()
    try:
        jobs = Jobs(build(spec))
        result["start_seconds"] = time.perf_counter() - begin
        for name, kind, arguments in spec["jobs"]:
            if isinstance(arguments, dict) and "responses_of" in arguments:
                earlier = result[arguments.pop("responses_of")]
                arguments["responses"] = [tokens for tokens, _ in earlier][: len(arguments["prompts"])]
            result[name] = getattr(jobs, kind)(**arguments)
    except Exception as error:  # noqa: BLE001 (the parent judges it)
        result["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    Path(sys.argv[2]).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # an engine in this process may take its time to end, and nobody waits for it


if __name__ == "__main__":
    main()
