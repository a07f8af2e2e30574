"""The process group of the shared-memory transport: torch's method names over the compiled module.

`group.py` has what a group is, `reductions.py` the operations that add up; here are those that move data, and torch's
other names: method names changed in torch 2.13, both old and new ones are here.

Tensors are host tensors of any dtype. Ones that are not contiguous travel through a packed copy. Sparse tensors go to
an inner gloo group, made on first use. Tensors in symmetric memory (`memory.py`) are read where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ..errors import CommArgumentError
from ..hang import WATCH
from .codes import wire_code
from .group import options_of, single_tensor
from .reductions import ShmReductions
from .storages import words_of
from .tensors import (
    addresses,
    check_list,
    nbytes,
    packed,
    packed_list,
    pointers,
    require_host_tensor,
    rows,
    separated,
    unaliased,
    without_overlap,
)
from .work import JoinedWork, translated


class ShmProcessGroup(ShmReductions):
    """A group whose ranks share memory. Made by `torch.distributed`; see `register.py`."""

    # - gathers

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """`output_lists[0][p]` = rank p's `inputs[0]`."""
        opts = options_of(opts, c10d.AllgatherOptions)
        single = isinstance(inputs, torch.Tensor)
        outputs, source = (output_lists, inputs) if single else (output_lists[0], inputs[0])
        check_list("all_gather", outputs, source, self._size)
        flat = unaliased(require_host_tensor(source).contiguous(), outputs, outputs[self._rank].data_ptr())
        places, finish = packed_list(outputs)
        return self.gather_all(pointers(places), flat, opts, (outputs, places), finish)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """output = the ranks' `input` one after the other; `input` may be this rank's part of `output`."""
        opts = options_of(opts, c10d.AllgatherOptions)
        source = require_host_tensor(input).contiguous()
        if output.numel() != source.numel() * self._size or output.dtype != source.dtype:
            raise CommArgumentError(
                f"all_gather: output has {output.numel()} elements of {output.dtype}, expected {self._size} (ranks) x "
                f"{source.numel()} of {source.dtype}"
            )
        flat, finish = packed(require_host_tensor(output))
        parts = addresses(flat, self._size)
        source = unaliased(source, [flat], parts[self._rank])
        return self.gather_all(parts, source, opts, (output, flat), finish)

    def allgather_coalesced(self, output_lists: Any, inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """`allgather` for several tensors: `output_lists[i][p]` = rank p's `inputs[i]`."""
        opts = options_of(opts, c10d.AllgatherOptions)
        works = [self.allgather([o], [i], opts) for o, i in zip(output_lists, inputs)]
        return JoinedWork(works, None, output_lists)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """`all_gather_single` for several pairs."""
        opts = options_of(opts, c10d.AllgatherOptions)
        return JoinedWork([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs)], None, list(outputs))

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """On the root: `output_lists[0][p]` = rank p's `inputs[0]`."""
        opts = options_of(opts, c10d.GatherOptions)
        (source,) = single_tensor(inputs)
        flat = require_host_tensor(source).contiguous()
        if self._rank != opts.rootRank:
            arguments = (flat.data_ptr(), [], nbytes(flat), wire_code(flat.dtype), opts.rootRank)
            return self._issue(self._native.gather, arguments, opts, ([], flat))
        outputs = output_lists[0]
        check_list("gather", outputs, flat, self._size)
        flat = unaliased(flat, outputs, outputs[self._rank].data_ptr())
        places, finish = packed_list(outputs)
        arguments = (flat.data_ptr(), pointers(places), nbytes(flat), wire_code(flat.dtype), opts.rootRank)
        return self._issue(self._native.gather, arguments, opts, (outputs, places, flat), finish)

    # - from one to all, all to all

    def broadcast(self, tensors: Any, opts: Any = None, **_: Any) -> Any:
        """Copy the root's `tensors[0]` to all."""
        opts = options_of(opts, c10d.BroadcastOptions)
        (tensor,) = tensors = single_tensor(tensors)
        flat, finish = packed(require_host_tensor(tensor))
        late = None if self._rank == opts.rootRank else finish
        arguments = (flat.data_ptr(), nbytes(flat), wire_code(flat.dtype), opts.rootRank)
        return self._issue(self._native.broadcast, arguments, opts, (tensors, flat), late)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None, **_: Any) -> Any:
        """`outputs[0]` = the root's `input_lists[0][rank]`."""
        opts = options_of(opts, c10d.ScatterOptions)
        (output,) = outputs = single_tensor(outputs)
        flat, finish = packed(require_host_tensor(output))
        parts: list[torch.Tensor] = []
        if self._rank == opts.rootRank:
            parts = without_overlap([require_host_tensor(p).contiguous() for p in input_lists[0]], [flat])
            check_list("scatter", parts, flat, self._size)
        arguments = (pointers(parts), flat.data_ptr(), nbytes(flat), wire_code(flat.dtype), opts.rootRank)
        return self._issue(self._native.scatter, arguments, opts, (outputs, flat, parts), finish)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        **_: Any,
    ) -> Any:
        """Split `input` along dim 0, piece p to rank p; `output` is what came from rank 0, 1, ..."""
        opts = options_of(opts, c10d.AllToAllOptions)
        flat, finish = packed(require_host_tensor(output))
        source = require_host_tensor(input).contiguous()
        places = rows(flat, output_split_sizes, self._size, "output")
        pieces = rows(source, input_split_sizes, self._size, "input")
        return self._exchange(places, pieces, opts, (output, flat, source), finish)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """outputs[p] = rank p's inputs[rank]; sizes may differ."""
        opts = options_of(opts, c10d.AllToAllOptions)
        places, finish = packed_list(outputs)
        pieces = [require_host_tensor(t).contiguous() for t in inputs]
        if len(places) != self._size or len(pieces) != self._size:
            raise CommArgumentError(
                f"all_to_all: got {len(places)} outputs and {len(pieces)} inputs, expected {self._size}"
            )
        return self._exchange(places, pieces, opts, (list(outputs), places), finish)

    def _exchange(
        self, places: list[torch.Tensor], pieces: list[torch.Tensor], opts: Any, kept: Any, finish: Any
    ) -> Any:
        pieces = separated(pieces, places)
        sends, expects = (list(map(nbytes, side)) for side in (pieces, places))  # compared there, on all ranks alike
        arguments = (pointers(pieces), sends, pointers(places), expects, wire_code(pieces[0].dtype))
        return self._issue(self._native.all_to_all, arguments, opts, (*kept, pieces), finish)

    def barrier(self, opts: Any = None, **_: Any) -> Any:
        """Wait until every rank has called it."""
        return self._issue(self._native.barrier, (), options_of(opts, c10d.BarrierOptions), ([],))

    # - point to point

    def _transfer(self, sending: bool, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        flat, finish = packed(require_host_tensor(tensor))
        what = f"{'send to' if sending else 'recv from'} {peer}"
        note = WATCH.enter(self, what, abort=self._give_up, timeout=self._timeout)
        try:
            storages, words = words_of((flat,))
            code = wire_code(flat.dtype)
            pending = self._native.transfer(sending, peer, flat.data_ptr(), nbytes(flat), tag, code, words)
            done = pending.done()
        except RuntimeError as error:
            raise WATCH.verdict(note, translated(error, self.gone)) from None
        except ValueError as error:
            raise CommArgumentError(
                f"rank {self._rank} cannot talk to rank {peer} of a group of {self._size}"
            ) from error
        finally:
            WATCH.leave(note)  # a rank that computes after its sends is in no communication
        if not done:
            self._native.serve_transfers()
        kept = (tensor, flat, storages)
        return self._work(pending, kept, [tensor], None if sending else finish, self._timeout, note)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Send `tensors[0]` to the group's rank `dst`."""
        return self._transfer(True, single_tensor(tensors)[0], dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Receive into `tensors[0]` from the group's rank `src`."""
        return self._transfer(False, single_tensor(tensors)[0], src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive into `tensors[0]` from the rank that sends first."""
        return self._transfer(False, single_tensor(tensors)[0], -1, tag)

    # - torch's other names

    def all_gather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """`all_gather_single_coalesced`."""
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    _allgather_base = all_gather_single
    _reduce_scatter_base = ShmReductions.reduce_scatter_single  # pyright: ignore[reportAssignmentType]
    alltoall_base = all_to_all_single  # pyright: ignore[reportAssignmentType]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # pyright: ignore[reportAssignmentType]
    reduce_scatter_tensor_coalesced: Any = ShmReductions.reduce_scatter_single_coalesced
