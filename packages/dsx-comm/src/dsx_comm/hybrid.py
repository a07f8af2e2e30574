"""Collectives of two phases over two groups: reductions of hybrid sharding, and gathers in two levels (MiCS,
arXiv:2205.00119).

Hybrid sharding divides a buffer among few ranks, and several such groups hold copies. A reduction sums inside the
group, then each shard over its copies:

    among the ranks that share a buffer of S bytes    (size - 1) / size of S
    among the copies of a shard                       2 (copies - 1) / copies of S / size

A gather in two levels first brings together, between nodes, what ranks of equal place have, then all of it inside the
node: fewer and larger messages between nodes, of the same bytes.

The second phase is issued when the first has arrived and a caller waits for the handle or polls it; see
`works.TwoPhase`.
"""

from __future__ import annotations

from typing import Any

import torch

from .checks import check_even_split, contiguous
from .collectives import ReduceOp, all_gather_into_tensor, all_reduce, reduce_scatter_tensor, settle
from .compressed.hierarchy import Hierarchy
from .groups import member
from .works import Handle, TwoPhase

__all__ = ["hierarchical_all_gather", "hybrid_reduce_scatter"]


def hybrid_reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    copies: Any,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """output (s elements) = part `rank` of the sum or mean of `input` (N s elements) over the ranks of all copies.

    Args:
        output: 1-D and contiguous, not a part of `input`.
        input: 1-D and contiguous.
        copies: the group of the ranks that have this part, one of each group of N.
        op: `ReduceOp.SUM` or `AVG`.
        group: the N ranks among which `input` is divided.
        async_op: return a handle at once.
    """
    first = reduce_scatter_tensor(output, input, op=op, group=group, async_op=True)
    handle = TwoPhase(first, lambda: all_reduce(output, op=op, group=copies, async_op=True))
    if async_op:
        handle.hand_out()
    return settle(handle, async_op)


def hierarchical_all_gather(
    output: torch.Tensor, input: torch.Tensor, hierarchy: Hierarchy, async_op: bool = False
) -> Any:
    """output (N s elements) = the ranks' `input` (s elements) one after the other, gathered between nodes, then inside
    them.

    Args:
        output: 1-D and contiguous.
        input: 1-D and contiguous.
        hierarchy: the nodes of the N ranks. With one level it is an ordinary all-gather.
        async_op: return a handle at once.
    """
    places = hierarchy
    check_even_split(output, input, member(places.group), "hierarchical_all_gather", ("output", "input"))
    contiguous(output, "hierarchical_all_gather", "output")
    if places.intra is None or places.inter is None:
        return all_gather_into_tensor(output, input, group=places.group, async_op=async_op)
    column = torch.empty(places.nodes * input.numel(), dtype=input.dtype, device=input.device)
    all_parts = torch.empty_like(output)
    first = all_gather_into_tensor(column, input, group=places.inter, async_op=True)
    both = TwoPhase(first, lambda: all_gather_into_tensor(all_parts, column, group=places.intra, async_op=True))

    def in_rank_order() -> None:
        parts = all_parts.view(places.devices, places.nodes, -1).transpose(0, 1)
        output.view(places.nodes, places.devices, -1).copy_(parts)

    handle = Handle([both], in_rank_order)
    if async_op:
        handle.hand_out()
    return settle(handle, async_op)
