"""Norms and edits of single averaged gradients, for users who use `.grad` between backward and step.

Every `ShardedGradient` has a `GradientPlace`. This file does its communication. An ordinary step, in which the user
does not use `.grad`, does not use this file either.

Norms are computed for all parameters at once and kept until the gradients change. `clip_grad_norm_` asks for them one
by one; so it needs only one collective.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import dsx_comm
import torch

from ..homes.home import Home, opened, read
from ..params.flat import FlatGroup
from ..params.whole import read_whole, write_whole
from ..plan.layout import FlatLayout
from ..torch_names import amp_foreach_non_finite_check_and_unscale_, current_graph_task_id
from .sharded import GradientSource, ShardedGradientError

__all__ = ["GradientAccess", "GradientPlace", "opened_piece"]

_REMEDY = (
    "Read it with dsx_zero.safe_get_full_grad(p) and write it with dsx_zero.safe_set_full_grad(p, value), on every"
    " rank. Clip with optimizer.step(max_norm=...) or torch.nn.utils.clip_grad_norm_(model.parameters(), ...); update"
    " parameters with the optimizer that dsx_zero.shard returned"
)


class ReducedGroup(Protocol):
    """The part of `grads.buffers.GroupGradients` that this file uses: the reduced gradients of one flat group."""

    group: FlatGroup
    dtype: torch.dtype
    stage: int

    def values(self) -> Home:
        """This rank's reduced gradients (the whole ones at stage 0)."""
        ...

    def zero(self, index: int) -> None: ...

    def forget_norm(self) -> None:
        """Note that the values were written through `values`, so that their norm is not known."""
        ...


def _range(group: ReducedGroup, index: int) -> tuple[int, int]:
    layout = group.group.layout
    if group.stage == 0:
        return layout.offsets[index], layout.offsets[index] + layout.sizes[index]
    part = layout.local_slice(layout.names[index], group.group.rank)
    return (0, 0) if part is None else (part.offset, part.offset + part.numel)


def _piece(group: ReducedGroup, index: int) -> torch.Tensor:
    """This rank's part of a parameter's reduced gradient, 1-D, for reading. At stage 0 it is the whole gradient."""
    return read(group.values(), *_range(group, index))


@contextmanager
def opened_piece(group: ReducedGroup, index: int) -> Iterator[torch.Tensor]:
    """A context with this rank's part of a parameter's reduced gradient, 1-D, for writing."""
    home = group.values()  # before: what adds values up keeps their norm
    group.forget_norm()
    with opened(home, *_range(group, index)) as piece:
        yield piece


@dataclass
class _Shards:
    """A gradient's shard in the form that `write_whole` needs."""

    layout: FlatLayout
    shard: Home
    ranks: dsx_comm.RankSet
    master: Home | None = None


