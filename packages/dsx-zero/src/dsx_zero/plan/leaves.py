"""Leaf modules: subtrees that are one unit at stage 3, gathered and freed as a whole.

They are needed where the data decide which parts of a subtree run (mixtures of experts), and useful for many tiny
modules. They are chosen by marks, by the configuration's `leaf_module`, or by size
(`stage3_module_granularity_threshold`). Marks are kept beside the modules, not on them, and are read when the model is
sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from dsx_core.modules import LEAF_MODULES
from torch import nn

from ..errors import ZeroModelError

__all__ = [
    "fine_modules",
    "get_z3_leaf_modules",
    "marked_parameter",
    "named_leaves",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

Chosen = Iterable[type[nn.Module] | str]


def _find(model: nn.Module, chosen: Chosen, raise_if_not_found: bool) -> list[nn.Module]:
    wanted = [chosen] if isinstance(chosen, (str, type)) else list(chosen)
    found = [
        module
        for name, module in model.named_modules()
        if any(isinstance(module, w) if isinstance(w, type) else w == name or _is_a(module, w) for w in wanted)
    ]
    if not found and raise_if_not_found:
        names = ", ".join(w.__name__ if isinstance(w, type) else w for w in wanted)
        raise ZeroModelError(f"no module of the model is named, or of a class among: {names}")
    return found


def _is_a(module: nn.Module, name: str) -> bool:
    """Whether a module is of the class of this name, bare or with its Python module, or of a class derived from it."""
    return any(name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}") for kind in type(module).__mro__)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Chosen, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes. Call it before the model is sharded.

    Args:
        model: where to look.
        leaf_module_classes: classes, class names (bare, or with their Python module:
            "transformers.models.mixtral.modeling_mixtral.X"), or full names of modules.
        raise_if_not_found: whether it is an error that there is none.

    Returns:
        The modules.

    Raises:
        ZeroModelError: there is none.
    """
    found = _find(model, leaf_module_classes, raise_if_not_found)
    LEAF_MODULES.update(found)
    return found


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their full names (those of `named_modules()`).

    Args:
        model: where to look.
        module_names: the names.
        flag: False takes the mark off.
        raise_if_not_found: whether a name that no module has is an error.

    Returns:
        The modules, and the names that no module has.

    Raises:
        ZeroModelError: for names that no module has; nothing was marked.
    """
    return _mark_by("names", model, module_names, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose full names end so: at stage 3 each of them is gathered as a whole.

    Args:
        model: where to look, before it is sharded.
        module_name_suffixes: ends of names as `named_modules()` gives them, such as "mlp.experts".
        flag: False takes the mark off.
        raise_if_not_found: whether a suffix that fits no module is an error.

    Returns:
        The modules, and the suffixes that fit none.

    Raises:
        ZeroModelError: for suffixes that fit no module; nothing was marked.
    """
    return _mark_by("name_suffixes", model, module_name_suffixes, flag, raise_if_not_found)


def _mark_by(
    key: str, model: nn.Module, entries: Iterable[str], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    wanted = [entries] if isinstance(entries, str) else list(entries)
    modules = dict(model.named_modules())
    found = [module for name, module in modules.items() if any(_fits(key, entry, name, module) for entry in wanted)]
    missing = [entry for entry in wanted if not any(_fits(key, entry, n, m) for n, m in modules.items())]
    if missing and raise_if_not_found:
        raise ZeroModelError(
            f"no module of the model fits {key} {missing}; the names are those of model.named_modules()"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark (`flag` True) or unmark one module, before the model is sharded: at stage 3 it is gathered as a whole, with
    everything inside, instead of part by part.
    """
    if flag:
        LEAF_MODULES.add(model)
    else:
        LEAF_MODULES.discard(model)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Chosen, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules`.

    Args:
        model: where to look.
        leaf_module_classes: classes, or their names, as they were given there.
        raise_if_not_found: whether a class of which the model has no module is an error.

    Returns:
        The modules whose mark was taken off.

    Raises:
        ZeroModelError: the model has no module of these classes.
    """
    found = _find(model, leaf_module_classes, raise_if_not_found)
    for module in found:
        LEAF_MODULES.discard(module)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of a model."""
    return [module for module in model.modules() if module in LEAF_MODULES]


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether the module is marked."""
    return module in LEAF_MODULES


def marked_parameter(parameter: torch.Tensor) -> bool:
    """Whether one of the marked modules, or a module inside one, holds this object."""
    return any(parameter is own for leaf in LEAF_MODULES for own in leaf.parameters())


def named_leaves(
    model: nn.Module, classes: Sequence[str] = (), names: Sequence[str] = (), suffixes: Sequence[str] = ()
) -> frozenset[str]:
    """Names of the modules that a `leaf_module` section chooses: by class name (bare or with its module), full name, or
    end of the name.

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
    return _is_a(module, entry)


def fine_modules(model: nn.Module, threshold: int) -> frozenset[str]:
    """Names of the outermost modules that are finely divided: at most `threshold` parameters per layer (module without
    children) below them.

    Containers of torch (`ModuleList`, `Sequential`, ...) are not chosen, but what they contain is: they are not called
    as a whole, or they are all of the model. The model itself is never chosen. 0 chooses nothing.
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
