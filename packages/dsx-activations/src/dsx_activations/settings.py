"""The settings of activation checkpointing, as plain data.

`config.py` has the same settings as a section of a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import ActivationConfigError

__all__ = ["PATH", "CheckpointingSettings"]

PATH = "activation_checkpointing"


@dataclass(frozen=True)
class CheckpointingSettings:
    """The storage of kept inputs, and reports about it.

    Attributes:
        partition_activations: each model-parallel rank keeps a slice of every input.
        cpu_checkpointing: inputs are kept in host memory.
        contiguous_memory_optimization: slices are copied into buffers that are made once; needs
            `partition_activations` and a number of checkpoints.
        number_checkpoints: how many inputs such a buffer holds: the checkpoints that are alive at the same time.
        synchronize_checkpoint_boundary: the host waits for the device at the beginning and the end of each checkpoint.
        profile: log the time of every checkpoint.
    """

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        number = self.number_checkpoints
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ActivationConfigError(
                f"{PATH}.number_checkpoints", f"got {number!r}, expected a whole number of at least 1"
            )
        if not self.contiguous_memory_optimization:
            return
        if not self.partition_activations:
            raise ActivationConfigError(
                f"{PATH}.contiguous_memory_optimization",
                "got true without partition_activations, expected both: the buffers hold slices; set"
                " partition_activations to true",
            )
        if number is None:
            raise ActivationConfigError(
                f"{PATH}.number_checkpoints",
                "got null, expected the number of checkpoints that are alive at a time (the layers, as a rule), which"
                " contiguous_memory_optimization makes its buffers for; set it, or call set_num_layers first",
            )

    @classmethod
    def read(cls, section: Any) -> CheckpointingSettings:
        """The settings of a section: a mapping, or an object with these attributes.

        Raises:
            ActivationConfigError: an unknown key, a value of another kind, or settings that contradict each other.
        """
        known: dict[str, Any] = {field.name: field.default for field in fields(cls)}
        if not isinstance(section, Mapping):
            return cls(**{name: getattr(section, name, default) for name, default in known.items()})
        for name, value in section.items():
            if name == "memory_budget":
                continue  # the budget is applied to a model: `apply_memory_budget`
            if name not in known:
                raise ActivationConfigError(f"{PATH}.{name}", f"unknown, expected one of {', '.join(known)}; remove it")
            if isinstance(known[name], bool) and not isinstance(value, bool):
                raise ActivationConfigError(f"{PATH}.{name}", f"got {value!r}, expected true or false")
        return cls(**{name: value for name, value in section.items() if name in known})

    def with_given(self, **given: Any) -> CheckpointingSettings:
        """These settings, changed by the values that are not None."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})
