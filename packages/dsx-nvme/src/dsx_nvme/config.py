"""The `aio` section of a configuration, as a frozen dataclass: this package validates it without other libraries.

Names and defaults are those of configurations for DeepNVMe. `dsx` makes a strict pydantic model from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .engine import Engine
from .errors import OptionError
from .handle import aio_handle

# Other names of the same setting, and booleans as text: older tuners print them.
ALIASES = {"thread_count": "intra_op_parallelism", "num_threads": "intra_op_parallelism"}
TEXT = {"true": True, "false": False}


@dataclass(frozen=True)
class AioConfig:
    """Asynchronous file I/O for offload to disk."""

    block_size: int = field(default=1 << 20, metadata={"description": "bytes per request", "minimum": 1})
    queue_depth: int = field(default=8, metadata={"description": "requests in flight per thread", "minimum": 1})
    intra_op_parallelism: int = field(
        default=1,
        metadata={"description": "threads that share one transfer; thread_count is another name", "minimum": 1},
    )
    single_submit: bool = field(default=False, metadata={"description": "submit each request with its own system call"})
    overlap_events: bool = field(
        default=True, metadata={"description": "take each completion when it arrives, instead of all together"}
    )
    use_gds: bool = field(default=False, metadata={"description": "transfer between disk and GPU directly"})

    def __post_init__(self) -> None:
        for f in fields(self):
            value, kind = getattr(self, f.name), type(f.default)
            least = f.metadata.get("minimum")
            if type(value) is not kind or (least is not None and value < least):
                wanted = "true or false" if kind is bool else f"a whole number of at least {least}"
                raise OptionError(f"aio.{f.name}: got {value!r}, expected {wanted}")

    @classmethod
    def from_dict(cls, section: Mapping[str, Any]) -> AioConfig:
        """Read a section (or a file's content with an `aio` section in it). Raises OptionError for an unknown key."""
        section = section["aio"] if set(section) == {"aio"} else section
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in section.items():
            name = ALIASES.get(key, key)
            if name not in known:
                raise OptionError(f"aio.{key}: unknown; expected one of {', '.join(sorted(known))}")
            if name in values and values[name] != value:
                raise OptionError(
                    f"aio.{key}: got {value!r} here and {values[name]!r} under another name of the same setting"
                )
            values[name] = TEXT.get(value.lower(), value) if isinstance(value, str) else value
        return cls(**values)

    def handle(self) -> aio_handle:
        """An `aio_handle` with these settings."""
        return aio_handle(
            self.block_size, self.queue_depth, self.single_submit, self.overlap_events, self.intra_op_parallelism
        )

    def engine(self, engine: str = "auto") -> Engine:
        """An `Engine` with these settings."""
        return Engine(
            engine, block_size=self.block_size, queue_depth=self.queue_depth, threads=self.intra_op_parallelism,
            single_submit=self.single_submit, overlap_events=self.overlap_events,
        )  # fmt: skip
