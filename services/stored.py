"""JSON that an earlier process of a run left behind. A disk or a hand may have changed it: it is checked when read."""

import json
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from services.errors import CheckpointError


class Stored(BaseModel):
    """An object of exactly these keys, each of its type and of no other."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants")

    @classmethod
    def read(cls, file: Path) -> Self:
        """From a file; CheckpointError, one line, if it is not there or holds something else."""
        try:
            content = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        return cls.of(content, str(file))

    @classmethod
    def of(cls, content: Any, source: str) -> Self:
        """From what JSON gave; CheckpointError names `source` and the key."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            what = first["msg"][:1].lower() + first["msg"][1:]
            raise CheckpointError(f"{source} cannot be read: {f'{key}: ' if key else ''}{what}") from None

    def text(self) -> str:
        """As it is written to a file."""
        return self.model_dump_json(indent=2) + "\n"
