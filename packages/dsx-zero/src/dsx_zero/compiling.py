"""`torch.compile` of a sharded model: inside units, never over two of them.

At stage 3 a unit's parameters exist only around its use, so each unit's module is compiled by itself; blocks of equal
shape share one graph. At stages 0-2 parameters are always there, and the model is compiled as a whole.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .gather.registry import stage3_of

__all__ = ["compile_units"]


def compile_units(module: nn.Module, **options: Any) -> tuple[str, ...]:
    """Compile a sharded model in place, as `module.compile(**options)` does for one module.

    Args:
        module: what `shard` returned, or a model that is not sharded.
        options: arguments of `torch.compile` (`backend`, `mode`, `dynamic`, ...).

    Returns:
        Names of the modules that were compiled; the empty name is the model itself.
    """
    stage = stage3_of(module)
    names = [] if stage is None else [name for unit in stage.partitioned for name in unit.plan.users if name]
    chosen = tuple(dict.fromkeys(names)) or ("",)
    for name in chosen:
        module.get_submodule(name).compile(**options)
    return chosen
