"""The gradient of one flat group: from the arrival of single gradients to the reduced values that the optimizer reads.

States of a group within one optimizer step::

    empty ──arrival──► filling ──launch──► in flight ──finish──► reduced
    reduced ──arrival──► filling    (late, or the next micro-batch)

Memory: stages 0-1 keep the whole buffer, which contains the reduced values, unless at stage 1 they leave the device.
Stages 2-3 keep the shard, in its home, and a whole buffer only from the first arrival until the reduction is finished
(`BufferPool` decides how much of its memory is kept). If the home is on the device, the reduction writes into it; else
a lane copies the reduced values to it. A parameter without an arrival counts as zeros.

`.grad` of a parameter with a gradient refers to its *face*: at stage 0 a view of the averaged buffer, else a
`ShardedGradient`. If `.grad` is another object, the user has set another gradient, or removed it (`notice`).
"""

from __future__ import annotations

from contextlib import suppress

import torch
from dsx_comm.lanes import HostLane, Lane, Ticket

from ..errors import ZeroStateError
from ..homes.home import DeviceHome, Home, block_norm, read, write
from ..homes.ring import Ring
from ..homes.tiers import DeviceTier, Tier
from ..params.flat import FlatGroup, cut_at_parts, label_of
from ..params.memory import BufferPool, OrdinaryMemory
from .access import GradientAccess, GradientPlace, opened_piece
from .leaving import Leaving
from .reduction import PendingReduction
from .rows import refuse_sparse
from .sharded import ShardedGradient

__all__ = ["GroupGradients"]


