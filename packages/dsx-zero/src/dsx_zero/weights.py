"""`load_weights`: fill a model from files of weights, each rank reading only what it keeps.

It works on an ordinary model, on one that `Init` has divided (on the meta device too), and on one that is sharded and
is being trained. All ranks check together, before the first value changes, that the files exist and are complete and
that names and shapes match. Then parameters are read in ranges of at most `_AT_ONCE` elements,
directly to where this rank keeps them: the device, host memory or disk. No rank holds a whole model.

Left out: files that are not safetensors, and global names of experts and slices that only some ranks hold (files must
have their local names).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsx_comm
import torch
from dsx_core.errors import first_few
from torch import nn

from .errors import ZeroLoadError
from .homes.home import Home, write
from .params.init import InitParameter
from .params.partitioned import PartitionedParameter
from .plan.layout import LocalSlice, pieces
from .state.weight_files import WeightFiles
from .view import OWNERS

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer

__all__ = ["LoadReport", "load_weights"]

_AT_ONCE = 1 << 22
"""Elements that are read at once."""

Put = Callable[[int, torch.Tensor], None]
"""Takes elements of a parameter from a start on."""


@dataclass(frozen=True)
class LoadReport:
    """The outcome of `load_weights`, by names of the model (unexpected ones: of the files).

    Attributes:
        loaded: have the files' values.
        missing: are not in the files, and keep their values.
        unexpected: are in the files, but not in the model.
        initialised: are not in the files and had no values (meta device): their modules' `reset_parameters` gave them
            some.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    initialised: tuple[str, ...]

    def __str__(self) -> str:
        counts = [f"{len(getattr(self, kind))} {kind}" for kind in ("loaded", "missing", "unexpected", "initialised")]
        return ", ".join(counts)


@dataclass(frozen=True)
class _Target:
    """A parameter or buffer of the model, with all its names."""

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def has_values(self) -> bool:
        if isinstance(self.tensor, PartitionedParameter) and isinstance(self.tensor.source, InitParameter):
            return self.tensor.source.has_values
        return isinstance(self.tensor, PartitionedParameter) or self.tensor.device.type != "meta"


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    process_group: Any = None,
) -> LoadReport:
    """Fill a model's parameters and buffers from safetensors files (collective).

    Args:
        model: an ordinary model, one built under `Init`, or a sharded one. States of its optimizer stay as they are.
        path: a folder as Hugging Face writes it, an index in it, or one file. Each rank reads its own copy.
        strict: names that are missing or unexpected are an error.
        rename: from a name in the files to one of the model; None for a tensor that is not wanted.
        process_group: the ranks that call this; default: all.

    Returns:
        The names by what happened to them.

    Raises:
        ZeroLoadError: the same on every rank. Files are missing or damaged, shapes differ, names do not fit (`strict`),
            or nothing gives values to a parameter without any. Nothing has been changed, unless a file could not be
            read to its end: that message says so.
    """
    together, plans = dsx_comm.together(process_group, kinds=(ZeroLoadError,)), list[_Plan]()

    def make_plan() -> str:
        plans.append(_plan(model, path, strict=strict, rename=rename))
        return plans[0].digest()

    if len(set(together.run("dsx_zero.load_weights", make_plan))) > 1:
        raise ZeroLoadError(
            "dsx_zero.load_weights: the ranks read different files, or have different models; expected the same on all"
            " ranks"
        )
    (plan,) = plans
    with torch.no_grad():
        for module in plan.to_initialise:
            module.reset_parameters()  # type: ignore[operator]
        try:
            together.run("dsx_zero.load_weights", plan.carry_out)
        except ZeroLoadError as error:
            raise ZeroLoadError(
                f"{error} Some parameters have their new values already: load again before training"
            ) from error.__cause__
    if plan.optimizer is not None:
        plan.optimizer.held.note_loaded()
    return plan.report


# What goes where ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    files: WeightFiles
    sources: tuple[tuple[_Target, str], ...]
    to_initialise: tuple[nn.Module, ...]
    optimizer: ZeroOptimizer | None
    report: LoadReport

    def digest(self) -> str:
        """A short text for what has to be equal on all ranks: names, shapes and types."""
        text = repr([(t.names, tuple(t.tensor.shape), s, self.files[s].dtype) for t, s in self.sources])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def carry_out(self) -> None:
        """Read everything this rank keeps."""
        for target, stored in self.sources:
            for put, part in _places(target, self.optimizer):
                for start, stop in pieces(part.numel, _AT_ONCE):
                    put(part.start + start, self.files.read(stored, part.start + start, part.start + stop))


