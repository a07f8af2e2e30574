"""The gradient of one sparse embedding: rows with their indices, from their arrival to what the optimizer reads.

A batch uses a few rows of a large embedding. With `sparse=True` autograd computes only the gradients of these rows, and
only these are sent between the ranks (`sparse_gradients`, stage 0). The states are those of `GroupGradients`, which has
dense gradients. The values are sparse COO tensors, so there is no flat buffer.

`.grad` of the parameter is the averaged gradient when it is reduced. Between backwards that are not reduced (`no_sync`)
it is this rank's own sum, as in plain PyTorch. Values that users write into `.grad`, or set in its place, are used.
"""

from __future__ import annotations

import torch

from ..errors import ZeroModelError
from ..homes.home import Home
from ..params.flat import FlatGroup
from ..plan.layout import LocalSlice
from .reduction import PendingReduction

__all__ = ["RowGradients", "refuse_sparse"]


def refuse_sparse(grad: torch.Tensor, name: str) -> None:
    """Raise `ZeroModelError` if `grad` is sparse (indices and values): a flat buffer cannot hold it."""
    if grad.is_sparse:
        raise ZeroModelError(
            f"{name}: got a sparse gradient, expected a dense one; build the module with sparse=False, or at stage 0"
            " set sparse_gradients to true (which weights that are tied to others take no part in)"
        )


