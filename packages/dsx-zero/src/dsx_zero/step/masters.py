"""The tensors that the inner optimizer sees: one per parameter with this rank's slice of its master values.

At stage 0 every rank steps all elements, so the tensors keep their logical shapes and any optimizer works. From stage 1
on they are 1-D slices, also for rules with a function of whole matrices (`matrices.py`), or whole tensors where the
optimizer needs those (`needs_whole_tensors`). Parameters of which this rank owns no element are left out of the
optimizer's groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dsx_core.errors import first_few
from torch import nn

from ..errors import ZeroOptimizerError
from ..homes.home import Home, read, write
from ..params.flat import FlatGroup, Unit
from ..plan.layout import LocalSlice, pieces
from ..plan.matrices import MatrixState
from ..plan.units import UnitPlan
from .matrix_rules import has_step_of, matrix_rule, matrix_states
from .plan import cut
from .sliced_matrices import cut_dimension

__all__ = [
    "Master",
    "Masters",
    "block_of",
    "check_optimizer",
    "check_whole_tensors",
    "copy_targets",
    "is_known",
    "make_masters",
    "needs_whole_tensors",
    "place_masters",
    "refresh_master",
    "replace_parameters",
    "write_parameters",
]

_REFUSED = {
    "LBFGS": "its line search evaluates the model again and again, and needs the whole gradient in one vector",
    "SparseAdam": "it needs sparse gradients of whole tensors",
}
_WHOLE = frozenset(
    {
        "Muon",
        "MuonWithAuxAdam",
        "Adafactor",
        "Shampoo",
        "DistributedShampoo",
        "SOAP",
        "GaLoreAdamW",
        "AdaFactor",
        "CAME",
        "Apollo",
        "ApolloDQN",
        "SWATS",
    }
)
"""Optimizers that need whole tensors: they orthogonalise or precondition matrices, keep states by row and column, or
look at norms of a tensor only after many steps (the last three), which a trial would not see.
"""


@dataclass(frozen=True)
class Master:
    """One tensor of the inner optimizer: the elements `slice` of parameter `name`, which may have several masters.

    Where masters live in memory, `tensor` has the values, in `shape`; elsewhere it has them only during its step. It
    always stays the same object, because it is the key of the optimizer's state.
    """

    name: str
    group: FlatGroup
    slice: LocalSlice
    shape: torch.Size
    tensor: torch.Tensor

    @property
    def numel(self) -> int:
        return self.slice.numel


def check_optimizer(optimizer: torch.optim.Optimizer, *, stage: int) -> None:
    """Refuse optimizers that cannot work on what one rank owns.

    Raises:
        ZeroOptimizerError: for such an optimizer at stage 1 or above.
    """
    for kind in type(optimizer).__mro__:
        if stage >= 1 and kind.__name__ in _REFUSED:
            raise ZeroOptimizerError(
                f"{type(optimizer).__name__} cannot be used at stage {stage}: {_REFUSED[kind.__name__]}, and a rank"
                " owns some of the elements; use stage 0, or another optimizer"
            )


def needs_whole_tensors(optimizer: Any) -> bool:
    """Must one rank own all elements of a parameter? True for the known optimizers of this kind, and where the
    attribute `optimizer.needs_whole_tensors` is true, which a trial may have set (`trial.py`); not where only a
    function of its rule takes whole matrices.
    """
    if matrix_rule(optimizer) is not None:
        return False
    said = getattr(optimizer, "needs_whole_tensors", None)
    return _named_whole(optimizer) if said is None else bool(said)


def is_known(optimizer: Any) -> bool:
    """Is it known whether the optimizer needs whole tensors? It says so, or has a known name, or the step of a class
    of torch.
    """
    if getattr(optimizer, "needs_whole_tensors", None) is not None or matrix_rule(optimizer) is not None:
        return True
    torchs = (kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim."))
    return _named_whole(optimizer) or has_step_of(optimizer, next(torchs, None))


def _named_whole(optimizer: Any) -> bool:
    return any(kind.__name__ in _WHOLE for kind in type(optimizer).__mro__)


def check_whole_tensors(optimizer: Any, plans: Sequence[UnitPlan], model: nn.Module) -> None:
    """Refuse an optimizer that needs whole tensors where tensor parallelism gives this rank slices of them, and one
    that needs whole matrices where slices do not say how they are joined (`partition_dim`).

    Raises:
        ZeroOptimizerError: names the parameter. Groups with `use_muon=False` are stepped element by element.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    joins = matrix_rule(optimizer) is not None
    if not joins and not needs_whole_tensors(optimizer):
        return
    held = {
        names.get(id(p), "") for group in optimizer.param_groups if group.get("use_muon", True) for p in group["params"]
    }
    slices = [
        name
        for plan in plans
        for group in plan.groups
        if group.key.trainable and group.key.ranks.tensor_groups
        for name in group.layout.names
        if name in held
    ]
    _check_not_stepped(optimizer, {id(model.get_parameter(name)): name for name in slices})
    sliced = [name for name in slices if not (joins and cut_dimension(model.get_parameter(name)) is not None)]
    if sliced:
        raise ZeroOptimizerError(
            f"{type(optimizer).__name__} needs whole tensors, and tensor parallelism gives each rank a slice of"
            f" {first_few(sliced)}: the update of a slice is not the slice of the update. Train"
            " without tensor slices, use an element-wise optimizer (AdamW), put these parameters into groups with"
            " use_muon=False where the optimizer has such groups, or mark them with partition_dim where it is Muon,"
            " which joins slices"
        )


