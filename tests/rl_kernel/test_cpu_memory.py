"""Attention holds no S × S scores and the head no logits of all rows: measured as the peak memory of a process."""

import subprocess
import sys

import pytest

_ATTENTION = """
q, k, v = (torch.randn(n, 1, 32).bfloat16() for n in (12288,) * 3)
cu = torch.tensor([0, 12288], dtype=torch.int32)
def run():
    out, m, l = attention.attention(q, k, v, cu, cu)
    attention.attention_backward(out, q, k, v, out, m, l, cu)
"""
_LINEAR_LOGP = """
h, w, target = torch.randn(4096, 16).bfloat16(), torch.randn(32768, 16).bfloat16(), torch.arange(4096)
grad = torch.zeros(32768, 16)
how = {"temperature": 1.0, "vocab": 32768}
def run():
    logp, lse = linear_logp.linear_logp(h, w, target, **how)
    linear_logp.linear_logp_backward(logp, h, w, target, lse, main_grad=grad, **how)
"""
# The last line is the control: the full scores or logits, which the measurement must see.
_MEASURE = """
import re, torch
from pathlib import Path
from rl_kernel.ops.attention import cpu as attention
from rl_kernel.ops.linear_logp import cpu as linear_logp
{body}
def peak_mib():
    return int(re.search("VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) // 1024
before = peak_mib()
run()
after = peak_mib()
full = torch.ones({full})
print(after - before, peak_mib() - after)
"""


@pytest.mark.parametrize(
    ("body", "full"), [(_ATTENTION, "12288, 12288"), (_LINEAR_LOGP, "4096, 32768")], ids=["attention", "linear_logp"]
)
def test_memory_does_not_grow_with_the_product_of_two_lengths(body: str, full: str) -> None:
    code = _MEASURE.format(body=body, full=full)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, control = map(int, done.stdout.split())
    assert control > 256, f"the full matrix added {control} MiB only"
    assert grown < 128, f"the op added {grown} MiB"


# Each of two threads wants two buffers of 2 MiB, of which the first call gets none.
_TOO_LITTLE = """
import resource, torch
from rl_kernel.ops.linear_logp import cpu as linear_logp
torch.set_num_threads(2)
def logp(vocab):
    ids, heat = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2)
    return linear_logp.logp_from_logits(logits[:, :vocab].contiguous(), ids, heat, vocab=vocab)[0].tolist()
logits = torch.zeros(2, 1 << 25)
print(logp(64))
size = 4096 * int(open("/proc/self/statm").read().split()[0])
for room in (1 << 20, 1 << 40):
    resource.setrlimit(resource.RLIMIT_AS, (size + room, resource.RLIM_INFINITY))
    try:
        print(logp(1 << 25))
    except MemoryError:
        print("too little")
"""


def test_a_task_without_memory_is_an_error_of_the_call_and_the_next_call_is_right() -> None:
    done = subprocess.run([sys.executable, "-c", _TOO_LITTLE], capture_output=True, text=True, check=True)
    before, refused, after = done.stdout.splitlines()
    assert before == str([[-4.158883094787598]] * 2)  # ln 64
    assert refused == "too little"
    assert after == str([[-17.32868003845215]] * 2)  # ln 2²⁵
