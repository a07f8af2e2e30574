"""Parameters in 4 or 2 bits: each rank sends how its shard differs from what the others have of it.

    d  = w - copy              this rank's shard, and what all ranks have of it
    copy <- copy + Q(d)        on every rank, from the same message

The error is at most half a code of `d`, which is the size of an optimizer step, not of the parameters: it is some per
cent of one step, and the next difference contains it again. (To add the rounding error to the next *value* instead,
Q(w + e), bounds the mean of what is sent, and lets each value jump by a whole code of the parameters from step to step.
A sum of updates forgives that; a forward pass, which is not linear, computes with one of them. Difference coding of
this kind is EF21, arXiv:2106.05203.)

Whole copies on every rank are what stage 3 is there to avoid, so they are the secondary shards of `SecondaryGather`:
ranks near by have a copy among them. A gather after a step takes two messages that start together, the copy from the
ranks near by in full precision and the differences from all ranks in few bits. What no step has made (the first
values, a load, an edit) may be far from the copy and is sent as it is.

Left out: ranks without near ones (experts), whose parameters another transport carries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import dsx_comm
import torch
from dsx_comm.compressed.blocks import BlockFormat, dequantize_rows, quantize_rows

from ..lanes import Pending
from ..params.flat import FlatGroup
from .errors import CURRENT, SENT, FlatError, StoredErrors, read_range
from .levels import SecondaryGather, part_of
from .protocol import Then, Transport
from .quantized import FLOATS

__all__ = ["DifferenceGather"]


class _Restored(NamedTuple):
    """What the other ranks had of this rank's shard when a checkpoint was made.

    Attributes:
        values: 1-D, of the shard's size and dtype.
        current: they were what the model computed with; else there had been a step since.
        replaced: `FlatGroup.replaced` behind the load: with a later edit they count for nothing.
    """

    values: torch.Tensor
    current: bool
    replaced: int


class DifferenceGather(SecondaryGather):
    """Gathers with secondary shards that differences keep up to date.

    Args:
        exact: carries values that may be far from the copy, and what is not trained.
        alone: carries the parameters of ranks that have no near ones.
        form: bits and blocks of differences.
    """

    def __init__(self, exact: Transport, alone: Transport, form: BlockFormat) -> None:
        super().__init__(exact)
        self._alone, self._form = alone, form
        self._sent: dict[FlatGroup, torch.Tensor] = {}
        self._replaced: dict[FlatGroup, int] = {}
        self._restored: dict[FlatGroup, _Restored] = {}

    def tensors(self) -> list[torch.Tensor]:
        """See `Transport.tensors`: the secondary shards, and what other ranks have of this rank's shards."""
        restored = [found.values for found in self._restored.values()]
        return super().tensors() + self._alone.tensors() + list(self._sent.values()) + restored

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Pending | None:
        """See `Transport.start`."""
        carry = self._alone.start if group.ranks.near is None else super().start
        return carry(out, source, group, label)

    def _fill(
        self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str, near: dsx_comm.RankSet
    ) -> Then:
        if not group.trainable or source.dtype not in FLOATS:
            return super()._fill(out, source, group, label, near)
        if group not in self._shards or self._replaced.get(group) != group.replaced:
            self._replaced[group] = group.replaced
            self.settle(group)
            sent = self._sent[group] = self._begin_with(source, group)
            return super()._fill(out, sent, group, label, near)
        return self._add_differences(out, source, group, label, near)

    def _add_differences(
        self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str, near: dsx_comm.RankSet
    ) -> Then:
        copy = self._read(out, group, label, near)  # settles the shard
        sent, shard = self._sent[group], self._shards[group]
        difference = _difference(source, sent, group)
        differences = torch.empty(out.numel(), dtype=torch.float32, device=out.device)
        with dsx_comm.unit(label):
            message = dsx_comm.quantized_all_gather(
                differences,
                difference,
                self._form.bits,
                self._form.block,
                group=group.ranks.gather_group,
                async_op=True,
            )

        def add() -> None:
            with torch.no_grad():
                out.add_(differences)
                shard.copy_(part_of(out, near.rank, near.size))
                sent.copy_(part_of(out, group.rank, group.ranks.size))

        return Then([copy, message], add, keeps=difference)

    def _begin_with(self, source: torch.Tensor, group: FlatGroup) -> torch.Tensor:
        """The values to send as they are: those of the shard, or those that the job of a checkpoint would have now."""
        restored = self._restored.pop(group, None)
        if restored is None or restored.replaced != group.replaced:
            return source.clone()
        if not restored.current:
            difference = _difference(source, restored.values, group).view(1, -1)
            rounded = torch.empty_like(difference)
            dequantize_rows(quantize_rows(difference, self._form), self._form, rounded)
            restored.values.add_(rounded.view(-1))
        return restored.values

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def errors(self, group: FlatGroup) -> Sequence[FlatError]:
        """See `KeepsErrors.errors`: what the other ranks have of this rank's shard."""
        restored = self._restored.get(group)
        if restored is not None and restored.replaced == group.replaced:
            return [self._stored(group, restored.values, current=restored.current)]
        sent = self._sent.get(group)
        if sent is None or self._replaced.get(group) != group.replaced:
            return []  # the next gather sends the values as they are
        self.settle(group)
        return [self._stored(group, sent, current=self._generation.get(group) == group.generation)]

    def _stored(self, group: FlatGroup, values: torch.Tensor, *, current: bool) -> FlatError:
        start = group.rank * group.layout.shard_numel
        return FlatError(CURRENT if current else SENT, start, values.to(torch.float32))

    def numbers(self, group: FlatGroup) -> Mapping[str, int]:
        """See `KeepsErrors.numbers`: there are none."""
        return {}

    def whole_errors(self, group: FlatGroup) -> Mapping[str, torch.Tensor]:
        """See `KeepsErrors.whole_errors`: a new layout begins with values as they are."""
        return {}

    def read_errors(self, group: FlatGroup, stored: StoredErrors) -> Callable[[], None]:
        """See `KeepsErrors.read_errors`. They belong to elements, so that any number of ranks can divide them."""
        layout, values = group.layout, None
        mine = [name for name in layout.names if layout.local_slice(name, group.rank) is not None]
        key = next((k for k in (SENT, CURRENT) if mine and all(k in stored.state_keys(name) for name in mine)), None)
        if key is not None and group.ranks.near is not None and group.key.dtype in FLOATS:
            numel = layout.shard_numel
            values = torch.zeros(numel, dtype=group.key.dtype, device=group.key.device)
            read_range(stored, key, group, values, group.rank * numel)

        def install() -> None:
            self._restored.pop(group, None)
            if values is not None:
                behind = group.replaced + 1  # the load itself is a replacement, which is noted when all is written
                self._restored[group] = _Restored(values, key == CURRENT, behind)

        return install


def _difference(values: torch.Tensor, copy: torch.Tensor, group: FlatGroup) -> torch.Tensor:
    """values - copy in float32 [shard]; nothing between parameters, where the copy holds what rounding has left, and
    nothing where they are equal, infinities too. A value that is not finite and was sends a block that is not.
    """
    difference = (values.to(torch.float32) - copy).masked_fill_(values == copy, 0.0)
    first = group.rank * group.layout.shard_numel
    for begin, end in group.layout.gaps:
        difference[max(begin - first, 0) : max(end - first, 0)] = 0.0
    return difference
