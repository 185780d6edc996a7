"""A strict model refuses to run when a module, or a call, is not ours."""

import pytest
import torch

from rl_kernel.contracts import model_contract
from rl_kernel.errors import EvidenceError
from rl_kernel.integrations.megatron.linear import StrictRowParallelLinear
from rl_kernel.ops import strict_plan
from tests.integrations.megatron.cases import build, forward_backward, samples, score


@pytest.fixture
def model(folders, tp):
    return build(folders["qwen3"], strict_plan(model_contract(), "cpu"), tp)


def test_an_untouched_model_proves_itself(model):
    forward_backward(model, samples(331))
    score(model, samples(331))
    model.prove()


def test_a_norm_of_torch_is_refused_by_its_path(model):
    model.module.decoder.final_layernorm = torch.nn.RMSNorm(160)
    with pytest.raises(EvidenceError, match=r"decoder\.final_layernorm is a torch\.nn.*RMSNorm, which has no contract"):
        score(model, samples(331))


def test_a_subclass_of_a_strict_module_is_refused(model):
    class Faster(StrictRowParallelLinear):
        pass

    model.module.decoder.layers[0].mlp.linear_fc2.__class__ = Faster
    with pytest.raises(EvidenceError, match=r"decoder\.layers\.0\.mlp\.linear_fc2 is a .*Faster"):
        score(model, samples(331))


def test_a_hook_is_refused(model):
    model.module.decoder.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(EvidenceError, match=r"decoder\.layers\.1\.mlp has a hook"):
        score(model, samples(331))


def test_a_patched_forward_is_refused(model):
    norm = model.module.decoder.final_layernorm
    theirs = norm.forward
    norm.forward = lambda x: theirs(x) * 1.01
    with pytest.raises(EvidenceError, match=r"decoder\.final_layernorm has a patched forward"):
        score(model, samples(331))


def test_a_hook_for_all_modules_is_refused(model):
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(EvidenceError, match="the model has a hook for all modules"):
            score(model, samples(331))
    finally:
        hook.remove()


def test_a_dropout_that_drops_is_refused(model):
    model.module.embedding.embedding_dropout.p = 0.1
    with pytest.raises(EvidenceError, match=r"embedding_dropout is a .*Dropout"):
        score(model, samples(331))


def test_an_op_that_bypasses_the_plan_leaves_a_hole_in_the_counts(model):
    ops = model.module.decoder.layers[0].self_attn_bda.ops
    ops.add = lambda a, b: a + b
    score(model, samples(331))
    with pytest.raises(EvidenceError, match=r"residual_add\.residual_add was called 0 times, the model implies 4"):
        model.prove()


def test_the_evidence_names_backend_and_contract(model):
    score(model, samples(331))
    evidence = model.plan.evidence()
    assert {op.backend for op in evidence.ops} == {"cpu"}
    assert evidence.contract == model_contract().digest()
    assert {op.op: op.contract for op in evidence.ops}["gemm"] == model_contract()["gemm"].digest()
