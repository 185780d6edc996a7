"""vLLM on the GPU, compiled and in CUDA graphs: the reference decoder's bits, and proof of what computed them."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rl_kernel.reference.weights import weight_digest
from tests.gpu.engines import CAPTURE, NEW_TOKENS, needs, prompts, reference, run_engine
from tests.models import TINY_MODELS, write_tiny_model

pytestmark = [pytest.mark.gpu, needs("vllm")]
REAL = os.environ.get("SMOLLM2", "models/smollm2-135m-instruct")
MODELS = ["llama", "qwen3-tied", "smollm2"]
LIBRARY = re.compile(r"nvjet|cutlass|xmma_gemm|cublas", re.IGNORECASE)
SEGMENTS = {"llama": 1, "qwen3-tied": 2, "smollm2": 1}
# The last is large enough for cuBLASLt, given SmolLM2's widths; the tiny models' are not.
CAPTURED = {"smollm2": [*CAPTURE, 64]}


def vocab(name: str) -> int:
    return TINY_MODELS[name].vocab if name in TINY_MODELS else 49152


@pytest.fixture(scope="module", params=[pytest.param(m, marks=pytest.mark.xdist_group(m)) for m in MODELS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One engine, everything that is asked of it, and what it answered."""
    name, root = request.param, tmp_path_factory.mktemp("models")
    if name == "smollm2":
        folder = other = Path(REAL)
        if not (folder / "model.safetensors").is_file():
            pytest.skip(f"SmolLM2 is not in {REAL}; `make model` fetches it")
    else:
        folder, other = (write_tiny_model(root / f"{name}-{s}", TINY_MODELS[name], seed=s) for s in (0, 1))
    asked = prompts(vocab(name))
    found = run_engine(
        folder,
        [
            ["facts", "facts", {}],
            ["loaded", "confirm", {}],
            ["batch", "generate", {"prompts": asked, "new_tokens": NEW_TOKENS}],
            ["prefix", "generate", {"prompts": asked, "new_tokens": NEW_TOKENS}],
            ["forgot", "forget", {}],
            ["alone", "generate", {"prompts": asked, "new_tokens": NEW_TOKENS, "together": False}],
            ["prefill", "score", {"prompts": asked[:4], "responses_of": "batch"}],
            ["proof", "proof", {"prompts": [p[:40] for p in asked[:5]], "steps": 7}],
            ["pieces", "proof", {"prompts": [asked[-1][:10]], "steps": 3}],
            ["kernels", "kernels", {}],
            ["reloaded", "reload", {"folder": str(other)}],
            ["other", "generate", {"prompts": asked, "new_tokens": NEW_TOKENS}],
            ["back", "reload", {"folder": str(folder)}],
            ["again", "generate", {"prompts": asked, "new_tokens": NEW_TOKENS}],
        ],
        segments=SEGMENTS[name],
        arguments={"compilation_config": {"cudagraph_capture_sizes": CAPTURED.get(name, CAPTURE)}},
    )
    return found | {"name": name, "folder": folder, "other_folder": other, "asked": asked}


def bits(answers: list[Any]) -> list[str]:
    return [logprobs for _, logprobs in answers]


def tokens(answers: list[Any]) -> list[list[int]]:
    return [ids for ids, _ in answers]


def test_the_engine_is_compiled_and_captured(served):
    assert "error" not in served, served["error"]
    assert served["facts"]["v2"]
    assert served["facts"]["mode"].endswith("VLLM_COMPILE") or served["facts"]["mode"] == "3"
    assert "FULL_AND_PIECEWISE" in served["facts"]["cudagraph_mode"]
    assert "CUSTOM" in served["facts"]["backend"]


def test_decoded_logprobs_have_the_reference_decoders_bits(served):
    answers, segments = served["batch"], SEGMENTS[served["name"]]
    assert bits(answers) == reference(served["folder"], served["asked"], tokens(answers), segments)


def test_a_cached_prefix_changes_no_bit(served):
    assert served["prefix"] == served["batch"]


def test_alone_a_sequence_has_the_bits_that_it_has_in_a_batch(served):
    assert served["alone"] == served["batch"]


def test_decoded_logprobs_are_those_of_a_prefill(served):
    assert served["prefill"] == bits(served["batch"])[:4]


