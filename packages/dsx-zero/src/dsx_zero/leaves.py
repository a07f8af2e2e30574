"""Leaf modules: subtrees that are one unit at stage 3, gathered and freed as a whole.

Needed where it must not depend on the data which parts of a subtree run (mixtures of experts), and useful for many tiny modules. Marks are kept
beside the modules, not on them, and count when the model is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from torch import nn

from .errors import ZeroModelError

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

_LEAVES: WeakSet[nn.Module] = WeakSet()

Chosen = Iterable[type[nn.Module] | str]


def _find(model: nn.Module, chosen: Chosen) -> list[nn.Module]:
    wanted = list(chosen)
    found = []
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if any(isinstance(module, w) if isinstance(w, type) else w in kinds or w == name for w in wanted):
            found.append(module)
    if not found:
        names = ", ".join(w.__name__ if isinstance(w, type) else w for w in wanted)
        raise ZeroModelError(f"no module of the model is named, or of a class among: {names}")
    return found


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Chosen) -> list[nn.Module]:
    """Mark the modules of these classes (or class names, or full module names). Call it before the model is sharded.

    Returns the modules.

    Raises:
        ZeroModelError: if there is none.
    """
    found = _find(model, leaf_module_classes)
    _LEAVES.update(found)
    return found


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark (or unmark) one module."""
    if flag:
        _LEAVES.add(model)
    else:
        _LEAVES.discard(model)


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Chosen) -> list[nn.Module]:
    """Undo ``set_z3_leaf_modules``. Returns the modules."""
    found = _find(model, leaf_module_classes)
    for module in found:
        _LEAVES.discard(module)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of a model."""
    return [module for module in model.modules() if module in _LEAVES]


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether the module is marked."""
    return module in _LEAVES
