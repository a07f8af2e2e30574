"""An all-gather of a few bytes among many ranks, in ceil(log2 N) messages of each rank.

What counts for small messages is how many follow one another. A ring sends N - 1 of them. Here each rank sends in round
k everything it has to the rank 2^k before it, and hears as much from the rank 2^k behind it (`doubling`). A thread, a
`StepLane`, does the rounds: ranks that wait must not depend on when others look at their handles.

Host tensors on backends that are composed of sends and receives (gloo); others have their own way.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .calls import Call, Labels, check_labels, share_volume
from .checks import check_even_split, contiguous, nbytes
from .doubling import Started, fill_in_rounds
from .errors import CommArgumentError
from .groups import Membership, member
from .p2p import start_p2p
from .step_lane import StepLane

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["all_gather_in_rounds", "can_gather_in_rounds"]

_NAME = "all_gather_in_rounds"
_TAG = 0x40000005  # beyond what users may take


def can_gather_in_rounds(group: Any = None) -> bool:
    """Whether `all_gather_in_rounds` works on host tensors of this group: gloo carries them, under whatever name the
    group was made ("dsx" between machines).
    """
    return member(group).composes_on_host


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
    step = partial(_all_rounds, to, output.view(size, -1), input.reshape(-1))
    return lane.do([(call, step)], (input, output), async_op)


def _all_rounds(to: Membership, output: torch.Tensor, own: torch.Tensor) -> None:
    fill_in_rounds(output, own, to.rank, to.size, partial(_start, to), connected=to.has_met)
    to.has_met = True


def _start(to: Membership, tensor: torch.Tensor, peer: int, sending: bool) -> Started:
    return start_p2p(tensor, to.ranks[peer], to, _TAG, sending=sending)
