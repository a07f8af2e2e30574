"""The memory of a unit's gathered parameters: one permanent storage object, resized to zero between uses.

The idea: autograd saves *tensors*, and a tensor keeps its storage object. If the object stays and only its memory is
freed and filled again, all tensors saved during forward (parameters, transposes, slices of them) have their data again
after the refill. Two rules make that exact:

* bytes are written through ``fill``, a tensor over the same storage with a version counter of its own, so that a refill
  is not an in-place change to what autograd saved (the effect of ``torch.autograd._unsafe_preserve_version_counter``,
  which covers writers that only know the base);
* after an optimizer step the counter of ``base``, which is that of all views, is moved, so that a backward through a
  graph from before the step raises torch's own error, as it does without sharding.

Left out: when the bytes are needed (gather/lifetime.py), and where they come from (the collectives).
Reading a view while ``allocated`` is false crashes the process; no such view may be reachable then.
"""

from __future__ import annotations

import torch


class GatheredStorage:
    """A flat buffer of ``numel`` elements whose memory can be freed and allocated again under the same views.

    After construction the memory is allocated (with undefined contents), so that views can be made.
    """

    def __init__(self, numel: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.base = torch.empty(numel, dtype=dtype, device=device)
        """The tensor whose version counter all views share."""
        self._storage = self.base.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.numel = numel
        # `.data` shares the storage but not the version counter.
        self.fill = self.base.data

    @property
    def nbytes(self) -> int:
        """Bytes of the memory while it is allocated."""
        return self._nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def allocated(self) -> bool:
        """Whether the memory is allocated. For an empty buffer it is always True."""
        return self._nbytes == 0 or self._storage.nbytes() > 0

    def view(self, start: int, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        """A tensor of ``shape`` over the elements from ``start`` on. Make and read it only while ``allocated``."""
        size = torch.Size(shape)
        return self.base[start : start + size.numel()].view(size)

    def allocate(self) -> None:
        """Allocate the memory, with undefined contents, unless it is allocated."""
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Free the memory. The views stay, and must not be read."""
        if self._storage.nbytes():
            self._storage.resize_(0)

    def poison(self) -> None:
        """Fill allocated memory of a floating-point dtype with NaN. Tests use it to find reads after `free`."""
        if self.allocated and self.dtype.is_floating_point:
            self.fill.fill_(float("nan"))
