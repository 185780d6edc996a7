"""Ask a GPU what its matrix instruction and its exp2 compute, and compare with the reference.

On any machine:      python -m tests.gpu.mma_probe draw inputs.npz
On the GPU machine:  python -m tests.gpu.mma_probe run inputs.npz outputs.npz     (NumPy, torch, Triton)
On any machine:      python -m tests.gpu.mma_probe check sm90 inputs.npz outputs.npz

`run` also compares `ex2.approx.ftz.f32` with the shipped table and prints the counts.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.rl_kernel.mma_draws import draws

_SIDE = 64
_DEPTHS = (16, 48, 512)


def draw(path: Path) -> None:
    """Write the inputs: for each draw `name/a`, `name/b` (bit patterns, uint16) and `name/c` (fp32)."""
    found = {f"{d.name}/{x}": getattr(d, x) for d in draws(_SIDE, _SIDE, _DEPTHS) for x in "abc"}
    np.savez_compressed(path, **found)


def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def chains(c, a, b, k, side: tl.constexpr, group: tl.constexpr):
        i, p = tl.arange(0, side), tl.arange(0, group)
        acc = tl.load(c + i[:, None] * side + i[None, :])
        for p0 in range(0, k, group):
            x = tl.load(a + i[:, None] * k + p0 + p[None, :])
            y = tl.load(b + (p0 + p[:, None]) * side + i[None, :])
            acc = tl.dot(x, y, acc)
        tl.store(c + i[:, None] * side + i[None, :], acc)

    return chains


def run(inputs: Path, outputs: Path) -> None:
    """Run every draw on the GPU, once through wgmma (4 warps) and once through mma.sync (1 warp)."""
    import torch

    kernel, found = _kernel(), {}
    used: dict[str, set[str]] = {}
    with np.load(inputs) as data:
        for name in sorted({key.rpartition("/")[0] for key in data}):
            dtype = torch.bfloat16 if name.startswith("bf16") else torch.float16
            a, b = (torch.from_numpy(data[f"{name}/{x}"].copy()).view(dtype).cuda() for x in "ab")
            for how, warps in (("wgmma", 4), ("mma.sync", 1)):
                c = torch.from_numpy(data[f"{name}/c"].copy()).cuda()
                compiled = kernel[(1,)](c, a, b, a.shape[1], side=_SIDE, group=16, num_warps=warps)
                found[f"{name}/{how}"] = c.cpu().numpy()
                used.setdefault(how, set()).update(re.findall(r"w?g?mma\.\S*m\d+n\d+k\d+\S*", compiled.asm["ptx"]))
    np.savez_compressed(outputs, **found)
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "instructions": {how: sorted(names) for how, names in used.items()},
            }
        )
    )
    print(json.dumps({"exp2": _exp2_on_gpu(torch)}))


def _exp2_on_gpu(torch: Any) -> dict[str, dict[str, int]]:
    """Compare exp2 on the GPU with the shipped table: every fraction at n = -1, then random arguments."""
    import triton
    import triton.language as tl

    @triton.jit
    def exp2(y, x, n, block: tl.constexpr):
        at = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(y + at, tl.exp2(tl.load(x + at, at < n, 0.0)), at < n)

    table = Path(__file__).parents[2] / "rl_kernel/reference/data/sm90_ex2.npz"
    with np.load(table) as data:
        packed = torch.from_numpy(data["delta2bit"].copy()).cuda().int()
    deviation = torch.stack([(packed >> s) & 3 for s in (0, 2, 4, 6)], 1).reshape(-1) - 2
    every = torch.arange(1 << 23, device="cuda", dtype=torch.float64)
    powers = (torch.exp2((every - 2**23) / 2**23).float().view(torch.int32) + deviation).view(torch.float32)
    torch.manual_seed(0)
    draws = {
        "every fraction": -(every / 2**23).float(),
        "uniform to -128": -(torch.rand(1 << 26, device="cuda") * 128),
        "log-uniform": -torch.exp2(torch.rand(1 << 24, device="cuda") * 60 - 52),
        "every number from -125 to -129": torch.arange(0xC2FA0000, 0xC3010000, device="cuda").int().view(torch.float32),
        "zeros, subnormals, -inf": torch.tensor([0.0, -0.0, -1e-45, -1e-39, -3e38, -torch.inf], device="cuda"),
    }
    counts = {}
    for name, x in draws.items():
        y = torch.empty_like(x)
        exp2[(triton.cdiv(x.numel(), 1024),)](y, x, x.numel(), block=1024)
        q = (x.double() * 2**23).trunc().clamp(min=-(2.0**31)).long()
        expected = (powers[q & (2**23 - 1)].double() * torch.exp2(((q >> 23) + 1).double())).float()
        expected[expected < 2.0**-126] = 0
        differs = y.view(torch.int32) != expected.view(torch.int32)
        counts[name] = {"compared": x.numel(), "differing": int(differs.sum())}
    return counts


def check(model: str, inputs: Path, outputs: Path) -> int:
    """Print the differing values of every draw against the reference; return 1 if there is one."""
    from rl_kernel.reference import _reference

    total, wrong = 0, 0
    with np.load(inputs) as data, np.load(outputs) as found:
        for key in sorted(found):
            name = key.rpartition("/")[0]
            expected = data[f"{name}/c"].copy()
            _reference.accumulate(expected, data[f"{name}/a"], data[f"{name}/b"], model, name.startswith("fp16"))
            differing = int((expected.view(np.uint32) != found[key].view(np.uint32)).sum())
            total, wrong = total + expected.size, wrong + differing
            if differing:
                print(f"{key}: {differing} of {expected.size} differ")
    print(f"{model}: {wrong} of {total} values differ, {len(set(data))} arrays of inputs")
    return int(wrong > 0)


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw").add_argument("inputs", type=Path)
    runs = commands.add_parser("run")
    checks = commands.add_parser("check")
    checks.add_argument("model")
    for command in (runs, checks):
        command.add_argument("inputs", type=Path)
        command.add_argument("outputs", type=Path)
    args = parser.parse_args()
    if args.command == "draw":
        draw(args.inputs)
    elif args.command == "run":
        run(args.inputs, args.outputs)
    else:
        return check(args.model, args.inputs, args.outputs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
