"""``Config``: the loaded configuration, frozen, with the derived records that the engine uses.

Every top-level key of the JSON is an attribute: ``config.steps_per_print``, ``config.zero_optimization.stage``,
``config.fp16.enabled``. ``config.batch`` and ``config.precision`` are the resolved records. Code that uses a key calls
``config.use("optimizer")``, which returns the value and records the use; ``config.unused_report()`` then names keys
that were configured and never used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ..precision import Precision
from .batch import ACCUMULATION, MICRO, TRAIN, BatchSizes
from .notes import CLIPPING, NOTES
from .report import Explanation, Row, UsageTracker, leaves
from .sections import absent_section

__all__ = ["Config"]

_BEHIND = {
    "batch": (TRAIN, MICRO, ACCUMULATION),
    "precision": ("fp16", "bf16", "amp", "torch_autocast", "data_types", "communication_data_type"),
    "zero": ("zero_optimization",),
    "max_norm": (CLIPPING,),
}


@dataclass(frozen=True)
class Config:
    """A configuration that was read, completed and found consistent.

    Attributes:
        root: the validated model with every key; see ``docs/config.md``.
        batch: the three batch sizes.
        precision: the data types of the run.
        source: file name, ``dictionary`` or ``base64 text``.
        warnings: warnings for the user: keys without effect, values that were read differently.
        origins: dotted path -> ``file``, ``dictionary``, ``derived`` or ``auto``; absent for defaults.
        tracker: records which configured keys were used.
    """

    root: Any
    batch: BatchSizes
    precision: Precision
    source: str
    warnings: tuple[str, ...] = ()
    origins: dict[str, str] = field(default_factory=dict, repr=False)
    tracker: UsageTracker = field(default_factory=lambda: UsageTracker(()), repr=False, compare=False)

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that are not attributes of Config, such as the top-level keys.
        root = self.__dict__.get("root")
        if root is not None and name in type(root).model_fields:
            return getattr(root, name)
        try:
            if root is not None and not name.startswith("_"):
                return absent_section(name)
        except KeyError:
            pass
        raise AttributeError(f"the configuration has no key {name!r}")

    @property
    def max_norm(self) -> float | None:
        """The largest global norm of gradients; None: no clipping."""
        return self.root.max_norm

    @property
    def zero(self) -> Any:
        """The ``zero_optimization`` section, in the form that ``dsx_zero`` takes."""
        return self.root.zero_optimization

    @property
    def monitor_config(self) -> Any:
        """The argument for `dsx_monitor.MonitorMaster`: a configuration with the sections of the writers."""
        return self.root

    def use(self, name: str) -> Any:
        """Return the value of a top-level key, or of ``batch``, ``precision``, ``zero`` or ``max_norm``, and record
        that it is used.
        """
        self.tracker.mark(*_BEHIND.get(name, (name,)))
        return getattr(self, name)

    def unused_report(self) -> str:
        """Return a sentence that names the configured keys that were never used; empty if there are none."""
        unused = self.tracker.unused()
        if not unused:
            return ""
        return f"configured but never used: {', '.join(unused)} ({self.source})"

    def to_dict(self, *, complete: bool = False) -> dict[str, Any]:
        """Return the configuration as JSON values that load again to an equal configuration.

        Args:
            complete: include the defaults. Otherwise only values that were set, or computed from those.
        """
        data = self.root.model_dump(mode="json", exclude_unset=not complete, by_alias=False)
        for key, value in (
            (TRAIN, self.batch.train),
            (MICRO, self.batch.micro),
            (ACCUMULATION, self.batch.accumulation),
        ):
            data[key] = value
        return data

    def explain(self) -> Explanation:
        """Return every value in effect with its origin."""
        rows = []
        for path, value in leaves(self.to_dict(complete=True)):
            rows.append(Row(path, value, self._origin(path), NOTES.get(path, "") if path not in self.origins else ""))
        shown = {row.path for row in rows}
        for path, origin in self.origins.items():
            if path not in shown and origin == "auto":
                rows.append(Row(path, None, origin, "left to what it is an argument of"))
        for role, value in self.precision.to_json().items():
            rows.append(Row(f"precision.{role}", value, "derived"))
        return Explanation(self.source, tuple(rows))

    def _origin(self, path: str) -> str:
        if path in self.origins:
            return self.origins[path]
        parts = path.split(".")
        for end in range(len(parts) - 1, 0, -1):
            origin = self.origins.get(".".join(parts[:end]))
            if origin is not None:
                return origin
        return "default"

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON schema of a configuration, for editors."""
        from .json_schema import json_schema  # lazy import: it imports torch for the names of its optimizers

        return json_schema()

    def __str__(self) -> str:
        return json.dumps(self.to_dict(), indent=2)
