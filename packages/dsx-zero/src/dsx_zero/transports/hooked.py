"""Gathers of weights that are sent in a form of their own: by the hooks of their subclass (`params.gather_hooks`).

A weight's rows lie in a flat buffer of their own, as many on each rank. The pre-hook makes of a rank's rows what is
sent, as bytes, and the post-hook makes the weight of everything (`params.hooked_unit.HookedStorage`).

Left out: when, and what becomes of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import dsx_comm
import torch
from dsx_comm.lanes import Pending

from ..errors import ZeroModelError
from ..params.flat import FlatGroup
from ..params.gather_hooks import GatherHooks
from ..params.hooked_unit import HookedStorage
from .protocol import Then, Transport
from .scales import Scales

__all__ = ["HookedGather"]


def _padded(sent: torch.Tensor, used: int, each: int, hooks: GatherHooks, group: FlatGroup) -> torch.Tensor:
    """A tensor to send with as many rows on every rank. Where it cannot have them, all ranks raise."""
    if each * group.ranks.size == hooks.size[0]:
        return sent
    if not sent.dim() or sent.shape[0] != max(1, used):
        raise ZeroModelError(
            f"{group.layout.names[0]}: its {hooks.size[0]} rows are {each} for each of {group.ranks.size} ranks, and"
            f" fewer for the last ones, and the fsdp_pre_all_gather of {hooks.kind} makes a tensor of shape"
            f" {tuple(sent.shape)} of {used} rows; expected as many rows, or a number of rows that the ranks divide"
        )
    if used == each:
        return sent
    whole = sent.new_empty(each, *sent.shape[1:])
    whole.view(torch.uint8).zero_()
    whole[:used].copy_(sent[:used])
    return whole


def _sent(
    inputs: list[torch.Tensor], buffers: list[torch.Tensor], group: FlatGroup, label: str
) -> list[Pending | None]:
    """Start the messages. They are bytes, because not every backend knows every dtype."""
    pending: list[Pending | None] = []
    with dsx_comm.unit(label):
        for tensor, out in zip(inputs, buffers):
            mine = tensor.reshape(-1).view(torch.uint8)
            if group.ranks.size == 1:
                out.copy_(mine)
            else:
                pending.append(
                    dsx_comm.all_gather_into_tensor(out, mine, group=group.ranks.gather_group, async_op=True)
                )
    return pending


class HookedGather:
    """The transport of a model with weights that are sent in a form of their own; another one carries the rest.

    Args:
        inner: carries plain values.
        stores: of each flat group with such a weight.
    """

    def __init__(self, inner: Transport, stores: Mapping[FlatGroup, HookedStorage]) -> None:
        self._inner, self._stores = inner, stores
        self._meshes: dict[Any, Any] = {}
        self._scales = Scales({group: store.hooks for group, store in stores.items()})

    def tensors(self) -> list[torch.Tensor]:
        """See `Transport.tensors`."""
        return self._inner.tensors()

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        store = self._stores.get(group)
        if store is None:
            return self._inner.start(out, source, group, label)
        size = store.hooks.size
        row = store.row(group)
        part = group.layout.local_slice(group.layout.names[0], group.rank)
        used = 0 if part is None else part.numel // row
        values = source[: used * row] if used else source.new_zeros(row)  # a rank without rows takes part in a scale
        with torch.inference_mode(False), torch.no_grad():
            self._scales.update(group)
            rows = store.hooks.around(values.detach().view(-1, *size[1:]))
            sent, kept = store.hooks.send(rows, self._mesh(group))
            each = group.layout.shard_numel // row
            inputs = [_padded(tensor.contiguous(), used, each, store.hooks, group) for tensor in sent]
            if out is store.fill:
                return Then(_sent(inputs, store.buffers(inputs, group.ranks.size), group, label),
                            partial(store.receive, rows, kept), keeps=inputs)  # fmt: skip
            # The weight is gathered here already, and only the other ranks need the rows.
            buffers = [torch.empty(group.ranks.size * t.nbytes, dtype=torch.uint8, device=t.device) for t in inputs]
            return Then(_sent(inputs, buffers, group, label), keeps=(inputs, buffers))

    def _mesh(self, group: FlatGroup) -> Any:
        """The ranks of a group as a device mesh, which hooks are given."""
        ranks = group.ranks
        if ranks not in self._meshes:
            from torch.distributed import group as groups  # lazy import: the mesh costs 0.2 s
            from torch.distributed.device_mesh import DeviceMesh

            shared: Any = groups.WORLD if ranks.gather_group is None else ranks.gather_group
            self._meshes[ranks] = DeviceMesh.from_group(shared, group.key.device.type)
        return self._meshes[ranks]