class GroupGradients:
    """Gradients of one `FlatGroup`.

    Args:
        group: the flat group.
        dtype: dtype of the accumulation.
        stage: at stage 0 every rank has all reduced values, at stages 1-3 its shard; from stage 2 on the whole buffer
            is freed after the reduction.
        pool: gives and takes back whole buffers.
        grads_are_views: `.grad` of the parameters are views of the reduced buffer (only at stage 0); otherwise they are
            `ShardedGradient`s.
        access: serves users who read or write these.
        label: name of the reductions in the explanation of a hang.
        tier, lane, ring: from stage 1 on, where the reduced values live, and what moves them there (`Leaving`). At
            stage 1 on a CPU they stay in the buffer.
    """

    def __init__(
        self,
        group: FlatGroup,
        *,
        dtype: torch.dtype,
        stage: int,
        pool: BufferPool,
        grads_are_views: bool,
        access: GradientAccess,
        label: str = "",
        tier: Tier | None = None,
        lane: Lane | None = None,
        ring: Ring | None = None,
    ) -> None:
        self.group = group
        self.dtype, self.stage, self.label = dtype, stage, label
        self._pool, self._access = pool, access
        self.shows_reduced = grads_are_views and stage == 0 and dtype == group.key.dtype
        """Whether `.grad` shows the reduced values."""
        self.buffer: torch.Tensor | None = None
        self._views: tuple[torch.Tensor, ...] = ()
        self._filled = bytearray(len(group.parameters))
        self._faces: list[torch.Tensor | None] = [None] * len(group.parameters)
        self._stand_ins: list[ShardedGradient | None] = [None] * len(group.parameters)
        stays = stage == 0 or (stage == 1 and group.key.device.type == "cpu")
        self._tier = DeviceTier() if tier is None or stays else tier
        self.leaves = not isinstance(self._tier, DeviceTier)
        """Whether reduced values leave the device."""
        self._shard: Home | None = None
        self.result: Home | None = None
        self.pending: PendingReduction | None = None
        """The reduction in flight, if any."""
        self._earlier: torch.Tensor | None = None
        """Stage 0: reduced values to which those of the reduction in flight are added."""
        self._staged: tuple[Home, torch.Tensor, bool] | None = None
        self._leaving = Leaving(group.key.device, lane or HostLane(), ring)
        self.dirty = False
        for parameter in group.parameters:
            if isinstance(parameter.grad, ShardedGradient):
                parameter.grad = None  # it belongs to an earlier optimizer
        access.add(self)

    # What users see ---------------------------------------------------------------------------------------------------

    def _face(self, index: int) -> torch.Tensor:
        """The value of `.grad` of a parameter when its gradient is averaged."""
        return self._views[index] if self.shows_reduced else self._stand_in(index)

    def _stand_in(self, index: int) -> ShardedGradient:
        made = self._stand_ins[index]
        if made is None:
            made = ShardedGradient(GradientPlace(self._access, self, index), self.group.parameters[index])
            self._stand_ins[index] = made
        return made

    def _attach(self, index: int, face: torch.Tensor) -> None:
        parameter = self.group.parameters[index]
        if parameter.grad is not face:
            try:
                parameter.grad = face
            except RuntimeError as error:
                raise ZeroStateError(
                    f"parameter '{self.group.layout.names[index]}' has another dtype, device or shape than when the"
                    f" model was sharded ({parameter.dtype}, {parameter.device}, {tuple(parameter.shape)}); convert the"
                    " model before dsx_zero.shard"
                ) from error
        self._faces[index] = face

    def _detach(self, index: int) -> None:
        self.group.parameters[index].grad = None
        self._faces[index] = None

    def notice(self, arriving: int | None = None) -> None:
        """Find out what the user has done to `.grad` since the last call.

        Gradients that the user cleared become zeros. Other tensors in their place are used as this rank's own
        gradients, which are averaged like those of a backward.

        Args:
            arriving: index of a parameter that is left to `accumulate`.
        """
        # In the usual case, in which nothing was done, there is no call per parameter (test_python_calls.py).
        grads, other = [], []
        for index, (parameter, face) in enumerate(zip(self.group.parameters, self._faces)):
            grad = parameter.grad
            grads.append(grad)
            if grad is not face and index != arriving:
                other.append(index)
        if not other:
            return
        given = [(i, grad) for i in other if (grad := grads[i]) is not None]
        if not given and len(other) == sum(face is not None for face in self._faces):
            self.clear()  # `model.zero_grad()`: memory is freed, too
            return
        for index in other:
            if self._faces[index] is not None:
                self.zero(index)
        for index, grad in given:
            self.group.parameters[index].grad = grad  # `zero` has removed it
            self.accumulate(index)

    def zero(self, index: int) -> None:
        """Set the gradient of one parameter to zeros, and its `.grad` to None."""
        self.finish()
        if self.result is not None:
            with opened_piece(self, index) as piece:
                piece.zero_()
        self._filled[index] = 0
        self._detach(index)

    def hide_views(self) -> None:
        """Detach the views from `.grad`, so that autograd does not add the next gradients to them."""
        for index, face in enumerate(self._faces):
            if face is not None and not isinstance(face, ShardedGradient):
                self._detach(index)

    def show_views(self) -> None:
        """Undo `hide_views`: earlier gradients are visible again if no new one has arrived."""
        if self.shows_reduced and self._views:
            for index, (face, filled) in enumerate(zip(self._faces, self._filled)):
                if face is None and filled:
                    self._attach(index, self._views[index])

    def hide_unreduced(self) -> None:
        """Backward has ended and its reductions are complete. Gradients for a later reduction must not look like an
        average.
        """
        if self.shows_reduced and self.dirty:
            for index, filled in enumerate(self._filled):
                if filled:
                    self._attach(index, self._stand_in(index))

    # Arrivals ---------------------------------------------------------------------------------------------------------

    def accumulate(self, index: int, factor: float = 1.0) -> None:
        """Add the gradient that autograd has just stored in parameter `index`, times `factor`, to the buffer."""
        # All in one function, because it runs for every parameter of every backward (test_python_calls.py).
        parameter, face = self.group.parameters[index], self._faces[index]
        grad = parameter.grad
        if isinstance(grad, ShardedGradient):
            grad = grad.take_arrived()
        elif face is not None and grad is not face:
            self.zero(index)  # the user has cleared it inside this backward
        if grad is None:
            return
        if self.pending is not None:
            self.finish()
        if not self.dirty or self.buffer is None:
            self._open()
        view = self._views[index]
        if grad is not view:
            if grad.is_sparse:
                refuse_sparse(grad, self.group.layout.names[index])
            if grad.requires_grad:  # with `create_graph=True` it has a graph, which is dropped here
                grad = grad.detach()
            if self._filled[index]:
                view.add_(grad, alpha=factor)
            else:
                view.copy_(grad)
                if factor != 1.0:
                    view.mul_(factor)
        elif factor != 1.0:
            raise ZeroStateError(
                f"{self.group.layout.names[index]}: the gradient of an unscaled loss was added to what was there"
                " before; use engine.backward(loss), or a loss that comes from the model's own outputs"
            )
        face = view if self.shows_reduced else self._stand_ins[index]
        try:
            parameter.grad = self._faces[index] = self._stand_in(index) if face is None else face
        except RuntimeError:  # the user has converted the model: `_attach` raises an error that says so
            self._attach(index, self._face(index))
        self._filled[index] = 1
        self.dirty = True

    def refuse(self, index: int) -> None:
        """Drop the gradient that autograd has just stored in parameter `index`."""
        grad = self.group.parameters[index].grad
        if isinstance(grad, ShardedGradient):
            grad.take_arrived()
        else:
            self._detach(index)

    def _open(self) -> torch.Tensor:
        """Return the buffer for new gradients. Reduced values in it that must not change are moved away."""
        kept = self.result is None or self.buffer is None or self.shows_reduced or self.dirty
        if not kept and self.result is not None:
            self._filled = bytearray(len(self._filled))
            if self.stage == 0:
                self.buffer, self._views = None, ()
            elif not self.leaves:
                self.result = DeviceHome(read(self.result).clone())
        return self._whole() if self.buffer is None else self.buffer

    def _whole(self) -> torch.Tensor:
        """The whole buffer, taken from the pool if there is none. Its contents are arbitrary, its padding is zero."""
        if self.buffer is None:
            layout, key = self.group.layout, self.group.key
            self.buffer = self._pool.take(layout.numel, self.dtype, key.device)
            for start, stop in layout.gaps:
                self.buffer[start:stop].zero_()
            self._views = self.group.views(self.buffer)
        return self.buffer

    # Reductions -------------------------------------------------------------------------------------------------------

    def launch(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Prepare to reduce the gradients that have arrived; missing ones count as zeros.

        A rank without gradients takes part, too. The caller sets `pending` to the reduction.

        Returns:
            The buffer to reduce; the tensor into which this rank's shard is reduced (at stage 0 the same buffer, all of
            which is reduced); and whether it is added to what is there.
        """
        if self.pending is not None:
            self.finish()
        self.notice()  # a hook may have cleared `.grad` when it arrived
        buffer = self._open() if self.buffer is None or self.result is not None else self.buffer
        for index, view in enumerate(self._views):
            if not self._filled[index]:
                view.zero_()
            if self.shows_reduced:  # a late gradient must not be added to a buffer in flight
                self._detach(index)
        self.dirty = False
        self._leaving.norm = None  # as `forget_norm`, without a Python call per group (test_python_calls.py)
        self._access.changed()
        if self.stage == 0:
            self._earlier = None if self.result is None or self._in_buffer() else read(self.result)
            self.result = DeviceHome(buffer)
            return buffer, buffer, False
        add = self.result is not None and not self.shows_reduced
        self.result = home = self.result or self._shard or self._target(buffer)
        # A view in host memory is not asked for while a device computes: the host would wait for what arrives there.
        out = home.view() if home.tier == "device" or buffer.device.type == "cpu" else None
        if out is not None and out.device == buffer.device:
            return buffer, out, add
        staging = self._leaving.prepare(home, self.dtype)
        self._staged = (home, staging, add)
        return buffer, staging, False

    def _target(self, buffer: torch.Tensor) -> Home:
        """The home of reduced values if there are none yet; at stages 0-1 in the whole buffer, unless they leave."""
        if self.stage == 0:
            return DeviceHome(buffer)
        if self.stage == 1 and not self.leaves:
            return DeviceHome(self.group.shard_of(buffer))
        if self._shard is None:
            layout, memory = self.group.layout, OrdinaryMemory()
            self._shard = self._tier.home(
                f"gradient.{label_of(self.group.plan)}", layout.shard_numel, self.dtype, buffer.device, memory
            )
            cut_at_parts(self._shard, self.group.parts)
        return self._shard

    def forget_norm(self) -> None:
        """Note that the reduced values have changed, so that their norm is not known."""
        self._leaving.norm = None

    def norm(self) -> torch.Tensor:
        """L2 norm of the reduced values, see `block_norm`."""
        home = self.values()
        return block_norm(read(home)) if self._leaving.norm is None else self._leaving.norm

    def has_any(self) -> bool:
        """Whether there is a gradient, reduced or not."""
        return self.dirty or self.result is not None

    def reduced(self) -> tuple[Home, Ticket | None]:
        """The home of the reduced values, and the ticket to wait for before another thread reads them there."""
        result = self.values() if self.result is None else self.result
        return result, self._leaving.ticket

    def let_go(self) -> None:
        """Free the staging memory of values that are on their way to their home."""
        self._leaving.let_go(self.result)

    def _in_buffer(self) -> bool:
        """Whether the reduced values are all of the buffer (stage 0)."""
        if self.stage > 0 or self.result is None or self.buffer is None:
            return False
        return read(self.result).data_ptr() == self.buffer.data_ptr()

    def finish(self) -> bool:
        """Wait for the reduction in flight, if any.

        Returns:
            Whether reduced values are being moved to their home (`let_go`).
        """
        if self.pending is None:
            return self._leaving.ticket is not None
        pending, self.pending = self.pending, None
        if pending.ticket is not None:  # as `pending.finish()`, without a Python call per group
            pending.ticket.wait()
        if pending.complete is not None:
            pending.complete()
        if self._earlier is not None:
            read(self.values()).add_(self._earlier)
            self._pool.give(self._earlier)
            self._earlier = None
        if self._staged is not None:
            (home, staging, add), self._staged = self._staged, None
            self._leaving.start(home, staging, add=add)
        if self.shows_reduced:
            self._filled = bytearray(b"\x01") * len(self._filled)
        elif self.stage >= 2:
            if self.buffer is not None:
                self._pool.give(self.buffer)
            self.buffer, self._views = None, ()
            self._filled = bytearray(len(self._filled))
        for index, (parameter, face) in enumerate(zip(self.group.parameters, self._faces)):
            if face is None and parameter.grad is None:
                self._attach(index, self._face(index))
        return self._leaving.ticket is not None

    def values(self) -> Home:
        """The reduced values; zeros if no rank had gradients."""
        if self._leaving.ticket is not None:
            self._leaving.wait(self.result)
        if self.result is None:
            self.result = self._target(self._whole())
            write(self.result, torch.zeros(self.result.numel, dtype=self.dtype, device="cpu"))
        return self.result

    def unreduced(self, index: int) -> torch.Tensor | None:
        """This rank's own sum of the gradients of parameter `index` that no reduction has taken, in the parameter's
        shape; None if there are none.
        """
        if not self.dirty or not self._filled[index] or self._in_buffer():
            return None  # gradients that `.grad` shows accumulate on top of the reduced ones
        return self._views[index]

    def clear(self) -> None:
        """Forget all gradients. Memory that the next step needs again is kept."""
        self.finish()
        for index in range(len(self._faces)):
            self._detach(index)
        if self._leaving.ticket is not None:
            with suppress(OSError):  # from a transfer whose values are not needed any more
                self._leaving.wait(self.result)
        if self.stage == 0 and self.result is not None and not self._in_buffer():
            self._pool.give(read(self.result))  # it was moved away for late gradients
        self.result, self.dirty = None, False
        self.forget_norm()
        self._filled = bytearray(len(self._filled))
        if self.stage >= 2 and self.buffer is not None:
            self._pool.give(self.buffer)
            self.buffer, self._views = None, ()
        self._access.changed()

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are kept besides the homes."""
        return [] if self.buffer is None else [self.buffer]

    def homes(self) -> list[Home]:
        """The homes of reduced values, without duplicates."""
        return list({id(home): home for home in (self._shard, self.result) if home is not None}.values())
