"""Parameters in 4 or 2 bits: each rank sends the difference between its shard and the copy that the others have.

    d  = w - copy              w: this rank's shard; copy: the values that all ranks have of it
    copy <- copy + Q(d)        on every rank, from the same message

The error is at most half a quantisation step of `d`, and `d` has the size of an optimizer step, not of the parameters.
So the error is a few per cent of one optimizer step, and the next difference contains it again. (Adding the rounding
error to the next *value* instead, Q(w + e), bounds only the mean of the values that are sent: each value may jump by a
full quantisation step of the parameters between optimizer steps. A sum of updates averages that out, but a forward
pass, which is not linear, computes with one of these values. Difference coding of this kind is EF21, arXiv:2106.05203.)

Stage 3 avoids whole copies on every rank. So the copy is the secondary shards of `SecondaryGather`: the near ranks have
a copy together. A gather after a step takes two messages that start together: the copy from the near ranks in full
precision, and the differences from all ranks in few bits. Values that no step has made (the first values, a load, an
edit) may be far from the copy, and are sent exactly.

Left out: rank sets without near ranks (experts), whose parameters another transport carries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import dsx_comm
import torch
from dsx_comm.compressed.blocks import BlockFormat, dequantize_rows, quantize_rows
from dsx_comm.lanes import Pending

from ..params.flat import FlatGroup
from .errors import CURRENT, SENT, FlatError, StoredErrors, read_range
from .levels import SecondaryGather, part_of
from .protocol import Then, Transport
from .quantized import FLOATS

__all__ = ["DifferenceGather"]


class _Restored(NamedTuple):
    """The values that the other ranks had of this rank's shard when a checkpoint was made.

    Attributes:
        values: 1-D, of the shard's size and dtype.
        current: True: the model computed with these values; False: there had been a step since.
        replaced: `FlatGroup.replaced` after the load. If it is higher, there was an edit, and the values are not used.
    """

    values: torch.Tensor
    current: bool
    replaced: int


class DifferenceGather(SecondaryGather):
    """Gathers with secondary shards that differences keep up to date.

    Args:
        exact: carries values that may be far from the copy, and groups that are not trained.
        alone: carries the parameters of rank sets without near ranks.
        form: bits and block size of differences.
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
        """The values to send exactly: those of the shard, or those that the job of a checkpoint would have now."""
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
        """See `KeepsErrors.errors`: the values that the other ranks have of this rank's shard."""
        restored = self._restored.get(group)
        if restored is not None and restored.replaced == group.replaced:
            return [self._stored(group, restored.values, current=restored.current)]
        sent = self._sent.get(group)
        if sent is None or self._replaced.get(group) != group.replaced:
            return []  # the next gather sends exact values
        self.settle(group)
        return [self._stored(group, sent, current=self._generation.get(group) == group.generation)]

    def _stored(self, group: FlatGroup, values: torch.Tensor, *, current: bool) -> FlatError:
        start = group.rank * group.layout.shard_numel
        return FlatError(CURRENT if current else SENT, start, values.to(torch.float32))

    def numbers(self, group: FlatGroup) -> Mapping[str, int]:
        """See `KeepsErrors.numbers`: there are none."""
        return {}

    def whole_errors(self, group: FlatGroup) -> Mapping[str, torch.Tensor]:
        """See `KeepsErrors.whole_errors`: there are none, because a new layout begins with exact values."""
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
                behind = group.replaced + 1  # the load itself counts as a replacement when everything is written
                self._restored[group] = _Restored(values, key == CURRENT, behind)

        return install


def _difference(values: torch.Tensor, copy: torch.Tensor, group: FlatGroup) -> torch.Tensor:
    """values - copy, float32 [shard].

    It is zero between parameters, where the copy has remainders of rounding, and where both are equal, also where both
    are the same infinity. A value that has become infinite or NaN makes its block infinite or NaN.
    """
    difference = (values.to(torch.float32) - copy).masked_fill_(values == copy, 0.0)
    first = group.rank * group.layout.shard_numel
    for begin, end in group.layout.gaps:
        difference[max(begin - first, 0) : max(end - first, 0)] = 0.0
    return difference