def _targets(model: nn.Module) -> Iterator[_Target]:
    """Parameters, and buffers that checkpoints have; each tensor once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names.setdefault(id(buffer), []).append(f"{prefix}.{name}" if prefix else name)
                tensors[id(buffer)] = buffer
    return (_Target(tuple(names[key]), tensor) for key, tensor in tensors.items())


def _plan(model: nn.Module, path: str | Path, *, strict: bool, rename: Callable[[str], str | None] | None) -> _Plan:
    files, targets = WeightFiles(path), list(_targets(model))
    of_model: dict[str, str] = {}
    for stored in files:
        name = stored if rename is None else rename(stored)
        if name is None:
            continue
        if name in of_model:
            raise ZeroLoadError(f"{stored} and {of_model[name]} are both renamed to {name}; expected different names")
        of_model[name] = stored
    sources, absent = [], []
    for target in targets:
        found = next((of_model[name] for name in target.names if name in of_model), None)
        if found is None:
            absent.append(target)
        else:
            sources.append((target, found))
    known = {name for target in targets for name in target.names}
    report = LoadReport(
        loaded=tuple(target.name for target, _ in sources),
        missing=tuple(target.name for target in absent if target.has_values),
        unexpected=tuple(stored for name, stored in of_model.items() if name not in known),
        initialised=tuple(target.name for target in absent if not target.has_values),
    )
    _check_names(files, report, strict=strict)
    _check_forms(files, sources)
    to_initialise = tuple(_initialisers(model, report))
    optimizer = _optimizer(model)
    if optimizer is not None:
        optimizer.update.check_model()
    return _Plan(files, tuple(sources), to_initialise, optimizer, report)


def _initialisers(model: nn.Module, report: LoadReport) -> Iterator[nn.Module]:
    """The modules whose `reset_parameters` gives values to parameters that nothing else does."""
    seen: set[int] = set()
    for name in report.initialised:
        owner = name.rpartition(".")[0]
        module = model.get_submodule(owner)
        kept = [other for other in report.missing if other.rpartition(".")[0] == owner]
        if not callable(getattr(module, "reset_parameters", None)) or kept:
            why = f"would change {kept[0]}, which has values" if kept else "has no reset_parameters"
            raise ZeroLoadError(
                f"{name}: is not in the files and has no values, and its {type(module).__name__} {why}; write it on"
                " every rank before (parameter.data.normal_())"
            )
        if id(module) not in seen:
            seen.add(id(module))
            yield module


def _check_names(files: WeightFiles, report: LoadReport, *, strict: bool) -> None:
    wrong = {"missing": (*report.missing, *report.initialised), "unexpected": report.unexpected}
    if strict and any(wrong.values()):
        text = "; ".join(f"{kind}: {first_few(names)}" for kind, names in wrong.items() if names)
        raise ZeroLoadError(
            f"{files.path}: the names are not those of the model. {text}. Give rename= where names differ, or"
            " strict=False to load what fits"
        )


def _check_forms(files: WeightFiles, sources: Sequence[tuple[_Target, str]]) -> None:
    problems = []
    for target, stored in sources:
        got, expected = files[stored], target.tensor
        if got.shape != tuple(expected.shape):
            problems.append(f"{target.name}: got shape {got.shape}, expected {tuple(expected.shape)}")
        elif got.dtype.is_floating_point != expected.dtype.is_floating_point:
            problems.append(f"{target.name}: got {got.dtype}, expected {expected.dtype}")
        elif not isinstance(expected, PartitionedParameter) and expected.device.type == "meta":
            problems.append(
                f"{target.name}: is on the meta device and has no memory; build the model under dsx_zero.Init, or call"
                " model.to_empty first"
            )
    if problems:
        told = first_few(problems, between="; ")
        raise ZeroLoadError(f"{files.path}: {told}. It belongs to another model")


def _optimizer(model: nn.Module) -> ZeroOptimizer | None:
    """The optimizer that shards the model, if there is one in use."""
    owners = {id(found[0]): found[0] for p in model.parameters() if (found := OWNERS.find(p)) is not None}
    used = [owner for owner in owners.values() if not owner.released]
    if any(owner.runtime.model is not model for owner in used):
        raise ZeroLoadError("the model is a part of one that is sharded; load the whole one")
    return used[0] if used else None


def _places(target: _Target, optimizer: ZeroOptimizer | None) -> Iterator[tuple[Put, LocalSlice]]:
    """The places where this rank keeps a tensor, and the elements of it there."""
    tensor = target.tensor
    owner = None if optimizer is None else OWNERS.find(tensor)
    if optimizer is not None and owner is not None:
        for home, part in optimizer.layout.homes_of(owner[1]):
            yield _into(home, part), part
    elif isinstance(tensor, PartitionedParameter) and isinstance(tensor.source, InitParameter):
        source = tensor.source
        part = source.layout.local_slice(source.name, source.ranks.rank)
        if part is not None:
            yield source.write_part, part
        source.has_values = True
    else:
        flat = tensor.detach()
        yield _whole(flat), LocalSlice(0, flat.numel(), 0)


def _into(home: Home, part: LocalSlice) -> Put:
    return lambda start, values: write(home, values, part.offset + start - part.start)


def _whole(tensor: torch.Tensor) -> Put:
    if tensor.is_contiguous():
        flat = tensor.view(-1)

        def put_flat(start: int, values: torch.Tensor) -> None:
            flat[start : start + values.numel()].copy_(values)

        return put_flat

    def put(start: int, values: torch.Tensor) -> None:  # a layout of its own (channels_last)
        index = torch.arange(start, start + values.numel(), device=tensor.device)
        tensor[torch.unravel_index(index, tensor.shape)] = values.to(device=tensor.device, dtype=tensor.dtype)

    return put
