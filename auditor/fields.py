"""Checks of a record's fields where it is made: a wrong type fails the line that gave it, and no thread that sends."""

import operator
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from auditor.errors import RecordError

UINT32: Final = (0, 2**32 - 1)
INT64: Final = (-(2**63), 2**63 - 1)


def whole(owner: object, where: str, names: Iterable[str], bounds: tuple[int, int]) -> None:
    """Whole numbers within bounds, NumPy's too, kept as Python's. where: what stands before the name in a message."""
    for name in names:
        value = getattr(owner, name)
        number = _index(f"{where}{name}", value)
        if not bounds[0] <= number <= bounds[1]:
            raise RecordError(f"{where}{name} is {number}; it lies in {bounds[0]}..{bounds[1]}")
        if number is not value:
            object.__setattr__(owner, name, number)


def wholes(owner: object, where: str, name: str) -> None:
    """A tuple of uint32, out of any sequence of whole numbers."""
    values = getattr(owner, name)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise RecordError(f"{where}{name} is {values!r}; it must be a sequence of whole numbers")
    numbers = tuple(_index(f"{where}{name}", value) for value in values)
    if numbers and not UINT32[0] <= min(numbers) <= max(numbers) <= UINT32[1]:
        raise RecordError(f"{where}{name} holds {min(numbers)}..{max(numbers)}; it lies in 0..{UINT32[1]}")
    object.__setattr__(owner, name, numbers)


def real(owner: object, where: str, names: Iterable[str]) -> None:
    """Numbers, kept as floats."""
    for name in names:
        value = getattr(owner, name)
        if type(value) is float:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise RecordError(f"{where}{name} is {value!r}; it must be a number")
        try:
            object.__setattr__(owner, name, float(value))
        except OverflowError:
            raise RecordError(f"{where}{name} is beyond any float") from None


def text(owner: object, where: str, names: Iterable[str]) -> None:
    """Strings that can be written as UTF-8."""
    for name in names:
        one_text(f"{where}{name}", getattr(owner, name))


def one_text(name: str, value: object) -> None:
    """One such string."""
    if not isinstance(value, str):
        raise RecordError(f"{name} is {value!r}; it must be text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RecordError(f"{name} is {value!r}, which cannot be written as UTF-8") from None


def texts(name: str, values: object) -> tuple[str, ...]:
    """Such strings, out of any sequence."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise RecordError(f"{name} is {values!r}; it must be a sequence of texts")
    found = tuple(values)
    for value in found:
        one_text(name, value)
    return found


def as_array(name: str, value: npt.ArrayLike, dtype: type[np.generic], ndim: int) -> npt.NDArray[Any]:
    """An array of one dtype and so many axes; ids of any whole numbers that it holds."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # lists of two lengths; a tensor of bf16, or with a gradient
        raise RecordError(f"{name} is no array: {error}") from None
    if array.ndim != ndim:
        raise RecordError(f"{name} has shape {list(array.shape)}; it needs {ndim} dimension{'s' * (ndim > 1)}")
    wanted = np.dtype(dtype)
    if array.dtype == wanted:
        return np.ascontiguousarray(array)
    if wanted.kind == "u" and array.dtype.kind in "iu":
        if array.size and (int(array.min()) < 0 or int(array.max()) > np.iinfo(wanted).max):
            raise RecordError(
                f"{name} holds {int(array.min())}..{int(array.max())}; ids lie in 0..{np.iinfo(wanted).max}"
            )
        return array.astype(wanted)
    if array.size == 0:
        return array.astype(wanted)
    raise RecordError(f"{name} is {array.dtype}; it must be {wanted}, converted by the side that computed it")


def _index(name: str, value: object) -> int:
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise RecordError(f"{name} is {value!r}; it must be a whole number")