class RowGradients:
    """The gradient of the one parameter of a flat group.

    Args:
        group: the flat group with the parameter.
        dtype: dtype of the accumulation.
        label: name of the reductions in the explanation of a hang.

    Attributes:
        dirty: whether there are rows that no reduction has taken.
    """

    shows_reduced = True
    """`.grad` shows the reduced rows."""

    def __init__(self, group: FlatGroup, *, dtype: torch.dtype, label: str = "") -> None:
        self.group, self.dtype, self.label = group, dtype, label
        self._parameter = group.parameters[0]
        self._own: torch.Tensor | None = None
        self._reduced: torch.Tensor | None = None
        self.pending: PendingReduction | None = None
        """The reduction in flight, if any."""
        self._arriving: torch.Tensor | None = None
        """The rows to which it leads."""
        self._face: torch.Tensor | None = None
        self._attached_values: torch.Tensor | None = None
        """The values of `_face` when it was attached. Autograd adds the next gradient to `.grad` in place."""
        self.dirty = False
        self._parameter.grad = None

    # What users see ---------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        values = self._own if self.dirty else self._reduced
        if values is None:
            return
        same = values.dtype == self._parameter.dtype
        self._face = values if same else values.to(self._parameter.dtype)
        self._attached_values = _alias(self._face) if same else self._face.clone()
        self._parameter.grad = self._face

    def _detach(self) -> None:
        self._parameter.grad = self._face = self._attached_values = None

    def _undo_addition(self) -> None:
        """Autograd has added to the face in place: restore the values that it had before."""
        if self._face is self._reduced:
            self._reduced = self._attached_values
        elif self._face is self._own:
            self._own = self._attached_values

    def _take_edits(self) -> None:
        """Take over what a user wrote into the face, if it is a copy (its dtype is not that of the values)."""
        face, attached = self._face, self._attached_values
        if face is None or attached is None or face is self._reduced or face is self._own:
            return
        now = face.coalesce()
        if torch.equal(now.indices(), attached.indices()) and torch.equal(now.values(), attached.values()):
            return
        if self.dirty:
            self._own = _rows(now, self.dtype)
        else:
            self._reduced = _rows(now, self.dtype)

    def notice(self, arriving: int | None = None) -> None:
        """See `GroupGradients.notice`."""
        grad = self._parameter.grad
        if arriving is not None:
            return
        if grad is self._face:
            self._take_edits()
            return
        self.clear()
        if grad is not None:
            self._parameter.grad = grad
            self.accumulate(0)

    def hide_views(self) -> None:
        """Detach the shown values, so that autograd does not add the next gradients to them."""
        if self._face is not None and self._parameter.grad is self._face:
            self._detach()

    def show_views(self) -> None:
        """Undo `hide_views`."""
        if self._parameter.grad is None and self.pending is None:
            self._attach()

    def hide_unreduced(self) -> None:
        """Nothing to do: a rank's own sum stays visible in `.grad`, see the module's text."""

    # Arrivals ---------------------------------------------------------------------------------------------------------

    def accumulate(self, index: int, factor: float = 1.0) -> None:
        """Add the gradient that autograd has just stored in the parameter, times `factor`.

        A dense gradient (the weight is also used by a function) is used with its rows that are not zero.
        """
        grad = self._parameter.grad
        if grad is None:
            return
        arrived = grad.detach()
        if grad is self._face and self._attached_values is not None:
            arrived = arrived - self._attached_values
            self._undo_addition()
        elif self._face is not None:
            self.clear()  # the user has cleared it, or set another one
        self.finish()
        self._detach()
        rows = _rows(arrived, self.dtype)
        if factor != 1.0:
            rows.values().mul_(factor)
        self._own = rows if self._own is None else (self._own + rows).coalesce()
        self.dirty = True

    def refuse(self, index: int) -> None:
        """Drop the gradient that autograd has just stored in the parameter."""
        if self._parameter.grad is self._face:
            self._undo_addition()
        self._detach()

    # Reductions -------------------------------------------------------------------------------------------------------

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare to reduce the rows that have arrived; a rank may have none.

        Returns:
            The rows, which may be changed, and a sparse tensor without entries for the reduced ones.
        """
        self.finish()
        self.notice()
        rows = self._empty() if self._own is None else self._own
        self._own, self.dirty = None, False
        self._detach()
        self._arriving = self._empty()
        return rows, self._arriving

    def finish(self) -> bool:
        """Wait for the reduction in flight, if any. Returns False: nothing is copied to another tier."""
        pending, out, self.pending, self._arriving = self.pending, self._arriving, None, None
        if pending is None or out is None:
            return False
        pending.finish()
        total = out.coalesce()
        self._reduced = total if self._reduced is None else (self._reduced + total).coalesce()
        if self._parameter.grad is None:
            self._attach()
        return False

    def let_go(self) -> None:
        """Nothing to do: nothing is copied to another tier."""

    # Values -----------------------------------------------------------------------------------------------------------

    def has_any(self) -> bool:
        """Whether there is a gradient, reduced or not."""
        return self.dirty or self.pending is not None or self._reduced is not None

    def rows(self) -> torch.Tensor:
        """The reduced gradient: sparse COO, coalesced, of the parameter's shape. It has no rows if no rank has any."""
        self.finish()
        if self._reduced is None:
            self._reduced = self._empty()
        return self._reduced if self._reduced.is_coalesced() else self._reduced.coalesce()

    def stepped(self) -> torch.Tensor:
        """`rows()` in the dtype and on the device of the master."""
        rows, master = self.rows(), self.group.master
        return rows if master is None else rows.to(device=master.device, dtype=master.dtype)

    def read(self, part: LocalSlice) -> torch.Tensor | None:
        """Elements of the reduced gradient as a new dense 1-D tensor; None if there is no gradient."""
        self.notice()
        self.finish()
        if self._reduced is None:
            return None
        return self._reduced.to_dense().view(-1)[part.start : part.stop]

    def write(self, part: LocalSlice, values: torch.Tensor) -> None:
        """Set the elements that `read` returns. If there is no gradient, nothing happens."""
        if self._reduced is None:
            return
        whole = self._reduced.to_dense()
        whole.view(-1)[part.start : part.stop].copy_(values)
        self._reduced = _rows(whole, self.dtype)
        self._detach()
        self._attach()

    def unreduced(self, index: int) -> torch.Tensor | None:
        """This rank's own sum of the gradients that no reduction has taken, dense; None if there are none."""
        return self._own.to_dense() if self.dirty and self._own is not None else None

    def clear(self) -> None:
        """Forget the gradient."""
        if self.pending is not None:
            self.pending.finish()
        self.pending = self._arriving = self._own = self._reduced = None
        self.dirty = False
        self._detach()

    def tensors(self) -> list[torch.Tensor]:
        """The indices and values of all rows."""
        held = [rows for rows in (self._own, self._reduced) if rows is not None]
        return [part for rows in held for part in (rows._indices(), rows._values())]

    def homes(self) -> list[Home]:
        """There are none: rows do not live in homes."""
        return []

    def _empty(self) -> torch.Tensor:
        shape, device = self._parameter.shape, self.group.key.device
        indices = torch.empty(1, 0, dtype=torch.int64, device=device)
        values = torch.empty(0, *shape[1:], dtype=self.dtype, device=device)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)


def _rows(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient as coalesced rows of `dtype`, in new memory."""
    rows = grad if grad.is_sparse else grad.to_sparse(1)
    coalesced = rows.to(dtype).coalesce()
    return coalesced.clone() if rows.is_coalesced() else coalesced


def _alias(rows: torch.Tensor) -> torch.Tensor:
    """Another sparse tensor with the same indices and values. An in-place addition to `rows` does not change it."""
    return torch.sparse_coo_tensor(
        rows._indices(), rows._values(), rows.shape, is_coalesced=rows.is_coalesced(), check_invariants=False
    )
