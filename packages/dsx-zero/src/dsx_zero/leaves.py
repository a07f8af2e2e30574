"""Leaf modules: subtrees that are one unit at stage 3, gathered and freed as a whole.

Needed where it must not depend on the data which parts of a subtree run (mixtures of experts), and useful for many tiny modules. They are chosen by
marks, which are kept beside the modules, not on them, and count when the model is sharded; by the configuration's `leaf_module`; or by size
(`stage3_module_granularity_threshold`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakSet

from torch import nn

from .errors import ZeroModelError

__all__ = [
    "fine_modules",
    "get_z3_leaf_modules",
    "named_leaves",
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


def named_leaves(
    model: nn.Module, classes: Sequence[str] = (), names: Sequence[str] = (), suffixes: Sequence[str] = ()
) -> frozenset[str]:
    """Names of the modules that a `leaf_module` section chooses: by class name (bare or with its module), full name, or end of the name.

    Raises:
        ZeroModelError: an entry that chooses nothing.
    """
    wanted = (
        [("classes", c) for c in classes] + [("names", n) for n in names] + [("name_suffixes", x) for x in suffixes]
    )
    found: set[str] = set()
    left = dict.fromkeys(wanted)
    for name, module in model.named_modules():
        for key, entry in wanted:
            if _fits(key, entry, name, module):
                found.add(name)
                left.pop((key, entry), None)
    if left:
        listed = ", ".join(f"{key}: {entry!r}" for key, entry in sorted(left))
        raise ZeroModelError(f"leaf_module: no module of the model fits {listed}")
    return frozenset(found)


def _fits(key: str, entry: str, name: str, module: nn.Module) -> bool:
    if key == "names":
        return name == entry
    if key == "name_suffixes":
        return name.endswith(entry)
    return any(entry in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}") for kind in type(module).__mro__)


def fine_modules(model: nn.Module, threshold: int) -> frozenset[str]:
    """Names of the outermost modules that are finely divided: at most `threshold` parameters per layer (module without children) below them.

    Containers of torch (`ModuleList`, `Sequential`, ...) are looked through, because they are not called as a whole or
    stand for the model; the model itself is never one of them. 0 chooses nothing.
    """
    found: set[str] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            layers = [m for m in child.modules() if next(m.children(), None) is None]
            numel = sum(parameter.numel() for parameter in child.parameters())
            container = type(child).__module__ == nn.ModuleList.__module__
            if not container and len(layers) > 1 and 0 < numel <= threshold * len(layers):
                found.add(path)
            else:
                visit(child, f"{path}.")

    if threshold:
        visit(model, "")
    return frozenset(found)
