"""The reductions of a group of the shared-memory transport: all_reduce, reduce, reduce_scatter, several at once.

Dtypes and operators that the compiled module adds up go to it; for the others all ranks' data is gathered and torch
reduces in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ..errors import CommArgumentError
from ..ordered import reduce_in_order
from .codes import reduction
from .group import NOWHERE, ShmGroup, options_of, single_tensor
from .tensors import addresses, packed, pointers, require_host_tensor, target, unpack
from .work import JoinedWork


class ShmReductions(ShmGroup):
    """The operations of the shared-memory transport's group that reduce: by the compiled module, or in rank order."""

    def allreduce(self, tensors: Any, opts: Any = None, **_: Any) -> Any:
        """Reduce `tensors[0]` in place over all ranks."""
        opts = options_of(opts, c10d.AllreduceOptions)
        (tensor,) = tensors = single_tensor(tensors)
        if tensor.is_sparse:
            return self._fallback().allreduce(tensors, opts)
        flat, finish = packed(require_host_tensor(tensor))
        how = reduction(opts.reduceOp, flat.dtype)
        if how is None:
            return self._by_torch(flat, opts, tensors, finish)
        dtype, op, average, factor, elements = how
        arguments = (flat.data_ptr(), flat.numel() * elements, dtype, op, average, factor, *self._where(flat))
        return self._issue(self._native.all_reduce, arguments, opts, (tensors, flat), finish)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Reduce every tensor in place; tensors of one dtype travel as one message."""
        opts = options_of(opts, c10d.AllreduceCoalescedOptions)
        works = []
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            same = [t for t in tensors if t.dtype == dtype]
            flat = same[0] if len(same) == 1 else torch.cat([require_host_tensor(t).reshape(-1) for t in same])
            work = self.allreduce([flat], opts)
            works.append((work, same if len(same) > 1 else [], flat))
        return JoinedWork([w for w, _, _ in works], lambda: [unpack(f, s) for _, s, f in works if s], list(tensors))

    def reduce(self, tensors: Any, opts: Any = None, **_: Any) -> Any:
        """Reduce `tensors[0]` into the root's."""
        opts = options_of(opts, c10d.ReduceOptions)
        (tensor,) = tensors = single_tensor(tensors)
        flat, finish = packed(require_host_tensor(tensor))
        how = reduction(opts.reduceOp, flat.dtype)
        if how is None:
            return self._by_torch(flat.clone(), opts, tensors, None, into=flat if self._rank == opts.rootRank else None)
        arguments = (flat.data_ptr(), flat.numel() * how.elements, opts.rootRank, *how[:4])
        kept = (tensors, flat)
        return self._issue(self._native.reduce, arguments, opts, kept, finish if self._rank == opts.rootRank else None)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """outputs[0] = this rank's part of the reduction; `inputs[0]` holds one tensor per rank, of any sizes."""
        opts = options_of(opts, c10d.ReduceScatterOptions)
        output, parts = (outputs, inputs) if isinstance(outputs, torch.Tensor) else (outputs[0], inputs[0])
        parts = [require_host_tensor(p).contiguous() for p in parts]
        counts = [p.numel() for p in parts]
        if len(parts) != self._size or counts[self._rank] != output.numel() or parts[0].dtype != output.dtype:
            raise CommArgumentError(
                f"reduce_scatter: got {len(parts)} parts, mine of {counts[min(self._rank, len(parts) - 1)]} elements "
                f"of {parts[0].dtype}; expected {self._size}, mine of {output.numel()} elements of {output.dtype}"
            )
        return self._scatter_sum(output, parts, pointers(parts), counts, NOWHERE, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """output = this rank's part of the reduction of the ranks' `input`."""
        opts = options_of(opts, c10d.ReduceScatterOptions)
        source = require_host_tensor(input).contiguous()
        count = output.numel()
        if source.numel() != count * self._size or source.dtype != output.dtype:
            raise CommArgumentError(
                f"reduce_scatter: input has {source.numel()} elements of {source.dtype}, expected {self._size} (ranks) "
                f"x {count} of {output.dtype}"
            )
        parts = addresses(source, self._size)
        return self._scatter_sum(output, [source], parts, [count] * self._size, self._where(source), opts)

    def _scatter_sum(
        self,
        output: torch.Tensor,
        sources: list[torch.Tensor],
        parts: list[int],
        counts: list[int],
        where: Any,
        opts: Any,
    ) -> Any:
        """`parts`: addresses of what is for each rank, `counts` elements of it; `sources` hold them, one after the
        other.
        """
        place, finish = target(require_host_tensor(output), sources, parts[self._rank])
        how = reduction(opts.reduceOp, output.dtype)
        if how is None:
            flat = torch.cat([s.reshape(-1) for s in sources])
            begin = sum(counts[: self._rank])
            return self._by_torch(flat, opts, [output], finish, into=place, part=(begin, output.numel()))
        numbers = [n * how.elements for n in counts]
        arguments = (place.data_ptr(), parts, numbers, *how[:4], *where)
        return self._issue(self._native.reduce_scatter, arguments, opts, ([output], sources, place), finish)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """`reduce_scatter_single` for several pairs."""
        opts = options_of(opts, c10d.ReduceScatterOptions)
        return JoinedWork(
            [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs)], None, list(outputs)
        )

    def _by_torch(
        self,
        flat: torch.Tensor,
        opts: Any,
        value: Any,
        finish: Callable[[], Any] | None,
        into: torch.Tensor | None = None,
        part: tuple[int, int] | None = None,
    ) -> Any:
        """Dtypes the compiled module does not add up: all ranks' data is gathered, torch reduces it in rank order."""
        gathered = torch.empty(self._size * flat.numel(), dtype=flat.dtype, device="cpu")
        target = flat if into is None else into
        begin, length = part or (0, flat.numel())
        skip = into is None and isinstance(opts, c10d.ReduceOptions)

        def combine() -> None:
            rows = [r[begin : begin + length] for r in gathered.view(self._size, -1).unbind(0)]
            if not skip:
                reduce_in_order(rows, getattr(opts.reduceOp, "op", opts.reduceOp), target.view(-1))
            if finish is not None:
                finish()

        return self.gather_all(addresses(gathered, self._size), flat, opts, (value, gathered), combine)
