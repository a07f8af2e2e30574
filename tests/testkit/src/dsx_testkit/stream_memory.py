"""Finds races between the streams of `FakeCuda` in ordinary CPU code: two uses of the same memory, at least one of them
a write, that no event, stream wait or host wait orders; and memory that is handed out again while another stream may
still use it.

    with FakeCuda().installed() as cuda, StreamMemory(cuda) as memory:
        ...                       # the program; an operation runs at once, "on" the current stream
    assert memory.reports == []

Nothing has to be unlucky: the order is followed with vector clocks, as a device's own tools do it. The rules are those
of CUDA's caching allocator: memory belongs to the stream on which it was allocated, and goes back to it when its last
tensor goes; `record_stream` delays that.

The device is "meta": everything runs, without values. What is copied from there to the host are zeros. An operation
with host memory alone is the host's own and over when it returns. A copy between host and device makes the host wait,
unless it is `non_blocking`, and so does reading a number. Host memory is watched too, except for being handed out
again.

Left out: operations of other threads, and what kernels do to memory by address alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .fakes import FakeCuda, FakeStream

__all__ = ["StreamMemory"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class _Use:
    """An operation's use of bytes [start, stop) of a storage."""

    start: int
    stop: int
    writes: bool
    stream: FakeStream
    tick: int
    what: str

    def is_before(self, stream: FakeStream) -> bool:
        """Is it over when the next operation of `stream` runs?"""
        return stream.clock.get(self.stream.name, 0) >= self.tick


@dataclass
class _Block:
    """What is known of one storage."""

    owner: FakeStream
    on_device: bool
    uses: list[_Use] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)


class StreamMemory(TorchDispatchMode):
    """See the module's text."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self.reports: list[str] = []
        """What was found, each with the line of the program and the two operations."""
        self._blocks: dict[int, _Block] = {}
        self._freed: list[_Block] = []
        self._patches: list[Any] = []

    def __enter__(self) -> StreamMemory:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            block = self._blocks.get(storage._cdata)
            if block is not None and not size:
                self._free(block)
            elif block is not None and storage.nbytes() != size:
                self._blocks[storage._cdata] = self._allocate(block.on_device)
            return resize(storage, size)

        def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
            self._block_of(tensor).recorded.add(stream.name)

        self._patches = [
            patch.object(torch.UntypedStorage, "resize_", resize_),
            patch.object(torch.Tensor, "record_stream", record_stream),
        ]
        for each in self._patches:
            each.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for each in self._patches:
            each.stop()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a subclass decides first; what it does with plain tensors comes here
        result = _run(func, args, kwargs)
        schema = func._schema
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return result  # a view touches nothing
        touched = _tensors([args, kwargs, result])
        on_device = any(tensor.is_meta for tensor in touched)
        stream = self._cuda.current if on_device else self._cuda.host
        self._cuda.launch(stream)
        what = f"{func} on {stream.name}"
        for tensor, writes in _arguments(schema, args, kwargs):
            self._use(tensor, writes, stream, what)
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in self._blocks:
                self._keep(tensor, self._allocate(tensor.is_meta))
                if not func.__name__.startswith(("empty", "new_empty")):
                    self._use(tensor, True, stream, what)
        waits = func is torch.ops.aten._local_scalar_dense.default or len({tensor.is_meta for tensor in touched}) == 2
        if on_device and waits and not (kwargs.get("non_blocking") or (func is _COPY and len(args) > 2 and args[2])):
            self._cuda.wait_for(stream.clock)
        return result

    def _block_of(self, tensor: torch.Tensor) -> _Block:
        """What is known of a tensor's memory. What was there before this object belongs to the default stream."""
        found = self._blocks.get(tensor.untyped_storage()._cdata)
        return found or self._keep(tensor, _Block(self._cuda.default, tensor.is_meta))

    def _keep(self, tensor: torch.Tensor, block: _Block) -> _Block:
        storage = tensor.untyped_storage()
        self._blocks[storage._cdata] = block
        weakref.finalize(storage, self._gone, storage._cdata).atexit = False
        return block

    def _gone(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._free(block)

    def _free(self, block: _Block) -> None:
        if block.on_device:
            uses = [use for use in block.uses if use.stream.name not in block.recorded]
            self._freed.append(_Block(block.owner, True, uses))
        block.uses = []

    def _allocate(self, on_device: bool) -> _Block:
        """New memory for the current stream, which may be any that it has freed."""
        stream = self._cuda.current
        if not on_device:
            return _Block(stream, on_device)
        for block in [block for block in self._freed if block.owner is stream]:
            self._freed.remove(block)
            for use in block.uses:
                if not use.is_before(stream):
                    self._report(f"memory is handed out again on {stream.name}", use)
        # Whoever writes to it on another stream must come behind what this stream did with the memory before.
        before = _Use(0, sys.maxsize, False, stream, stream.clock[stream.name], f"earlier uses on {stream.name}")
        return _Block(stream, on_device, [before])

    def _use(self, tensor: torch.Tensor, writes: bool, stream: FakeStream, what: str) -> None:
        if not tensor.numel():
            return
        block = self._block_of(tensor)
        last = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride()))
        start = int(tensor.storage_offset()) * tensor.element_size()
        new = _Use(start, start + (last + 1) * tensor.element_size(), writes, stream, stream.clock[stream.name], what)
        kept = []
        for use in block.uses:
            apart = use.stop <= new.start or new.stop <= use.start
            if not apart and (writes or use.writes) and not use.is_before(stream):
                self._report(what, use)
            covered = new.start <= use.start and use.stop <= new.stop and (writes or not use.writes)
            if not (covered and use.is_before(stream)):
                kept.append(use)
        block.uses = [*kept, new]

    def _report(self, what: str, earlier: _Use) -> None:
        self.reports.append(f"{_place()}: {what} is not ordered behind {earlier.what}")


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operation itself. What leaves "meta" is zeros."""
    if func is _COPY and args[1].is_meta and not args[0].is_meta:
        return args[0].zero_()
    if func is torch.ops.aten._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
        return torch.zeros((), dtype=args[0].dtype).item()
    return func(*args, **kwargs)


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors with memory; wrappers of tensors have none."""
    return [leaf for leaf in tree_leaves(tree) if type(leaf) in _PLAIN]


def _arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
    """Each tensor that an operation is given, and whether it writes to it."""
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            yield tensor, writes


def _place(depth: Callable[[int], Any] = sys._getframe) -> str:
    """The innermost lines of the program, from the inside out."""
    frame, found = depth(1), []
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if "/torch/" not in name and name != __file__:
            found.append(f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found)
