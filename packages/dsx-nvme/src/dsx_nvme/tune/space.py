"""Settings of a handle, and the space of settings that a search covers: pure data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OptionError
from .show import parse_size, size_text

# Names of a sweep file, ours and those that existing sweep files use.
NAMES = {
    "block_size": "block_size", "queue_depth": "queue_depth", "intra_op_parallelism": "threads",
    "io_parallel": "threads", "single_submit": "single_submit", "overlap_events": "overlap_events",
    "sequential_requests": "overlap_events",
}  # fmt: skip
DIMENSIONS = ("threads", "queue_depth", "block_size", "overlap_events", "single_submit")  # the most important first


@dataclass(frozen=True)
class Setting:
    """One point of the space."""

    block_size: int = 1 << 20
    queue_depth: int = 32
    threads: int = 1
    single_submit: bool = False
    overlap_events: bool = True

    def section(self) -> dict[str, Any]:
        """The setting as an `aio` section of a configuration."""
        return {
            "single_submit": self.single_submit, "overlap_events": self.overlap_events,
            "intra_op_parallelism": self.threads, "queue_depth": self.queue_depth, "block_size": self.block_size,
        }  # fmt: skip

    @property
    def name(self) -> str:
        """A short and unique name."""
        submit, overlap = (
            "single" if self.single_submit else "batch",
            "overlap" if self.overlap_events else "sequential",
        )
        return f"bs{size_text(self.block_size)} qd{self.queue_depth} p{self.threads} {submit} {overlap}"


@dataclass(frozen=True)
class Space:
    """Values per dimension."""

    values: Mapping[str, tuple[Any, ...]]

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            if not self.values.get(name):
                raise OptionError(f"sweep: no values for {name}")

    def all(self) -> list[Setting]:
        """Every point."""
        names = list(DIMENSIONS)
        return [Setting(**dict(zip(names, values))) for values in itertools.product(*(self.values[n] for n in names))]

    def nearest(self, setting: Setting) -> Setting:
        """The setting, in which values that the space lacks are replaced by values that it has."""
        found = setting
        for name in DIMENSIONS:
            value, options = getattr(setting, name), self.values[name]
            if value not in options:
                found = replace(found, **{name: min(options, key=lambda o: abs(int(o) - int(value)))})
        return found


DEFAULT = Space({
    "threads": (1, 2, 4, 8), "queue_depth": (32, 128), "block_size": (1 << 20, 8 << 20),
    "overlap_events": (True, False), "single_submit": (False, True),
})  # fmt: skip


def read_space(path: str) -> Space:
    """The space of a sweep file: JSON, a list of values (or one value) per name.

    Names that are left out keep the default's values.
    """
    with open(path, encoding="utf-8") as file:
        table = json.load(file)
    if not isinstance(table, dict):
        raise OptionError(f"{path}: expected an object of lists of values")
    values = dict(DEFAULT.values)
    for key, given in table.items():
        if key not in NAMES:
            raise OptionError(f"{path}: unknown name {key!r}; expected one of {', '.join(NAMES)}")
        items = given if isinstance(given, list) else [given]
        values[NAMES[key]] = tuple(dict.fromkeys(_value(path, key, item) for item in items))
    return Space(values)


def _value(path: str, key: str, item: Any) -> Any:
    if NAMES[key] in ("single_submit", "overlap_events"):
        item = {"true": True, "false": False}.get(str(item).lower(), item)
        if not isinstance(item, bool):
            raise OptionError(f"{path}: {key}: got {item!r}, expected true or false")
        return not item if key == "sequential_requests" else item
    try:
        return parse_size(item)
    except (ValueError, AttributeError) as error:
        raise OptionError(f"{path}: {key}: {error}") from error
