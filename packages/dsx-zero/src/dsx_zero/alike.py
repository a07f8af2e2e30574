"""Checks that all ranks are about to build the same. This is done once, before anything is divided: a difference is
named instead of ending in a hang or in wrong numbers.

Each rank describes what it is about to build by facts: text by key. How ranks compare facts, and how a rank that fails
before tells the others, is `dsx_core.Together`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dsx_comm
import dsx_core
import torch
from torch import nn

from .errors import ZeroError

__all__ = ["RanksDifferError", "agree", "hash_of", "model_facts", "optimizer_facts", "telling"]


class RanksDifferError(ZeroError, dsx_core.RanksDifferError):
    """The ranks were given different models or settings, or one of them failed."""


def agree(doing: str, facts: Mapping[str, str], process_group: Any = None) -> None:
    """Check that all ranks of a group have equal facts (collective).

    Args:
        doing: name of the call, for errors.
        facts: of this rank.

    Raises:
        RanksDifferError: on every rank; names what differs, and on which ranks. Where another rank has failed: names it
            and its error.
    """
    dsx_comm.together(process_group, differ=RanksDifferError).agree(doing, facts)


@contextmanager
def telling(process_group: Any = None) -> Iterator[None]:
    """Put around work that comes before `agree` and does not communicate: an error in it makes `agree` raise on the
    other ranks, too (collective in that case).
    """
    try:
        yield
    except Exception:  # the process group may have been made by this work
        with dsx_comm.together(process_group, differ=RanksDifferError).telling():
            raise


# What is compared
# ------------------------------------------------------------------------------------------------------


def model_facts(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names, shapes and dtypes of parameters and buffers, what is trained, and the code of the modules."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        trained = "trained" if parameter.requires_grad else "frozen"
        yield f"parameter {name}", f"{tuple(parameter.shape)} {parameter.dtype} {trained}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"buffer {name}", f"{tuple(buffer.shape)} {buffer.dtype}"
    for name in sorted({type(module).__module__ for module in model.modules()}):
        if name.split(".")[0] != "torch":
            yield f"code of {name}", _file_hash(name)
    for name, module in model.named_modules():
        yield f"module {name or '(root)'}", type(module).__qualname__


def hash_of(names: Iterable[str]) -> str:
    """A short text that stands for these names in this order."""
    return hashlib.sha256(repr(list(names)).encode()).hexdigest()[:8]


def _file_hash(module: str) -> str:
    """A hash of the file that a Python module was read from; the same for modules without one."""
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def optimizer_facts(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Class, and of each parameter group its settings and parameters (`names` by `id`)."""
    yield "optimizer", type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                members = [names.get(id(parameter), "?") for parameter in value]
                text = f"{len(members)} parameters, {hash_of(members)}"
            elif key == "param_names":
                continue
            else:
                text = _text(value)
            yield f"optimizer.param_groups[{index}].{key}", text


def _text(value: Any) -> str:
    """A number, or a structure of numbers, as text. Other objects are described by their class, because their text may
    contain an address.
    """
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
