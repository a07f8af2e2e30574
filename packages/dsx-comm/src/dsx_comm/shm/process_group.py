"""The process group of the shared-memory transport: torch's method names over the compiled module.

A Python class derived from torch's ProcessGroup, because a C++ backend would tie the package to one torch version. torch
calls it from Python and (through its trampolines) from C++: DDP, functional collectives. Method names changed in torch 2.13;
both old and new ones are here.

Tensors are host tensors of any dtype. Ones that are not contiguous travel through a packed copy. Sparse tensors go to an
inner gloo group, made on first use. Tensors in symmetric memory (`memory.py`) are read where they lie.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ..errors import CommArgumentError
from ..hang import WATCH, Waiting
from ..ordered import reduce_in_order
from . import native
from .codes import reduction
from .memory import Memories
from .segment import ShmOptions, cores, world_size
from .tensors import check_list, host, nbytes, packed, packed_list, pointers, rows, target, unaliased, unpack
from .work import DONE, Futures, JoinedWork, ShmWork, translated

_NOWHERE: tuple[int, int, list[int]] = (-1, 0, [])


class ShmProcessGroup(dist.ProcessGroup):
    """A group whose ranks share memory. Made by `torch.distributed`; see `register.py`."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, fd: int, ranks: Sequence[int], options: ShmOptions
    ) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._store, self._fd, self._timeout = store, fd, timeout.total_seconds()
        self._rank, self._size = rank, size
        module = native.module()
        in_bytes, piece, _ = module.layout(fd)
        total, eager = module.sizes(size, in_bytes, piece, _mailbox_bytes())
        crowded = max(size, world_size()) > cores()
        spin, give_way = _CROWDED if crowded else _FREE
        if options.spin_us is not None:
            spin, give_way = min(spin, options.spin_us), options.spin_us
        one_shot = options.one_shot_bytes or max(4096, 65536 // size)
        self._native = module.Group(
            fd, total, eager, rank, list(ranks), fd, spin, give_way, min(one_shot, in_bytes), options.stores
        )
        self._owner = os.getpid()
        self._name, self._description = "", "undefined"
        self._futures = Futures()
        self._inflight: dict[ShmWork, None] = {}  # the memory must outlive a dropped handle
        self.memories = Memories()
        self._gloo: Any = None

    # - what torch asks about a group

    def getBackendName(self) -> str:
        """ "dsx"."""
        return "dsx"

    def _get_backend_name(self) -> str:
        return "dsx"

    def rank(self) -> int:
        """This process' rank in the group."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    # torch's own storage of name and description lies in C++ backends, which this group has none of
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:
        """The name under which torch knows the group."""
        return self._name

    def getGroupDesc(self) -> str:
        """The description given when the group was made."""
        return self._description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of the calls that follow."""
        self._timeout = timeout.total_seconds()

    def get_group_store(self) -> Any:
        """The group's store."""
        return self._store

    def supports_tensor_alloc(self, device: Any) -> bool:
        """False: symmetric memory has to be asked for by all ranks together (`dsx_comm.empty`)."""
        return False

    # - ending

    def abort(self, reason: str = "the group was aborted") -> None:
        """Make every rank's present and future calls on this group fail with `reason`."""
        self._native.poison(reason, False)

    def _give_up(self, explanation: str) -> None:
        self._native.poison(explanation, True)

    def shutdown(self) -> None:
        """Release the threads and the descriptor; memory goes when the last tensor of it does."""
        if self._fd >= 0 and os.getpid() == self._owner:
            self._futures.close()
            self._native.close()
            os.close(self._fd)
            self._fd = -1

    # - helpers

    def _issue(
        self,
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        opts: Any,
        kept: Any,
        finish: Callable[[], Any] | None = None,
    ) -> Any:
        """Run or queue `call(*arguments, timeout, asynchronous)`; `finish` puts the result in place."""
        wanted = opts.timeout.total_seconds()
        timeout = wanted if wanted > 0 else self._timeout
        asynchronous = getattr(opts, "asyncOp", True)
        note = WATCH.enter(self._name, call.__name__, "", self._give_up)
        try:
            pending = call(*arguments, timeout, asynchronous)
        except RuntimeError as error:
            raise WATCH.verdict(note, translated(error)) from None
        finally:
            WATCH.leave(note)
        if pending is None:
            if finish is not None:
                finish()
            return DONE
        return self._track(pending, kept, finish, timeout, note)

    def _track(
        self, pending: Any, kept: Any, finish: Callable[[], Any] | None, timeout: float, note: Waiting
    ) -> ShmWork:
        work = ShmWork(pending, kept, kept[0], finish, timeout, self._futures, note, self._inflight)
        self._inflight[work] = None
        for earlier in list(self._inflight):  # a finished one takes itself out
            if not earlier.is_completed():
                break
        return work

    def _where(self, tensor: torch.Tensor) -> tuple[int, int, list[int]]:
        return self.memories.find(tensor) if self.memories else _NOWHERE

    def _fallback(self) -> Any:
        if self._gloo is None:
            store = dist.PrefixStore("gloo/", self._store)  # pyright: ignore[reportPrivateImportUsage]
            gloo: Any = dist.ProcessGroupGloo
            self._gloo = gloo(store, self._rank, self._size, timeout=timedelta(seconds=self._timeout))
        return self._gloo

    # - reductions

    def allreduce(self, tensors: Any, opts: Any = None, **_: Any) -> Any:
        """Reduce `tensors[0]` in place over all ranks."""
        opts = _options(opts, c10d.AllreduceOptions)
        (tensor,) = tensors = _one(tensors)
        if tensor.is_sparse:
            return self._fallback().allreduce(tensors, opts)
        flat, finish = packed(host(tensor))
        how = reduction(opts.reduceOp, flat.dtype)
        if how is None:
            return self._by_torch(flat, opts, tensors, finish)
        dtype, op, average, factor, elements = how
        arguments = (flat.data_ptr(), flat.numel() * elements, dtype, op, average, factor, *self._where(flat))
        return self._issue(self._native.all_reduce, arguments, opts, (tensors, flat), finish)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Reduce every tensor in place; tensors of one dtype travel as one message."""
        opts = _options(opts, c10d.AllreduceCoalescedOptions)
        works = []
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            same = [t for t in tensors if t.dtype == dtype]
            flat = same[0] if len(same) == 1 else torch.cat([host(t).reshape(-1) for t in same])
            work = self.allreduce([flat], opts)
            works.append((work, same if len(same) > 1 else [], flat))
        return JoinedWork([w for w, _, _ in works], lambda: [unpack(f, s) for _, s, f in works if s], list(tensors))

    def reduce(self, tensors: Any, opts: Any = None, **_: Any) -> Any:
        """Reduce `tensors[0]` into the root's."""
        opts = _options(opts, c10d.ReduceOptions)
        (tensor,) = tensors = _one(tensors)
        flat, finish = packed(host(tensor))
        how = reduction(opts.reduceOp, flat.dtype)
        if how is None:
            return self._by_torch(flat.clone(), opts, tensors, None, into=flat if self._rank == opts.rootRank else None)
        arguments = (flat.data_ptr(), flat.numel() * how.elements, opts.rootRank, *how[:4])
        kept = (tensors, flat)
        return self._issue(self._native.reduce, arguments, opts, kept, finish if self._rank == opts.rootRank else None)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """outputs[0] = this rank's part of the reduction; `inputs[0]` holds one tensor per rank, of any sizes."""
        opts = _options(opts, c10d.ReduceScatterOptions)
        output, parts = (outputs, inputs) if isinstance(outputs, torch.Tensor) else (outputs[0], inputs[0])
        packed = [host(p).contiguous() for p in parts]
        return self._scatter_sum(output, packed, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """output = this rank's part of the reduction of the ranks' `input`."""
        opts = _options(opts, c10d.ReduceScatterOptions)
        source = host(input).contiguous()
        if source.numel() != output.numel() * self._size:
            raise CommArgumentError(
                f"reduce_scatter: input has {source.numel()} elements, expected {self._size} (ranks) x {output.numel()}"
            )
        return self._scatter_sum(output, list(source.view(self._size, -1).unbind(0)), opts, source)

    def _scatter_sum(
        self, output: torch.Tensor, parts: list[torch.Tensor], opts: Any, whole: torch.Tensor | None = None
    ) -> Any:
        if len(parts) != self._size or parts[self._rank].numel() != output.numel() or parts[0].dtype != output.dtype:
            raise CommArgumentError(
                f"reduce_scatter: got {len(parts)} parts, mine of {parts[min(self._rank, len(parts) - 1)].numel()} elements of "
                f"{parts[0].dtype}; expected {self._size}, mine of {output.numel()} elements of {output.dtype}"
            )
        place, finish = target(host(output), parts, parts[self._rank])
        how = reduction(opts.reduceOp, output.dtype)
        if how is None:
            flat = torch.cat([p.reshape(-1) for p in parts])
            begin = sum(p.numel() for p in parts[: self._rank])
            return self._by_torch(flat, opts, [output], finish, into=place, part=(begin, output.numel()))
        counts = [p.numel() * how.elements for p in parts]
        where = self._where(whole) if whole is not None else _NOWHERE
        arguments = (place.data_ptr(), pointers(parts), counts, *how[:4], *where)
        return self._issue(self._native.reduce_scatter, arguments, opts, ([output], parts, place, whole), finish)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """`reduce_scatter_single` for several pairs."""
        opts = _options(opts, c10d.ReduceScatterOptions)
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
        """Dtypes the compiled module does not add up: everybody's data is gathered, torch reduces it in rank order."""
        gathered = torch.empty(self._size * flat.numel(), dtype=flat.dtype)
        target = flat if into is None else into
        begin, length = part or (0, flat.numel())
        skip = into is None and isinstance(opts, c10d.ReduceOptions)

        def combine() -> None:
            rows = [r[begin : begin + length] for r in gathered.view(self._size, -1).unbind(0)]
            if not skip:
                reduce_in_order(rows, getattr(opts.reduceOp, "op", opts.reduceOp), target.view(-1))
            if finish is not None:
                finish()

        return self._gather_all(list(gathered.view(self._size, -1).unbind(0)), flat, opts, (value, gathered), combine)

    # - gathers

    def _gather_all(
        self, outputs: list[torch.Tensor], source: torch.Tensor, opts: Any, kept: Any, finish: Callable[[], Any] | None
    ) -> Any:
        arguments = (source.data_ptr(), pointers(outputs), nbytes(source), *self._where(source))
        return self._issue(self._native.all_gather, arguments, opts, (*kept, outputs, source), finish)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """output_lists[0][p] = rank p's `inputs[0]`."""
        opts = _options(opts, c10d.AllgatherOptions)
        single = isinstance(inputs, torch.Tensor)
        outputs, source = (output_lists, inputs) if single else (output_lists[0], inputs[0])
        flat = unaliased(host(source).contiguous(), outputs, self._rank)
        check_list("all_gather", outputs, flat, self._size)
        places, finish = packed_list(outputs)
        return self._gather_all(places, flat, opts, (outputs,), finish)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """output = the ranks' `input` one after the other; `input` may be this rank's part of `output`."""
        opts = _options(opts, c10d.AllgatherOptions)
        source = host(input).contiguous()
        if output.numel() != source.numel() * self._size or output.dtype != source.dtype:
            raise CommArgumentError(
                f"all_gather: output has {output.numel()} elements of {output.dtype}, expected {self._size} (ranks) x "
                f"{source.numel()} of {source.dtype}"
            )
        flat, finish = packed(host(output))
        places = list(flat.view(self._size, -1).unbind(0)) if flat.numel() else [flat] * self._size
        source = unaliased(source, [flat], self._rank, places[self._rank])
        return self._gather_all(places, source, opts, (output, flat), finish)

    def allgather_coalesced(self, output_lists: Any, inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """`allgather` for several tensors: output_lists[i][p] = rank p's inputs[i]."""
        opts = _options(opts, c10d.AllgatherOptions)
        works = [self.allgather([o], [i], opts) for o, i in zip(output_lists, inputs)]
        return JoinedWork(works, None, output_lists)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """`all_gather_single` for several pairs."""
        opts = _options(opts, c10d.AllgatherOptions)
        return JoinedWork([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs)], None, list(outputs))

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """On the root: output_lists[0][p] = rank p's `inputs[0]`."""
        opts = _options(opts, c10d.GatherOptions)
        (source,) = _one(inputs)
        flat = host(source).contiguous()
        if self._rank != opts.rootRank:
            arguments = (flat.data_ptr(), [], nbytes(flat), opts.rootRank)
            return self._issue(self._native.gather, arguments, opts, ([], flat))
        outputs = output_lists[0]
        check_list("gather", outputs, flat, self._size)
        places, finish = packed_list(outputs)
        arguments = (flat.data_ptr(), pointers(places), nbytes(flat), opts.rootRank)
        return self._issue(self._native.gather, arguments, opts, (outputs, places, flat), finish)

    # - from one to all, all to all

    def broadcast(self, tensors: Any, opts: Any = None, **_: Any) -> Any:
        """Copy the root's `tensors[0]` to all."""
        opts = _options(opts, c10d.BroadcastOptions)
        (tensor,) = tensors = _one(tensors)
        flat, finish = packed(host(tensor))
        late = None if self._rank == opts.rootRank else finish
        return self._issue(
            self._native.broadcast, (flat.data_ptr(), nbytes(flat), opts.rootRank), opts, (tensors, flat), late
        )

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None, **_: Any) -> Any:
        """outputs[0] = the root's input_lists[0][rank]."""
        opts = _options(opts, c10d.ScatterOptions)
        (output,) = outputs = _one(outputs)
        flat, finish = packed(host(output))
        parts: list[torch.Tensor] = []
        if self._rank == opts.rootRank:
            parts = [host(p).contiguous() for p in input_lists[0]]
            check_list("scatter", parts, flat, self._size)
        arguments = (pointers(parts), flat.data_ptr(), nbytes(flat), opts.rootRank)
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
        opts = _options(opts, c10d.AllToAllOptions)
        flat, finish = packed(host(output))
        source = host(input).contiguous()
        places = rows(flat, output_split_sizes, self._size, "output")
        pieces = rows(source, input_split_sizes, self._size, "input")
        return self._exchange(places, pieces, opts, (output, flat, source), finish)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """outputs[p] = rank p's inputs[rank]; sizes may differ."""
        opts = _options(opts, c10d.AllToAllOptions)
        places, finish = packed_list(outputs)
        pieces = [host(t).contiguous() for t in inputs]
        if len(places) != self._size or len(pieces) != self._size:
            raise CommArgumentError(
                f"all_to_all: got {len(places)} outputs and {len(pieces)} inputs, expected {self._size}"
            )
        return self._exchange(places, pieces, opts, (list(outputs), places), finish)

    def _exchange(
        self, places: list[torch.Tensor], pieces: list[torch.Tensor], opts: Any, kept: Any, finish: Any
    ) -> Any:
        own, place = pieces[self._rank], places[self._rank]
        if nbytes(own) != nbytes(place):
            raise CommArgumentError(
                f"all_to_all: this rank sends itself {nbytes(own)} bytes but expects {nbytes(place)} from itself"
            )
        sizes = [list(map(nbytes, side)) for side in (pieces, places)]
        arguments = (pointers(pieces), sizes[0], pointers(places), sizes[1])
        return self._issue(self._native.all_to_all, arguments, opts, (*kept, pieces), finish)

    def barrier(self, opts: Any = None, **_: Any) -> Any:
        """Until every rank has come."""
        return self._issue(self._native.barrier, (), _options(opts, c10d.BarrierOptions), ([],))

    # - point to point

    def _transfer(self, sending: bool, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        flat, finish = packed(host(tensor))
        note = WATCH.enter(self._name, f"{'send to' if sending else 'recv from'} {peer}", "", self._give_up)
        try:
            pending = self._native.transfer(sending, peer, flat.data_ptr(), nbytes(flat), tag)
            done = pending.done()
        except RuntimeError as error:
            raise translated(error) from None
        except ValueError as error:
            raise CommArgumentError(
                f"rank {self._rank} cannot talk to rank {peer} of a group of {self._size}"
            ) from error
        if not done:
            self._native.serve_transfers()
        return self._track(pending, ([tensor], flat), None if sending else finish, self._timeout, note)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Send `tensors[0]` to the group's rank `dst`."""
        return self._transfer(True, _one(tensors)[0], dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Receive into `tensors[0]` from the group's rank `src`."""
        return self._transfer(False, _one(tensors)[0], src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive into `tensors[0]` from whoever sends first."""
        return self._transfer(False, _one(tensors)[0], -1, tag)

    # - torch's other names

    def all_gather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """`all_gather_single_coalesced`."""
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # pyright: ignore[reportAssignmentType]
    alltoall_base = all_to_all_single  # pyright: ignore[reportAssignmentType]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # pyright: ignore[reportAssignmentType]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # pyright: ignore[reportAssignmentType]


# microseconds of waiting that keeps the core, and that gives way to others, before a waiting rank sleeps
_FREE, _CROWDED = (20.0, 300.0), (0.0, 50.0)


def _mailbox_bytes() -> int:
    from .segment import MAILBOX

    return MAILBOX


def _options(opts: Any, kind: Any) -> Any:
    if opts is None:
        return kind()
    if hasattr(opts, "timeout"):
        return opts
    made = kind()  # torch's overloads take the operator or the root in this place
    if hasattr(made, "reduceOp") and not isinstance(opts, int):
        made.reduceOp = opts
    elif hasattr(made, "rootRank"):
        made.rootRank = opts
    return made


def _one(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if len(tensors) != 1:
        raise CommArgumentError(f"got {len(tensors)} tensors, expected one")
    return tensors
