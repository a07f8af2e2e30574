"""The gradient of one flat group: from the parameters' arrivals to the reduced values the optimizer reads.

States of a group within one optimizer step::

    empty ──arrival──► filling ──launch──► in flight ──finish──► reduced ──arrival──► filling (late, or the next micro-batch)

Held memory: stages 0-1 keep the whole buffer (the reduced values lie in it); stages 2-3 hold the shard, and a whole buffer only
from the first arrival until the reduction is finished (`BufferPool` says what of its memory stays). A parameter without an arrival counts as zeros.
"""

from __future__ import annotations

import torch

from .errors import ZeroModelError
from .flat import FlatGroup
from .memory import BufferPool
from .reduction import Pending, ReductionEngine

__all__ = ["GroupGradients", "refuse_sparse"]


def refuse_sparse(grad: torch.Tensor, name: str) -> None:
    """Raises ZeroModelError for a gradient of indices and values: there is no place for it in a flat buffer."""
    if grad.is_sparse:
        raise ZeroModelError(f"{name}: sparse gradients are not available yet; build the module with sparse=False")


class GroupGradients:
    """Gradients of one `FlatGroup`.

    Args:
        group: the parameters.
        dtype, wire: dtypes of accumulation and of messages.
        stage: 0 reduces everything on every rank, 1-3 each rank's shard; from 2 on the whole buffer is given back.
        expose: parameters' `.grad` are views of the reduced buffer (stage 0); otherwise they are None.
    """

    def __init__(
        self,
        group: FlatGroup,
        *,
        dtype: torch.dtype,
        wire: torch.dtype,
        stage: int,
        reducer: ReductionEngine,
        pool: BufferPool,
        expose: bool,
    ) -> None:
        self.group = group
        self.dtype, self.wire, self.stage = dtype, wire, stage
        self._reducer, self._pool = reducer, pool
        self._expose = expose and stage == 0 and dtype == group.key.dtype
        self.buffer: torch.Tensor | None = None
        self._views: tuple[torch.Tensor, ...] = ()
        self._filled = bytearray(len(group.parameters))
        self._shard: torch.Tensor | None = None
        self.result: torch.Tensor | None = None
        self._pending: Pending | None = None
        self.dirty = False

    def absorb(self, index: int) -> None:
        """Take over the gradient that autograd has just put into parameter `index`."""
        parameter = self.group.parameters[index]
        grad = parameter.grad
        if grad is None:
            return
        late = self._pending is not None
        if late:
            self.finish()
        if grad is not (view := self._open(index)):
            refuse_sparse(grad, self.group.layout.names[index])
            # While `.grad` is exposed it is where autograd adds; another tensor there means that the user has cleared it.
            if self._filled[index] and (late or not self._expose):
                view.add_(grad)
            else:
                view.copy_(grad)
            parameter.grad = view if self._expose else None
        self._filled[index] = 1
        self.dirty = True

    def _open(self, index: int) -> torch.Tensor:
        """The place for a gradient; sets reduced values aside that later arrivals must not touch."""
        self._set_aside_if_reduced()
        self._whole()
        return self._views[index]

    def _set_aside_if_reduced(self) -> None:
        if self.result is None or self.buffer is None or self._expose or self.dirty:
            return
        self._filled = bytearray(len(self._filled))
        if self.stage == 0:
            self.buffer, self._views = None, ()
        else:
            self.result = self.result.clone()

    def _whole(self) -> torch.Tensor:
        """The whole buffer, made now if need be. Contents are arbitrary, the padding is zero."""
        if self.buffer is None:
            layout, key = self.group.layout, self.group.key
            self.buffer = self._pool.take(layout.numel, self.dtype, key.device)
            for start, stop in layout.gaps:
                self.buffer[start:stop].zero_()
            self._views = self.group.views(self.buffer)
        return self.buffer

    def launch(self, reducer: ReductionEngine | None = None) -> None:
        """Start reducing what has arrived (zeros for what has not). With nothing to add, the ranks still meet.

        `reducer` takes the place of the usual one this time.
        """
        reducer = reducer or self._reducer
        if self._pending is not None:
            self.finish()
        self._set_aside_if_reduced()
        buffer = self._whole()
        for index, (parameter, view) in enumerate(zip(self.group.parameters, self._views)):
            if not self._filled[index] or (self._expose and parameter.grad is not view):
                view.zero_()
            if self._expose:
                parameter.grad = None
        self.dirty = False
        add = self.result is not None and not self._expose
        if self.stage == 0:
            self._pending = self._launch_whole(buffer, reducer)
        else:
            out = self._target(buffer) if self.result is None else self.result
            self._pending = reducer.reduce_scatter(buffer, out, self.wire, add=add)
            self.result = out

    def _target(self, buffer: torch.Tensor) -> torch.Tensor:
        """Where the reduced values go when there are none yet (at stages 0-1 into the whole buffer)."""
        if self.stage == 0:
            return buffer
        if self.stage == 1:
            return self.group.shard_of(buffer)
        if self._shard is None:
            self._shard = torch.empty(self.group.layout.shard_numel, dtype=self.dtype, device=buffer.device)
        return self._shard

    def _launch_whole(self, buffer: torch.Tensor, reducer: ReductionEngine) -> Pending:
        pending = reducer.all_reduce(buffer, self.wire)
        earlier = None if self.result is buffer else self.result
        if earlier is not None:
            scale = pending.complete

            def complete() -> None:
                scale()
                buffer.add_(earlier)
                self._pool.give(earlier)

            pending = Pending(pending.work, complete)
        self.result = buffer
        return pending

    def is_done(self) -> bool:
        """No reduction is under way, or it has ended."""
        return self._pending is None or self._pending.is_done()

    def finish(self) -> None:
        """Wait for the reduction that is under way, if any."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.finish()
        if self.stage >= 2:
            if self.buffer is not None:
                self._pool.give(self.buffer)
            self.buffer, self._views = None, ()
            self._filled = bytearray(len(self._filled))
        elif self._expose:
            self._filled = bytearray(b"\x01") * len(self._filled)
            for parameter, view in zip(self.group.parameters, self._views):
                parameter.grad = view

    def values(self) -> torch.Tensor:
        """The reduced values; zeros where no rank had any."""
        if self.result is None:
            out = self._target(self._whole())
            out.zero_()
            self.result = out
        return self.result

    def clear(self) -> None:
        """Forget all gradients; memory that the next step needs again is kept."""
        self.finish()
        for parameter in self.group.parameters:
            parameter.grad = None
        if self.stage == 0 and self.result is not None and self.result is not self.buffer:
            self._pool.give(self.result)  # set aside for late gradients
        self.result, self.dirty = None, False
        self._filled = bytearray(len(self._filled))
        if self.stage >= 2 and self.buffer is not None:
            self._pool.give(self.buffer)
            self.buffer, self._views = None, ()

    def tensors(self) -> list[torch.Tensor]:
        """Everything held."""
        held = (self.buffer, self._shard, self.result)
        return [tensor for tensor in held if tensor is not None]
