"""Computes how many rows each rank sends to each other rank: integer arithmetic without communication.

Of P ranks, rank r holds the L experts r * L ... (r + 1) * L - 1. All ranks know the matrix `counts[s][e]`: the number
of rows that rank s routes to expert e. It determines the exact splits of every all-to-all, in any number of chunks, and
the order of the received rows. A chunk is a part of the rows that is sent and computed separately, so that the transfer
of one chunk overlaps with the experts' work on another. A chunk has the rows of whole experts if a rank holds enough of
them, else a part of every expert's rows. All tensors here are on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """One chunk, for one rank.

    Attributes:
        traffic: int64 [P, P], number of rows that are sent from rank s to rank d.
        first: the first local expert of this chunk.
        arrivals: int64 [P, experts of the chunk], number of rows received from each rank for each local expert.
    """

    traffic: torch.Tensor
    first: int
    arrivals: torch.Tensor

    @property
    def counts(self) -> list[int]:
        """Number of rows for each local expert of the chunk, from all ranks."""
        return self.arrivals.sum(0).tolist()

    def order_by_expert(self) -> torch.Tensor | None:
        """int64: indices that sort the received rows (by rank, then by expert) by expert; None: they are sorted."""
        if 1 in self.arrivals.shape:
            return None
        ranks, experts = self.arrivals.shape
        expert_of_row = torch.arange(experts, device="cpu").repeat(ranks).repeat_interleave(self.arrivals.reshape(-1))
        return expert_of_row.sort(stable=True).indices


@dataclass(frozen=True)
class ExpertPlan:
    """All chunks of one rank.

    Attributes:
        chunks: the chunks, in the order in which they are sent.
        sizes: number of rows that this rank sends in each chunk.
        order: int64 [R], indices that sort this rank's rows (by expert) by chunk; None: they are sorted.
    """

    chunks: tuple[Chunk, ...]
    sizes: tuple[int, ...]
    order: torch.Tensor | None


def plan_experts(counts: torch.Tensor, rank: int, chunks: int = 1) -> ExpertPlan:
    """Make the plan of one rank.

    Args:
        counts: int64 [P, E] on the host, number of rows that rank s routes to expert e; P divides E.
        rank: index of the rank, below P.
        chunks: number of chunks, at least 1.
    """
    ranks, experts = counts.shape
    local = experts // ranks
    by_rank = counts.view(ranks, ranks, local)  # [from, to, expert of the receiver]
    starts = (counts[rank].cumsum(0) - counts[rank]).view(ranks, local)
    made, sizes, places = [], [], []
    for c in range(chunks):
        if 1 < chunks <= local:
            low, high = local * c // chunks, local * (c + 1) // chunks
            rows, begin = by_rank[:, :, low:high], starts[:, low:high]
        else:
            low = 0
            rows = by_rank * (c + 1) // chunks - by_rank * c // chunks
            begin = starts + by_rank[rank] * c // chunks
        made.append(Chunk(rows.sum(2), low, rows[:, rank]))
        sizes.append(int(rows[rank].sum()))
        if chunks > 1:
            places.append(_ranges(begin.reshape(-1), rows[rank].reshape(-1)))
    return ExpertPlan(tuple(made), tuple(sizes), torch.cat(places) if places else None)


def _ranges(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The numbers starts[i] ... starts[i] + lengths[i] - 1 for each i, concatenated."""
    offsets = (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    return offsets + torch.arange(offsets.numel(), device="cpu")
