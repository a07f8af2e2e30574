"""The 1-bit all-reduce with error feedback on both sides: one bit per element each way.

For P ranks, values x_r, errors e_r (worker) and f (server), chunk by chunk (1-bit Adam, arXiv:2102.02888, figure 3):

    every rank     x_r += e_r;  send sign(x_r) and its scales to the servers;  e_r = x_r - scale * sign(x_r)
    server of c    m = 1/P sum_r scale_r sign_r + f;  send sign(m) and its scales to all;  f = m - scale * sign(m)
    every rank     x = scale * sign(m), bitwise identical on all

An all-to-all and an all-gather of equal messages (`layout.py`), which every backend has: nothing but bytes travels.
A world of one sends nothing and therefore compresses nothing: x stays as it is.

Left out: compressing inside the backward pass, and sums (the mean is what training needs).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..calls import Call, Labels, check_labels, run
from ..checks import contiguous, nbytes, tensor_of
from ..collectives import settle, start_all_gather
from ..errors import CommArgumentError
from ..exchange import start_all_to_all
from ..groups import Membership, member
from ..works import Done, Handle, TwoPhase
from .feedback import ErrorFeedback

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def compressed_all_reduce(
    tensor: torch.Tensor,
    feedback: ErrorFeedback,
    group: Any = None,
    async_op: bool = False,
    **labels: Unpack[Labels],
) -> Any:
    """tensor = the mean over the ranks, in place, through one bit per element each way; equal bits on all ranks.

    Args:
        tensor: float32, bfloat16 or float16, contiguous. Either all segments of `feedback` one after the other without
            padding, or a flat float32 buffer of its layout (`feedback.flat()`), which saves two copies.
        feedback: made for these lengths and this group; changed by the call.
        async_op: return a handle; `tensor` and `feedback` must be left alone until it was waited for.

    Raises:
        CommArgumentError: sizes, dtype, device or group do not fit.
    """
    name = "compressed_all_reduce"
    to = member(group)
    _check(tensor_of(tensor, name), feedback, to, name)
    layout, size = feedback.layout, nbytes(tensor)
    call = Call(name, to.group, to.size, size, layout.sent_bytes, tensor.device, check_labels(labels))
    return run(call, lambda: settle(_start(tensor, feedback, to), async_op), async_op)


def compressed_allreduce(
    buffer_m: torch.Tensor, worker_error: torch.Tensor, server_error: torch.Tensor, local_rank: int, group: Any = None
) -> torch.Tensor:
    """DeepSpeed's form of `compressed_all_reduce`: the caller keeps the two errors; one scale for the whole padded
    buffer.

    Args:
        buffer_m: N elements, contiguous, float32, bfloat16 or float16; becomes the mean.
        worker_error: float32, the padded length N' >= N, a multiple of the ranks times 8.
        server_error: float32, N' / P elements, P ranks: the error of this rank's chunk.
        local_rank: which of its node's devices this rank has. The tensors' own device is used, which says the same.
        group: the process group; None: all ranks.

    Returns:
        `buffer_m`.

    Raises:
        CommArgumentError: lengths, dtypes or devices do not fit.
    """
    feedback = ErrorFeedback.around(worker_error, server_error, group)
    name, padded = "compressed_allreduce", feedback.layout.numel
    tensor_of(buffer_m, name, "buffer_m")
    if buffer_m.numel() > padded:
        raise CommArgumentError(
            f"{name}: buffer_m has {buffer_m.numel()} elements, expected at most the {padded} of worker_error"
        )
    contiguous(buffer_m, name, "buffer_m")
    flat = torch.zeros(padded, device=worker_error.device)
    values = buffer_m.detach().view(-1)
    flat[: values.numel()] = values
    compressed_all_reduce(flat, feedback, group)
    with torch.no_grad():
        values.copy_(flat[: values.numel()])
    return buffer_m


def _check(tensor: torch.Tensor, feedback: ErrorFeedback, to: Membership, name: str) -> None:
    layout = feedback.layout
    contiguous(tensor, name, "tensor")
    if tensor.dtype not in _FLOATS:
        raise CommArgumentError(f"{name}: got {tensor.dtype}, expected one of {', '.join(map(str, _FLOATS))}")
    if layout.world_size != to.size or feedback.rank != to.rank:
        raise CommArgumentError(
            f"{name}: the feedback was made for rank {feedback.rank} of {layout.world_size}, but this is "
            f"rank {to.rank} of "
            f"{to.size} in the group; make one ErrorFeedback per group"
        )
    if tensor.device != feedback.worker.device:
        raise CommArgumentError(f"{name}: tensor is on {tensor.device}, the feedback on {feedback.worker.device}")
    logical = sum(layout.lengths)
    if tensor.numel() not in (logical, layout.numel):
        raise CommArgumentError(
            f"{name}: got {tensor.numel()} elements, expected {logical} (segments "
            f"{_short(layout.lengths)}) or the padded "
            f"{layout.numel} of feedback.flat()"
        )


def _short(lengths: tuple[int, ...]) -> str:
    return str(list(lengths)) if len(lengths) < 6 else f"[{lengths[0]}, ... {len(lengths)} in all]"


def _start(tensor: torch.Tensor, feedback: ErrorFeedback, to: Membership) -> Handle:
    if to.size == 1 or not feedback.layout.chunk:
        return Done()
    if tensor.numel() == feedback.layout.numel and tensor.dtype == torch.float32:
        return _Exchange(tensor.view(-1), feedback, to).start()
    flat = feedback.flat()
    parts = feedback.segments(flat)
    source = tensor.view(-1)
    if source.numel() == flat.numel():
        flat.copy_(source)
    else:
        for part, values in zip(parts, source.split(list(feedback.layout.lengths))):
            part.copy_(values)

    def put_back() -> None:
        source.copy_(flat if source.numel() == flat.numel() else torch.cat(parts))

    return Handle([_Exchange(flat, feedback, to).start()], put_back, pollable=True)


class _Exchange:
    """One all-reduce of a flat float32 buffer under way."""

    def __init__(self, flat: torch.Tensor, feedback: ErrorFeedback, to: Membership) -> None:
        self._flat, self._feedback, self._to = flat, feedback, to
        size = to.size * feedback.layout.message_bytes
        self._received = torch.empty(size, dtype=torch.uint8, device=flat.device)

    def start(self) -> Handle:
        """Compress and send; the rest happens while the handle is waited for."""
        feedback = self._feedback
        messages = torch.zeros_like(self._received)
        feedback.codec.compress(self._flat, feedback.worker, messages)
        first_phase = start_all_to_all(self._received, messages, self._to)
        return TwoPhase(Handle([first_phase], pollable=True), self._serve)

    def _serve(self) -> Handle:
        """Average the chunk of this rank, compress the mean and gather."""
        feedback = self._feedback
        mean = torch.zeros_like(feedback.server)
        feedback.codec.mean(self._received, mean)
        message = torch.zeros(feedback.layout.message_bytes, dtype=torch.uint8, device=mean.device)
        feedback.codec.compress_chunk(mean, feedback.server, message)
        gathered = start_all_gather(self._received, message, self._to)
        return Handle([gathered], self._reconstruct, pollable=True)

    def _reconstruct(self) -> None:
        self._feedback.codec.decompress(self._received, self._flat)
