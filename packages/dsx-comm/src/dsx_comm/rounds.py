"""An all-gather of a few bytes among many ranks, in ceil(log2 N) messages of each rank.

What counts for small messages is how many follow one another. A ring sends N - 1 of them. Here each rank sends in round
k everything it has to the rank 2^k before it, and hears as much from the rank 2^k behind it, so that what it has
doubles (J. Bruck et al., Efficient Algorithms for All-to-All Communications, 1997). A thread, a `StepLane`, does the
rounds: ranks that wait must not depend on when others look at their handles.

Host tensors on backends that are composed of sends and receives (gloo); others have their own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .calls import Call, Labels, check_labels, share_volume
from .checks import check_even_split, contiguous, nbytes
from .errors import CommArgumentError
from .groups import Membership, member
from .p2p import start_p2p
from .step_lane import StepLane

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["all_gather_in_rounds", "rounds"]

_NAME = "all_gather_in_rounds"
_TAG = 0x40000005  # beyond what users may take


def rounds(size: int) -> Iterator[tuple[int, int]]:
    """(distance, blocks) of each round among `size` ranks: a rank sends so many blocks to the rank so far before it,
    and hears as many from the rank so far behind it.
    """
    distance = 1
    while distance < size:
        yield distance, min(distance, size - distance)
        distance *= 2


def all_gather_in_rounds(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    *,
    lane: StepLane,
    **labels: Unpack[Labels],
) -> Any:
    """output (N s elements) = the ranks' `input` (s elements) one after the other.

    Args:
        lane: does the rounds of all these calls on the group. Other calls on the group may go on beside.

    Raises:
        CommArgumentError: sizes or dtypes do not fit, or the group's backend is not gloo for host tensors.
    """
    to = member(group)
    check_even_split(output, input, to, _NAME, ("output", "input"))
    contiguous(output, _NAME, "output")
    if not to.composes(input):
        raise CommArgumentError(
            f"{_NAME}: got another backend than gloo, or a {input.device.type} tensor; expected gloo"
        )
    size, message = to.size, nbytes(input)
    call = Call(_NAME, to.group, size, message, share_volume(message, size), input.device, check_labels(labels))
    step = partial(_all_rounds, output.view(size, -1), input.reshape(-1), to.rank, size, partial(_start, to))
    return lane.do([(call, step)], (input, output), async_op)


class _Started(Protocol):
    def wait(self) -> Any: ...


_Start = Callable[[torch.Tensor, int, bool], _Started]
"""Starts to send a tensor to a rank (True), or to receive one from a rank."""


def _all_rounds(output: torch.Tensor, own: torch.Tensor, rank: int, size: int, start: _Start) -> None:
    """Fill output [N, s]."""
    have = torch.empty_like(output)  # block i is that of rank + i
    have[0] = own
    # gloo sends only when the receiver has said that it is ready; all receives are from different ranks
    heard = [start(have[d : d + blocks], (rank + d) % size, False) for d, blocks in rounds(size)]
    sent = []
    for (distance, blocks), received in zip(rounds(size), heard):
        sent.append(start(have[:blocks], (rank - distance) % size, True))
        received.wait()
    for work in sent:
        work.wait()
    output.copy_(have.roll(rank, 0))


def _start(to: Membership, tensor: torch.Tensor, peer: int, sending: bool) -> _Started:
    return start_p2p(tensor, to.ranks[peer], to, _TAG, sending=sending)
