"""The `comms_logger` section of a configuration.

A plain frozen dataclass, so that this package needs no validation library; dsx composes it into its own schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from dsx_core import nearest

from .errors import CommConfigError


@dataclass(frozen=True)
class CommsLoggerConfig:
    """Settings of the communication log."""

    BETTER: ClassVar[dict[str, str]] = {"": "bytes are counted exactly, on every transport"}
    DIFFERS: ClassVar[dict[str, str]] = {"enabled": "false is off; DeepSpeed logs as soon as the block exists"}

    enabled: bool = field(default=False, metadata={"description": "record calls of collectives"})
    verbose: bool = field(default=False, metadata={"description": "log one line per call when it completes"})
    prof_all: bool = field(default=True, metadata={"description": "record every operation"})
    prof_ops: tuple[str, ...] = field(
        default=(),
        metadata={"description": "operations that are recorded when prof_all is false; log names are accepted too"},
    )
    debug: bool = field(default=False, metadata={"description": "append the calling function to the operation's name"})

    # for dsx: the section comes from JSON, where a list stands for the tuple
    __pydantic_config__ = {"extra": "forbid", "strict": False}

    def __post_init__(self) -> None:
        for name in ("enabled", "verbose", "prof_all", "debug"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise CommConfigError(f"comms_logger.{name}", f"got {value!r}, expected true or false")
        names = self.prof_ops
        if isinstance(names, str) or not all(isinstance(n, str) for n in names):
            raise CommConfigError("comms_logger.prof_ops", f"got {names!r}, expected a list of operation names")
        object.__setattr__(self, "prof_ops", tuple(names))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CommsLoggerConfig:
        """The settings of a section of the JSON. Raises CommConfigError naming an unknown key and the nearest known."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                near = nearest(key, known)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
                raise CommConfigError(f"comms_logger.{key}", f"unknown key; {hint}")
        return cls(**values)
