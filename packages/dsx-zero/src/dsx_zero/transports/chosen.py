"""The transports of one model, chosen once, from the configuration or by the caller of `shard`.

A user's own transports are a class with `gather` and `reduce`, which is given to `shard(transports=...)`; no other
code changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import dsx_comm
import torch
from dsx_comm import RankSet
from dsx_comm.compressed.blocks import BlockFormat

from ..groups import AuxiliaryGroups
from .differences import DifferenceGather
from .errors import KeepsErrors
from .levels import HierarchicalGather, SecondaryGather
from .nodes import hierarchy_of
from .plain import AllReduce, Cast, HybridReduceScatter, InPieces, PlainGather, ReduceScatter
from .protocol import ReduceTransport, Transport
from .quantized import BLOCK, QuantizedGather, QuantizedReduceScatter

if TYPE_CHECKING:
    from ..config import ZeroConfig

__all__ = ["PlainTransports", "Transports", "ZeroPlusPlus", "transports_of"]


class Transports(Protocol):
    """Makes the transports of one model. Every rank has the same ones, and makes them in the same order."""

    def gather(self, sets: Collection[RankSet]) -> Transport:
        """The transport for the parameters of stage 3, which these sets of ranks share."""
        ...

    def reduce(self, op: Any, ranks: RankSet, *, scatters: bool) -> ReduceTransport:
        """The transport for the gradients of one rank set.

        Args:
            op: `dsx_comm.ReduceOp.SUM` or `AVG`.
            ranks: the ranks that share the gradients.
            scatters: True: each rank keeps a shard of the result (stages 1-3); False: each rank keeps all of it, in
                place of the source.
        """
        ...


@dataclass(frozen=True)
class PlainTransports:
    """Transports that send exact values.

    Attributes:
        wire: maps the dtype of a parameter to the dtype in which its gradient is sent.
        most: most elements in one message of a reduction.
    """

    wire: Callable[[torch.dtype], torch.dtype]
    most: int

    def gather(self, sets: Collection[RankSet]) -> Transport:
        """See `Transports.gather`."""
        plain: Transport = PlainGather()
        return plain if all(ranks.near is None for ranks in sets) else SecondaryGather(plain)

    def reduce(self, op: Any, ranks: RankSet, *, scatters: bool) -> ReduceTransport:
        """See `Transports.reduce`."""
        if not scatters:
            inner: ReduceTransport = AllReduce(op)
        else:
            inner = ReduceScatter(op) if ranks.copies is None else HybridReduceScatter(op)
        return InPieces(Cast(inner, self.wire), self.most)


@dataclass(frozen=True)
class ZeroPlusPlus:
    """Transports that send fewer bytes, and fewer of them between nodes.

    Attributes:
        plain: makes transports for values that are not quantised.
        groups: makes the groups inside and across nodes.
        weight_bits: bits of gathered parameters; 0: they are not quantised.
        only_frozen: quantise only parameters that are not trained.
        differences: for trained parameters with secondary shards, send the differences to these (`differences`).
        gradient_bits: bits of reduced gradients; 0: they are not quantised.
        gradient_block: elements of gradients that share a scale.
        gradient_feedback: (decay, period) of `dsx_comm.QuantizationFeedback` for gradients; None: no error feedback.
        two_levels: gathers run between nodes first (`mics_hierarchical_params_gather`).
        keepers: the transports made so far that keep errors.
    """

    plain: PlainTransports
    groups: AuxiliaryGroups
    weight_bits: int = 0
    only_frozen: bool = False
    differences: bool = False
    gradient_bits: int = 0
    gradient_block: int = BLOCK
    gradient_feedback: tuple[float, int] | None = None
    two_levels: bool = False
    keepers: list[KeepsErrors] = field(default_factory=list, compare=False, repr=False)

    def gather(self, sets: Collection[RankSet]) -> Transport:
        """See `Transports.gather`."""
        primary: Transport = PlainGather()
        if self.two_levels:
            found = {ranks: hierarchy_of(ranks, self.groups, "gathers") for ranks in sets if ranks.size > 1}
            several = {ranks: nodes for ranks, nodes in found.items() if nodes.nodes > 1 and nodes.devices > 1}
            primary = HierarchicalGather(primary, several)
        form = BlockFormat(self.weight_bits, BLOCK) if self.weight_bits else None
        if form is not None and self.differences:
            # Rank sets without near ranks (experts) have no second copy to which differences could be added.
            alone = QuantizedGather(primary, BlockFormat(8, BLOCK))
            keeper = DifferenceGather(primary, alone, form)
            self.keepers.append(keeper)
            return keeper
        if form is not None:
            primary = QuantizedGather(primary, form, only_frozen=self.only_frozen)
        return primary if all(ranks.near is None for ranks in sets) else SecondaryGather(primary)

    def reduce(self, op: Any, ranks: RankSet, *, scatters: bool) -> ReduceTransport:
        """See `Transports.reduce`."""
        exact = self.plain.reduce(op, ranks, scatters=scatters)
        if not self.gradient_bits or not scatters or ranks.copies is not None:
            return exact
        feedback = None
        if self.gradient_feedback is not None:
            feedback = partial(dsx_comm.QuantizationFeedback, *self.gradient_feedback)
        nodes = hierarchy_of(ranks, self.groups, "gradients")
        form = BlockFormat(self.gradient_bits, self.gradient_block)
        quantized = QuantizedReduceScatter(exact, op, ranks, nodes, form, feedback=feedback)
        if feedback is not None:
            self.keepers.append(quantized)
        return quantized


def transports_of(settings: ZeroConfig, plain: PlainTransports, groups: AuxiliaryGroups) -> Transports:
    """The transports that the `zero_optimization` section asks for."""
    weights = settings.zero_quantized_weights or settings.zero_quantized_nontrainable_weights
    if not (weights or settings.zero_quantized_gradients or settings.mics_hierarchical_params_gather):
        return plain
    loco, feedback = settings.zeropp_loco_param, settings.zero_quantized_error_feedback
    decay = (0.0, 0) if feedback else None
    return ZeroPlusPlus(
        plain,
        groups,
        weight_bits=settings.zero_quantized_weights_bits if weights else 0,
        only_frozen=not settings.zero_quantized_weights,
        differences=settings.sends_differences,
        gradient_bits=settings.zero_quantized_gradients_bits if settings.zero_quantized_gradients else 0,
        gradient_block=settings.zero_quantized_gradients_block_size,
        gradient_feedback=decay if loco is None else (loco.err_beta, loco.reset_T),
        two_levels=settings.mics_hierarchical_params_gather,
    )