def _check_not_stepped(optimizer: Any, slices: Mapping[int, str]) -> None:
    """Refuse states of matrices that the optimizer made of slices. `slices`: names by the `id` of the parameter."""
    rule = matrix_rule(optimizer)
    stepped = [
        slices[id(p)]
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) in slices and optimizer.state.get(p) and matrix_states(rule, p.shape, group)
    ]
    if stepped:
        raise ZeroOptimizerError(
            f"{type(optimizer).__name__} has made steps with slices of {first_few(stepped)}, and has states of these"
            " slices, which say nothing of the whole matrices; shard the model before the first step, or clear"
            " optimizer.state"
        )


Masters = Sequence[tuple[nn.Parameter, tuple[Master, ...]]]
"""Trainable parameters, each with the masters that this rank steps."""


def make_masters(
    units: Sequence[Unit], *, whole: bool, most: int | None = None, known: Mapping[FlatGroup, Masters] | None = None
) -> Masters:
    """Every trainable parameter with its masters (none where this rank owns nothing), in layout order.

    Args:
        whole: masters have the parameter's shape.
        most: cut slices into pieces of at most this many elements; None: one master per parameter.
        known: masters of groups that have some already; these groups keep them.
    """
    known = known or {}
    return [
        pair
        for unit in units
        for group in unit.trainable
        for pair in (known[group] if group in known else _of_group(group, whole=whole, most=most))
    ]


def _of_group(group: FlatGroup, *, whole: bool, most: int | None) -> Iterator[tuple[nn.Parameter, tuple[Master, ...]]]:
    if group.master is None:
        raise ZeroOptimizerError("masters were asked for before they were made")
    layout, home = group.layout, group.master
    values = home.view()
    places = {part.name: part.slice for part in group.parts}
    for name, shape, parameter in zip(layout.names, layout.shapes, group.parameters):
        place, masters = places.get(name), []
        if place is None:
            yield parameter, ()
            continue
        for start, stop in ((0, place.numel),) if whole or layout.undivided or most is None else cut(place.numel, most):
            piece = LocalSlice(place.start + start, place.start + stop, place.offset + start)
            # A 0-dim parameter gets a 1-D master: its states must differ in shape from single values such as `step`.
            form = torch.Size(shape) if (whole or layout.undivided) and shape else torch.Size([piece.numel])
            if values is None:
                tensor = torch.empty(0, dtype=home.dtype, device=home.device)
            else:
                tensor = values.narrow(0, piece.offset, piece.numel).view(form).detach()
            held = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            masters.append(Master(name, group, piece, form, held))
        yield parameter, tuple(masters)


