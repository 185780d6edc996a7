"""The table of exp2 model `sm90_ex2`, shipped with the package and handed to the C++ loops once, when first needed."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from rl_kernel.contract import EXP2_MODELS
from rl_kernel.errors import ContractError
from rl_kernel.reference import _reference

TABLE: Final = Path(__file__).with_name("data") / "sm90_ex2.npz"


def read_table(path: Path) -> np.ndarray:
    """The deviations of all 2^23 fractions, uint8[2^21]: 2 bits each, four to a byte, low bits first, value − 2.

    ContractError: the file is missing, or does not hold the table that the contract names.
    """
    try:
        with np.load(path) as archive:
            table: np.ndarray = np.ascontiguousarray(archive["delta2bit"])
    except (OSError, ValueError, KeyError) as error:
        raise ContractError(f"{path} is not the table of exp2 model sm90_ex2: {error}") from None
    found, expected = hashlib.sha256(table.tobytes()).hexdigest(), EXP2_MODELS["sm90_ex2"].table_sha256
    if found != expected:
        raise ContractError(f"{path}: sha256 of the table is {found}, the contract of sm90_ex2 names {expected}")
    return table


@cache
def load() -> None:
    """Hand the table to the reference."""
    _reference.register_sm90_ex2(read_table(TABLE))
