"""State that modules keep beside parameters and buffers (`get_extra_state`), such as the scales of FP8 layers.

The values are ordinary state of a checkpoint: rank 0's, encoded without pickle. In the index each such module also has
an empty tensor under the name that `state_dict` uses (`layer._extra_state`), so that a load tells missing and
unexpected ones as it does for parameters.

Left out: extra states of modules that rank 0 does not have, such as those of later pipeline stages; a save refuses
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn

from .errors import CheckpointArgumentError, shown

__all__ = [
    "EXTRA_KEY",
    "EXTRA_SHAPE",
    "extra_states",
    "is_extra_state",
    "modules_with_extra_state",
    "refuse_elsewhere",
]

EXTRA_KEY = "module_extra_state"
"""Of the encoded state of a checkpoint."""

EXTRA_SHAPE = (0,)
"""Of the tensors that stand for extra states in the index."""

_LAST = "_extra_state"


def modules_with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name as in `state_dict`, and module, of each that has an extra state of its own."""
    for prefix, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}.{_LAST}" if prefix else _LAST, child


def extra_states(module: nn.Module) -> dict[str, Any]:
    """The extra states by name."""
    return {name: child.get_extra_state() for name, child in modules_with_extra_state(module)}


def is_extra_state(name: str) -> bool:
    """Whether this is the name of an extra state, not of a parameter or buffer."""
    return name.rpartition(".")[2] == _LAST


def refuse_elsewhere(names: Iterable[str], of_rank_0: Collection[str]) -> None:
    """Raise CheckpointArgumentError where a module that rank 0 does not have has an extra state."""
    elsewhere = [name for name in names if is_extra_state(name) and name not in of_rank_0]
    if elsewhere:
        raise CheckpointArgumentError(
            f"{shown(elsewhere[0])}: got a module with get_extra_state that rank 0 does not have, expected all of them"
            " there (rank 0's are saved); in a pipeline keep such values in buffers, or return them from rank_state"
        )
