"""`gds_handle`: transfers straight between disk and GPU memory, if cuFile is installed.

Without cuFile they go through host buffers, with the same results. cuFile's calls block, so threads of a pool make
them. A transfer is cut into its parts in the caller's thread, when it is started. If jobs of the pool did that and
waited for their parts in the same pool, it would deadlock when all its threads wait (test_nvme_gds.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from dsx_core.device import Device

from . import cufile, staging
from .errors import ForkError, TensorError
from .files import OpenFile
from .handle import PathOrFd, aio_handle
from .ticket import FutureJob, Job, Ticket

PAGE = 4096


class gds_handle(aio_handle):
    """An `aio_handle` that transfers device tensors directly. Host tensors are transferred as by `aio_handle`.

    `mode` is "cufile" or "bounce"; `reason` says why cuFile is not used. `intra_op_parallelism` threads share one
    transfer. To register a file with cuFile only once, open it (`handle.engine.open(path, write=True)`) and pass the
    result instead of the name.

    Args:
        block_size: bytes per request.
        queue_depth: requests in flight.
        single_submit, overlap_events, engine: as in `aio_handle`; they serve host tensors.
        intra_op_parallelism: threads that share one transfer.
    """

    def __init__(
        self, block_size: int = 1 << 20, queue_depth: int = 128, single_submit: bool = False,
        overlap_events: bool = False, intra_op_parallelism: int = 1, *, engine: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism, engine=engine)
        self._cufile, self.reason = cufile.load()
        threads = self.engine.options.blocking_threads
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="dsx-nvme-gds")
        self._pid = os.getpid()
        self._pinned: dict[int, torch.Tensor] = {}

    @property
    def mode(self) -> str:
        """The transfer path of device tensors: "cufile" or "bounce"."""
        return "bounce" if self._cufile is None else "cufile"

    def close(self) -> None:
        """Wait for all transfers, unpin all tensors and end the threads."""
        super().close()
        self._pool.shutdown(wait=True)
        for tensor in list(self._pinned.values()):
            self.unpin_device_tensor(tensor)

    def new_pinned_device_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A pinned 1-D tensor of the example's dtype on its device.

        If the example is on the CPU, the tensor is on the current GPU, or in host memory if there is no GPU.
        """
        device = example_tensor.device
        if not staging.on_device(example_tensor):
            current = Device.current()
            if not current.is_accelerator:
                return self.new_cpu_locked_tensor(num_elem, example_tensor)
            device = current.torch_device
        tensor = torch.empty(num_elem, dtype=example_tensor.dtype, device=device)
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Unpin a tensor of `new_pinned_device_tensor`; its memory is freed with the last reference.

        Returns False if this handle did not make the tensor.
        """
        return self.unpin_device_tensor(tensor) or self.free_cpu_locked_tensor(tensor)

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Register a device tensor's memory; returns True.

        Raises TensorError for a host tensor, NvmeError when cuFile refuses.
        """
        if not staging.on_device(tensor):
            raise TensorError(
                "got a tensor in host memory, expected one on a GPU; new_cpu_locked_tensor makes pinned host tensors"
            )
        address = tensor.data_ptr()
        if address not in self._pinned:
            if self._cufile is not None and tensor.numel():
                with staging.device_guard(tensor.device):
                    self._cufile.pin(address, tensor.numel() * tensor.element_size())
            self._pinned[address] = tensor
        return True

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Undo `pin_device_tensor` after transfers of the tensor have ended; returns False if it is not pinned here."""
        if self._pinned.get(tensor.data_ptr()) is None:
            return False
        for ticket in self._pending:
            ticket.exception()
        del self._pinned[tensor.data_ptr()]
        if self._cufile is not None and tensor.numel():
            with staging.device_guard(tensor.device):
                self._cufile.unpin(tensor.data_ptr())
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether transfers of this tensor need no copy through a bounce buffer."""
        return tensor.data_ptr() in self._pinned or super().is_pinned(tensor)

    def goes_directly(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is transferred without a copy in host memory."""
        return self._cufile is not None and staging.on_device(tensor) and tensor.is_contiguous()

    def _start(self, op: str, buffer: torch.Tensor, filename: PathOrFd, offset: int | None) -> Ticket:
        if not self.goes_directly(buffer):
            return super()._start(op, buffer, filename, offset)
        return self.engine.start(
            op, buffer, filename, 0 if offset is None and op == "read" else offset, begin=self._begin
        )

    def _begin(self, op: str, tensor: torch.Tensor, file: OpenFile, offset: int) -> Job:
        library = self._cufile
        if library is None or os.getpid() != self._pid:
            raise ForkError("this gds_handle belongs to the parent process; make one in this process")
        event = Device.of(tensor).event()
        handle = file.handle_of(library)
        parts: list[Future[int]] = []
        try:
            for start, nbytes in self._split(tensor.numel() * tensor.element_size()):
                place = (handle, tensor.data_ptr(), start, nbytes, offset + start, file.path, file.end_before)
                parts.append(self._pool.submit(_move, library, op, tensor.device, event, place))
        except BaseException:
            futures.wait(parts)  # the caller closes the file next, and with it its handle
            raise
        return FutureJob(parts)

    def _split(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """(start, bytes) of at most `intra_op_parallelism` parts; all but the last consist of full pages."""
        threads = self.get_intra_op_parallelism()
        part = max(PAGE, -(-nbytes // threads // PAGE) * PAGE)
        return ((start, min(part, nbytes - start)) for start in range(0, nbytes, part))


class DirectEngine:
    """The methods of an `Engine` that a `TensorStore` needs; tensors on a device are transferred directly by a
    `gds_handle`, tensors in host memory by the handle's engine. Closing this object closes the handle.
    """

    def __init__(self, handle: gds_handle) -> None:
        self._handle, self._engine = handle, handle.engine
        self.open, self.close_file, self.close = handle.engine.open, handle.engine.close_file, handle.close

    def goes_directly(self, tensor: torch.Tensor) -> bool:
        """See `gds_handle.goes_directly`."""
        return self._handle.goes_directly(tensor)

    def write(
        self, tensor: torch.Tensor, file: OpenFile, offset: int | None = None, *,
        after: Callable[[], None] | None = None,
    ) -> Ticket:  # fmt: skip
        """See `Engine.write`."""
        return self._start("write", tensor, file, offset, after)

    def read(
        self, tensor: torch.Tensor, file: OpenFile, offset: int | None = 0, *,
        after: Callable[[], None] | None = None,
    ) -> Ticket:  # fmt: skip
        """See `Engine.read`."""
        return self._start("read", tensor, file, offset, after)

    def _start(
        self, op: str, tensor: torch.Tensor, file: OpenFile, offset: int | None, after: Callable[[], None] | None
    ) -> Ticket:
        begin = self._handle._begin if self.goes_directly(tensor) else None
        return self._engine.start(op, tensor, file, offset, begin=begin, after=after)


def _move(library: cufile.CuFile, op: str, device: torch.device, ready: Any, place: tuple) -> int:
    """One part of a transfer, in a thread of the pool; returns its bytes."""
    with staging.device_guard(device):
        if ready is not None:
            ready.synchronize()  # cuFile does not wait for streams
        return library.transfer(op, *place)
