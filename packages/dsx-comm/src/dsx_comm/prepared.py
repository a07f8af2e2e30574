"""Collectives that are made ready once and started many times: for buffers of one size that travel in every step.

`all_gather_into_tensor` looks at its arguments, describes the call and finds the backend's function each time, some
thirty Python calls. On a GPU that is host time between two kernels. `prepare_all_gather` and `prepare_reduce_scatter`
do it once. Their `start` compares sizes and dtypes, issues, and returns the same handle; observers, the communication
log, the comparison of first calls and the hang explainer see the call as they see any other.

What it leaves out: tensors of more than one dimension, and synchronous calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from . import composed
from .agreement import AGREEMENT
from .calls import HOST, OBSERVERS, WAITS, Call, run, share_volume
from .checks import described, reduce_kind
from .collectives import ALL_GATHER, REDUCE_SCATTER, start_all_gather, start_reduce_scatter
from .errors import CommArgumentError
from .groups import Membership, member
from .hang import WATCH
from .works import Handle

__all__ = ["PreparedCollective", "prepare_all_gather", "prepare_reduce_scatter"]

_Issue = Callable[[torch.Tensor, torch.Tensor], Any]


class PreparedCollective:
    """A collective of two flat tensors of fixed sizes. Made by `prepare_all_gather` and `prepare_reduce_scatter`."""

    __slots__ = ("_call", "_compared", "_dtype", "_explained", "_issue", "_label", "_on_device", "_sizes")

    def __init__(
        self, call: Call, issue: _Issue, to: Membership, sizes: tuple[int, int], label: str, dtype: Any
    ) -> None:
        self._call, self._issue, self._sizes, self._label, self._dtype = call, issue, sizes, label, dtype
        self._explained = to.size > 1 and not to.shared  # shared memory explains its hangs by itself
        self._on_device = call.device != HOST
        self._compared = not self._explained

    def start(self, output: torch.Tensor, source: torch.Tensor) -> Handle:
        """Issue the call; returns its handle.

        Args:
            output: 1-D and contiguous, of the prepared number of elements, dtype and device.
            source: the same.

        Raises:
            CommArgumentError: a tensor of another size, dtype or shape.
        """
        if (output.numel(), source.numel()) != self._sizes or not output.dtype == source.dtype == self._dtype:
            raise self._wrong(output, source)
        if OBSERVERS.active or WAITS.active or not self._compared:
            return self._start_observed(output, source)
        graph = torch.is_grad_enabled()
        if graph:  # as in `calls.run`
            torch._C._set_grad_enabled(False)
        call, note = self._call, None
        if self._explained:
            note = WATCH.enter(call.group, call.op, call.message, self._label, on_device=self._on_device)
        try:
            result = self._issue(output, source)
        except RuntimeError as error:
            explained = error if note is None else WATCH.verdict(note, error)
            raise explained from (None if explained is error else error)
        finally:
            if note is not None:
                WATCH.leave(note)
            if graph:
                torch._C._set_grad_enabled(True)
        if not isinstance(result, Handle):
            return Handle((result,), note=note)
        result.hand_out(note)
        return result

    def _start_observed(self, output: torch.Tensor, source: torch.Tensor) -> Handle:
        def issue() -> Handle:
            result = self._issue(output, source)
            return result if isinstance(result, Handle) else Handle((result,))

        with WATCH.unit(self._label or WATCH.label()):
            handle = run(self._call, issue, True)
        self._compared = not self._explained or AGREEMENT.is_over(self._call.group)
        return handle

    def _wrong(self, output: torch.Tensor, source: torch.Tensor) -> CommArgumentError:
        return CommArgumentError(
            f"{self._call.op}: got an output of {output.numel()} {output.dtype} and an input of {source.numel()} "
            f"{source.dtype}; prepared for {self._sizes[0]} and {self._sizes[1]} {self._dtype}: prepare another call"
        )


def prepare_all_gather(
    numel: int, dtype: torch.dtype, device: torch.device, group: Any = None, *, label: str = ""
) -> PreparedCollective:
    """An all-gather of `numel` elements per rank, to be started with `start(output, source)`.

    Args:
        numel: elements of `source`; `output` has as many per rank.
        dtype: of both.
        device: of both.
        group: the ranks; default: all.
        label: what the communication is for, where a hang is explained (as `dsx_comm.unit`).

    Raises:
        CommError: there is no process group.
        CommArgumentError: a negative number, or this rank is not in the group.
    """
    to = member(group)
    size = _bytes(numel, dtype)
    call = Call(
        "all_gather_into_tensor", to.group, to.size, size, share_volume(size, to.size), device, {}, 1, described(dtype)
    )
    issue: _Issue = lambda output, source: start_all_gather(output, source, to)  # noqa: E731
    host = device.type == "cpu"
    if numel and to.size > 1:
        gather = partial(getattr(dist, ALL_GATHER), group=to.group, async_op=True)
        if not (host and to.backends.get("cpu") == "gloo"):
            issue = gather
        elif not composed.direct_gather(to.size, size) and not dtype.is_complex:
            # as bytes: gloo knows only some dtypes
            issue = lambda output, source: gather(output.view(torch.uint8), source.view(torch.uint8))  # noqa: E731
    return PreparedCollective(call, issue, to, (numel * to.size, numel), label, dtype)


def prepare_reduce_scatter(
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    *,
    label: str = "",
) -> PreparedCollective:
    """A reduce-scatter to `numel` elements per rank, to be started with `start(output, source)`.

    Args:
        numel: elements of `output`; `source` has as many per rank.
        dtype: of both.
        device: of both.
        op: the reduction.
        group: the ranks; default: all.
        label: what the communication is for, where a hang is explained (as `dsx_comm.unit`).

    Raises:
        CommError: there is no process group.
        CommArgumentError: an operator that has no meaning for the dtype, a negative number, or this rank is not in the
            group.
    """
    name, to = "reduce_scatter_tensor", member(group)
    kind = reduce_kind(op, torch.empty(0, dtype=dtype, device="cpu"), name)
    size = _bytes(numel, dtype)
    call = Call(name, to.group, to.size, size, share_volume(size, to.size), device, {}, 1, described(dtype, kind))
    issue: _Issue = lambda output, source: start_reduce_scatter(output, source, kind, to)  # noqa: E731
    on_gloo = device.type == "cpu" and to.backends.get("cpu") == "gloo"
    native = kind is not dist.ReduceOp.AVG or device.type in to.averages_on
    if not numel or to.size == 1:
        pass  # nothing to send
    elif on_gloo and size <= composed.SMALL_BYTES and composed.direct(to.size, size):
        issue = partial(composed.small_reduce_scatter, op=kind, group=to.group, size=to.size)
    elif native and not on_gloo:
        issue = partial(getattr(dist, REDUCE_SCATTER), op=kind, group=to.group, async_op=True)
    return PreparedCollective(call, issue, to, (numel, numel * to.size), label, dtype)


def _bytes(numel: int, dtype: torch.dtype) -> int:
    if numel < 0:
        raise CommArgumentError(f"numel: got {numel}, expected at least 0")
    return numel * dtype.itemsize