class GradientAccess:
    """Gives access to the reduced gradients of one sharded model.

    Args:
        complete: reduces the gradients that have not been reduced yet (collective).
        divided: True: each rank of a group has a shard of its gradients; False: each rank has all of them.
        norm_groups: process groups over which a flag of one rank (its gradients are not finite) reaches all ranks.
        differ: the ranks have different parameters (experts, slices of tensors), so that norms that one rank adds up
            are not those of the model.
    """

    def __init__(
        self, complete: Callable[[], None], *, divided: bool, norm_groups: Sequence[Any] = (), differ: bool = False
    ) -> None:
        self._complete, self._divided, self._norm_groups = complete, divided, tuple(norm_groups)
        self._differ = differ
        self._groups: list[ReducedGroup] = []
        self._norms: dict[float, dict[tuple[int, int], torch.Tensor]] = {}
        self.changed: Callable[[], None] = self._norms.clear
        """Note that the gradients have new values. It is the dictionary's own method: each reduction calls it."""

    def add(self, group: ReducedGroup) -> None:
        """Give access to the gradients of this group, too."""
        self._groups.append(group)

    def norm(self, group: ReducedGroup, index: int, order: float, *, added_up: bool) -> torch.Tensor:
        """The norm of the whole averaged gradient of parameter `index` of `group` (collective).

        Raises:
            ShardedGradientError: the caller may add it to others, and the ranks have different parameters.
        """
        if self._differ and added_up:
            raise ShardedGradientError(
                f"the norm of the gradient of '{group.group.layout.names[index]}' was asked for, and the ranks have"
                " different parameters (experts, slices of tensors): each would add up its own, and clip what all hold"
                " by another factor. Clip with optimizer.step(max_norm=...), or let the engine clip as its"
                " configuration says: both add up all ranks; the norm of one parameter is p.grad.norm()"
            )
        self._complete()
        known, wanted = self._norms.get(order), (id(group), index)
        if known is None:
            places = [(g, i) for g in self._groups for i in range(len(g.group.parameters))]
            values = self._norms_of(places, order, group.group.key.device)
            known = self._norms[order] = {(id(g), i): value for (g, i), value in zip(places, values.unbind())}
        elif wanted not in known:  # edited since
            known[wanted] = self._norms_of([(group, index)], order, group.group.key.device)[0]
        return known[wanted].to(group.dtype)

    def _is_divided(self, group: ReducedGroup) -> bool:
        return self._divided and group.group.ranks.size > 1

    def _norms_of(self, places: Sequence[tuple[ReducedGroup, int]], order: float, device: torch.device) -> torch.Tensor:
        """Norms of the whole gradients at these places, as one fp64 tensor (fp32 if the device has no fp64)."""
        dtype = torch.float32 if device.type == "mps" else torch.float64
        local = torch.stack([_power_sum(_piece(g, i), order).to(device=device, dtype=dtype) for g, i in places])
        extreme = dsx_comm.ReduceOp.MAX if order > 0 else dsx_comm.ReduceOp.MIN
        op = extreme if math.isinf(order) else dsx_comm.ReduceOp.SUM
        for ranks in dict.fromkeys(g.group.ranks for g, _ in places if self._is_divided(g)):
            rows = torch.tensor([row for row, (g, _) in enumerate(places) if g.group.ranks == ranks], device=device)
            sums = local[rows]
            dsx_comm.all_reduce(sums, op=op, group=ranks.group)
            local[rows] = sums
        return local if math.isinf(order) or order == 0 else local ** (1.0 / order)

    def edit_shard(self, group: ReducedGroup, index: int, edit: Callable[[torch.Tensor], object]) -> None:
        """Apply an element-wise edit to this rank's part (collective if a reduction is not complete)."""
        self._complete()
        with opened_piece(group, index) as piece:
            edit(piece)
        self._edited(group, index)

    def edit_whole(self, group: ReducedGroup, index: int, edit: Callable[[torch.Tensor], object]) -> None:
        """Apply an edit to the whole gradient. All ranks keep rank 0's result (collective)."""
        self._complete()
        layout = group.group.layout
        if not self._is_divided(group):
            with opened_piece(group, index) as piece:
                edit(piece.view(layout.shapes[index]))
        else:
            shards = _Shards(layout, group.values(), group.group.ranks)
            whole = read_whole(layout, layout.names[index], shards.shard, shards.ranks, device=group.group.key.device)
            edit(whole)
            write_whole(shards, layout.names[index], whole)
        self._edited(group, index)

    def whole(self, group: ReducedGroup, index: int) -> torch.Tensor | None:
        """The whole gradient as a new tensor in the parameter's dtype; None if it is divided (collective)."""
        if self._is_divided(group):
            return None
        self._complete()
        piece, key = _piece(group, index).view(group.group.layout.shapes[index]), group.group.key
        return piece.to(device=key.device, dtype=key.dtype, copy=True)

    def unscale(
        self, places: Sequence[tuple[ReducedGroup, int]], found_inf: torch.Tensor, inv_scale: torch.Tensor
    ) -> None:
        """Multiply gradients by `inv_scale`; if one is not finite, set `found_inf` to 1 on all ranks (collective)."""
        self._complete()
        with ExitStack() as stack:
            pieces = [stack.enter_context(opened_piece(group, index)) for group, index in places]
            by_device: dict[torch.device, list[torch.Tensor]] = {}
            for piece in pieces:
                if piece.numel():
                    by_device.setdefault(piece.device, []).append(piece)
            for device, members in by_device.items():
                found, scale = found_inf.to(device), inv_scale.to(device)
                amp_foreach_non_finite_check_and_unscale_(members, found, scale)
                if found is not found_inf:
                    found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))
        for ranks in self._norm_groups:
            dsx_comm.all_reduce(found_inf, op=dsx_comm.ReduceOp.MAX, group=ranks)
        self.changed()

    def _edited(self, group: ReducedGroup, index: int) -> None:
        group.forget_norm()
        for known in self._norms.values():
            known.pop((id(group), index), None)