def replace_parameters(optimizer: Any, current: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The model has new parameter objects: replace every old one in `param_groups` and `state` by `current(old)`."""
    for group in optimizer.param_groups:
        for old in group["params"]:
            if (new := current(old)) is not old and old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
        group["params"] = [current(old) for old in group["params"]]


def block_of(optimizer: Any, key: str) -> int | None:
    """The number of elements that share one value of the state `key` (scales of coded moments); None for any other
    state.
    """
    return getattr(optimizer, "state_parts", {}).get(key)


def place_masters(optimizer: torch.optim.Optimizer, masters: Masters, *, keep: Collection[int] = ()) -> None:
    """Put the masters in the place of the parameters in `param_groups`, and cut states that exist already.

    States of other tensors are deleted, except those whose `id` is in `keep`: an optimizer that has sharded a model
    before still has the states of its masters.
    """
    by_parameter = {id(parameter): pieces for parameter, pieces in masters}
    rule = matrix_rule(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.pop(parameter, None)
            of_matrices = matrix_states(rule, parameter.shape, group) if state else {}
            for master in by_parameter.get(id(parameter), ()) if state else ():
                optimizer.state[master.tensor] = {
                    k: _cut(k, v, parameter, master, block_of(optimizer, k))
                    if k not in of_matrices
                    else _cut_of_matrices(of_matrices[k], v, parameter, master)
                    for k, v in state.items()
                }
        group["params"] = [master.tensor for p in group["params"] for master in by_parameter.get(id(p), ())]
    current = {id(master.tensor) for _, pieces in masters for master in pieces}.union(keep)
    for key in [key for key in optimizer.state if isinstance(key, torch.Tensor) and id(key) not in current]:
        del optimizer.state[key]


def _cut_of_matrices(state: MatrixState, value: Any, parameter: torch.Tensor, master: Master) -> Any:
    """The master's part of a state of its parameter's matrices; all of it where the master is the whole tensor."""
    if master.shape == parameter.shape:
        return value
    return value.reshape(-1)[state.at(master.slice.start) : state.at(master.slice.stop)].clone()


_SINGLE = ("step", "eta", "mu", "mu_product")
"""States of torch's optimizers that are one number per parameter, whatever its shape."""


def _cut(key: str, value: Any, parameter: torch.Tensor, master: Master, block: int | None) -> Any:
    """The master's part of a state tensor that has the parameter's shape, or one value per `block` of its elements; any
    other state is returned as it is.
    """
    if block is not None:
        return value[master.slice.start // block : -(-master.slice.stop // block)].clone()
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or (value.dim() == 0 and key in _SINGLE):
        return value
    if value.dtype == parameter.dtype != master.tensor.dtype:
        value = value.to(master.tensor.dtype)
    return value.reshape(-1)[master.slice.start : master.slice.stop].clone().view(master.shape)


def write_parameters(group: FlatGroup) -> None:
    """Write the low-precision copy of the masters. Does nothing where the master is the parameter's own memory."""
    if (master := group.own_master) is not None:
        _copy_all(group.stepped, master)


def refresh_master(group: FlatGroup) -> None:
    """The reverse of `write_parameters`: the masters take the parameters' values."""
    if (master := group.own_master) is not None:
        _copy_all(master, group.stepped)


_AT_ONCE = 1 << 24


def _copy_all(target: Home, source: Home) -> None:
    """Copy between homes. If one of them is not in memory, at most `_AT_ONCE` elements are copied at a time."""
    step = source.numel if source.view() is not None and target.view() is not None else _AT_ONCE
    for start, stop in pieces(source.numel, step):
        write(target, read(source, start, stop), start)


def copy_targets(masters: Sequence[Master]) -> dict[torch.Tensor, torch.Tensor]:
    """The targets of an optimizer that writes low-precision copies, by master tensor."""
    found: dict[torch.Tensor, torch.Tensor] = {}
    for master in masters:
        group, place = master.group, master.slice
        if group.own_master is None:
            continue
        shown = group.stepped.view()
        if shown is not None and shown.device == master.tensor.device:
            found[master.tensor] = shown.narrow(0, place.offset, place.numel).view(master.shape)
    return found