def test_every_op_of_every_step_is_counted_under_graph_replay(served):
    layers = {"smollm2": 30}.get(served["name"], 2)
    assert served["proof"]["attention.paged_attention"] == 7 * layers
    assert served["pieces"]["attention.paged_attention"] == 3 * layers


def test_weights_are_confirmed_from_memory_and_replaced_in_place(served):
    assert served["loaded"] == [weight_digest(served["folder"]), None]
    assert served["reloaded"] == [weight_digest(served["other_folder"]), None]
    answers, segments = served["other"], SEGMENTS[served["name"]]
    assert bits(answers) == reference(served["other_folder"], served["asked"], tokens(answers), segments)
    assert served["back"] == served["loaded"]
    assert served["again"] == served["batch"]


def test_captured_graphs_hold_the_ops_kernels_and_nothing_else(served):
    """The driver's list of what each graph launches, pieces of prefills and whole decode steps."""
    layers = {"smollm2": 30}.get(served["name"], 2)
    decodes = ("decode_kernel", "shared_decode_kernel")
    whole = [graph for graph in served["kernels"] if sum(graph.get(name, 0) for name in decodes) == layers]
    pieces = [graph for graph in served["kernels"] if not graph.keys() & {"attention_kernel", *decodes}]
    assert len(whole) >= len(CAPTURE)
    assert len(pieces) >= len(CAPTURE) * (layers + 1)
    for graph in whole:
        assert graph["swiglu_kernel"] == graph["cache_write_kernel"] == graph["rope_kernel"] == layers
        assert graph["tally_kernel"] == 1
        assert not any(name.startswith("triton_") for name in graph)


def test_the_librarys_products_are_in_captured_graphs_too(served):
    """So the closed list of kernels is tried on them, which the proof of every op requires."""
    if served["name"] not in CAPTURED:
        pytest.skip("too small for cuBLASLt")
    kernels = Counter(kernel for graph in served["kernels"] for kernel in graph)
    assert sum(count for kernel, count in kernels.items() if LIBRARY.search(kernel)) > 0


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        ("layer_computes_by_itself", "kernel triton_poi_fused_gemm_mul_silu_slice_0 in a captured CUDA graph"),
        ("operator_replaced", "in a captured CUDA graph serves an unknown op"),
        ("layer_left_to_vllm", "SiluAndMul) serves swiglu"),
        ("sampler_left_to_vllm", "serves linear_logp"),
        ("kernel_between_ours", "kernel triton_poi_fused_gemm_mul_0 in a captured CUDA graph"),
        ("seal_forgotten", "captured in a CUDA graph behind its last seal"),
    ],
)
def test_an_op_that_something_else_serves_is_refused(tmp_path, mutant, message):
    folder = write_tiny_model(tmp_path / "llama", TINY_MODELS["llama"])
    small = {"compilation_config": {"cudagraph_capture_sizes": [4]}, "max_num_seqs": 4}
    asked = [p[:40] for p in prompts(331)[:3]]
    found = run_engine(folder, [["proof", "proof", {"prompts": asked, "steps": 4}]], mutant=mutant, arguments=small)
    assert message in found.get("error", "nothing was refused")


def test_a_rows_temperature_is_that_of_its_request_and_one_where_it_is_greedy():
    import torch

    from rl_kernel.integrations.vllm.row_temperatures import row_temperatures

    asked = torch.tensor([0.7, 0.0, 1.0, -0.0, 1e-3, 2.0], device="cuda")
    for rows in (0, 1, 5, 128, 129, 1000):
        request = torch.randint(0, len(asked), (rows,), dtype=torch.int32, device="cuda")
        wanted = torch.where(asked[request.long()] == 0.0, 1.0, asked[request.long()])
        assert torch.equal(row_temperatures(asked, request), wanted)


def test_native_vllm_changes_bits_with_the_batch(tmp_path):
    """The control: the comparisons above can fail."""
    folder = write_tiny_model(tmp_path / "llama", TINY_MODELS["llama"])
    asked = prompts(331)
    jobs = [
        ["batch", "generate", {"prompts": asked, "new_tokens": NEW_TOKENS}],
        ["forgot", "forget", {}],
        ["alone", "generate", {"prompts": asked, "new_tokens": NEW_TOKENS, "together": False}],
    ]
    found = run_engine(folder, jobs, mode="native", arguments={"enforce_eager": True})
    assert "error" not in found, found["error"]
    assert found["alone"] != found["batch"]