def _power_sum(piece: torch.Tensor, order: float) -> torch.Tensor:
    """This rank's contribution to a norm: the sum of |x|^order (fp64); for infinite orders the extreme of |x|; for
    order 0 the count of values that are not zero.
    """
    if not piece.numel():
        return torch.full((), math.inf if order == -math.inf else 0.0, dtype=torch.float64, device="cpu")
    dtype = torch.float32 if piece.dtype.itemsize < 4 else piece.dtype
    norm = torch.linalg.vector_norm(piece, order, dtype=dtype)
    if math.isinf(order):
        return norm.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)  # a maximum over ranks may lose a NaN
    return norm if order == 0 else norm.to(torch.float64 if piece.device.type != "mps" else dtype) ** order


class GradientPlace:
    """The `GradientSource` of one parameter.

    Its references to `access` and `group` are weak: `.grad` refers to it, and Python's collector does not see that
    reference.
    """

    def __init__(self, access: GradientAccess, group: ReducedGroup, index: int) -> None:
        self.name = group.group.layout.names[index]
        self._shape = group.group.layout.shapes[index]
        self._access, self._group, self._index = weakref.ref(access), weakref.ref(group), index

    def refusal(self, what: str) -> ShardedGradientError:
        """See `GradientSource`."""
        return ShardedGradientError(
            f"the gradient of parameter '{self.name}' (shape {tuple(self._shape)}) is averaged over the ranks and"
            f" divided among them, and cannot be {what}: no rank holds its values. {_REMEDY}."
        )

    def norm(self, order: float, *, added_up: bool) -> torch.Tensor:
        """See `GradientSource`."""
        access, group = self._owners("used by norm()")
        return access.norm(group, self._index, order, added_up=added_up)

    def edit_shard(self, edit: Callable[[torch.Tensor], object]) -> None:
        """See `GradientSource`."""
        access, group = self._owners("changed")
        access.edit_shard(group, self._index, edit)

    def edit_whole(self, edit: Callable[[torch.Tensor], object]) -> None:
        """See `GradientSource`."""
        access, group = self._owners("changed")
        access.edit_whole(group, self._index, edit)

    def whole(self) -> torch.Tensor | None:
        """See `GradientSource`."""
        access, group = self._owners("read")
        return access.whole(group, self._index)

    def unscale(self, others: Sequence[GradientSource], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """See `GradientSource`."""
        access, group = self._owners("unscaled")
        places = [(group, self._index)]
        for other in others:
            if not isinstance(other, GradientPlace) or other._access() is not access:
                raise ShardedGradientError(
                    "unscale: got gradients of several sharded models in one call; give each model an optimizer of"
                    " its own"
                )
            places.append((other._owners("unscaled")[1], other._index))
        access.unscale(places, found_inf, inv_scale)

    def zero(self) -> None:
        """See `GradientSource`."""
        access, group = self._owners("changed")
        group.zero(self._index)
        access.changed()

    def _owners(self, what: str) -> tuple[GradientAccess, ReducedGroup]:
        access, group = self._access(), self._group()
        if access is None or group is None:
            raise ShardedGradientError(
                f"the gradient of parameter '{self.name}' cannot be {what}: its sharded optimizer is gone; set p.grad ="
                " None"
            )
        if current_graph_task_id() != -1:
            raise ShardedGradientError(
                f"the gradient of parameter '{self.name}' cannot be {what} inside a backward: it is not averaged over"
                " the ranks yet. Change this rank's own gradient with p.register_hook(lambda grad: ...), or the"
                " averaged one after backward()"
            )
        return access, group
