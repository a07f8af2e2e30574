"""`gds_handle`: transfers straight between disk and GPU memory where cuFile is there; through host buffers, with the same results, where not."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from . import cufile, staging
from .errors import TensorError
from .files import OpenFile
from .handle import PathOrFd, aio_handle
from .ticket import FutureJob, Job, Ticket

PAGE = 4096


class gds_handle(aio_handle):
    """`aio_handle` with a direct way for device tensors. Host tensors go as there.

    `mode` is "cufile" or "bounce"; `reason` says why not cuFile. `intra_op_parallelism` threads share one transfer.
    """

    def __init__(
        self, block_size: int = 1 << 20, queue_depth: int = 128, single_submit: bool = False, overlap_events: bool = False,
        intra_op_parallelism: int = 1, *, engine: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism, engine=engine)
        self._cufile, self.reason = cufile.load()
        self._pool = ThreadPoolExecutor(max_workers=intra_op_parallelism + 1, thread_name_prefix="dsx-nvme-gds")
        self._pinned: dict[int, torch.Tensor] = {}

    @property
    def mode(self) -> str:
        """How device tensors are transferred."""
        return "bounce" if self._cufile is None else "cufile"

    def close(self) -> None:
        """Wait for what is in flight, unpin what is pinned, end the threads."""
        super().close()
        self._pool.shutdown(wait=True)
        for tensor in list(self._pinned.values()):
            self.unpin_device_tensor(tensor)

    def new_pinned_device_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A pinned 1-D tensor of the example's dtype on its device (for an example on the CPU: the current GPU, or host memory without one)."""
        device = example_tensor.device
        if not staging.on_device(example_tensor):
            if not torch.cuda.is_available():
                return self.new_cpu_locked_tensor(num_elem, example_tensor)
            device = torch.device("cuda", torch.cuda.current_device())
        tensor = torch.empty(num_elem, dtype=example_tensor.dtype, device=device)
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Unpin a tensor of `new_pinned_device_tensor`; its memory goes with the last reference. False when it is none of this handle's."""
        return self.unpin_device_tensor(tensor) or self.free_cpu_locked_tensor(tensor)

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Register a device tensor's memory; returns True. Raises TensorError for a host tensor, NvmeError when cuFile refuses."""
        if not staging.on_device(tensor):
            raise TensorError(
                "got a tensor in host memory, expected one on a GPU; new_cpu_locked_tensor makes pinned host tensors"
            )
        address = tensor.data_ptr()
        if address not in self._pinned:
            if self._cufile is not None and tensor.numel():
                self._cufile.pin(address, tensor.numel() * tensor.element_size())
            self._pinned[address] = tensor
        return True

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Undo `pin_device_tensor`, after what is in flight with it; False when it is not pinned here."""
        if self._pinned.get(tensor.data_ptr()) is None:
            return False
        for ticket in self._pending:
            ticket.exception()
        del self._pinned[tensor.data_ptr()]
        if self._cufile is not None and tensor.numel():
            self._cufile.unpin(tensor.data_ptr())
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether transfers of this tensor need no bounce copy."""
        return tensor.data_ptr() in self._pinned or super().is_pinned(tensor)

    def _start(self, op: str, buffer: torch.Tensor, filename: PathOrFd, offset: int | None) -> Ticket:
        if self._cufile is None or not staging.on_device(buffer) or not buffer.is_contiguous():
            return super()._start(op, buffer, filename, offset)
        return self.engine.start(
            op, buffer, filename, 0 if offset is None and op == "read" else offset, begin=self._begin
        )

    def _begin(self, op: str, tensor: torch.Tensor, file: OpenFile, offset: int) -> Job:
        event = torch.cuda.current_stream(tensor.device).record_event() if tensor.device.type == "cuda" else None
        return FutureJob(self._pool.submit(self._move, op, tensor.detach(), file, offset, event))

    def _move(self, op: str, tensor: torch.Tensor, file: OpenFile, offset: int, ready: Any) -> int:
        library = self._cufile
        if library is None:
            raise TensorError("cuFile went away")
        if ready is not None:
            ready.synchronize()  # cuFile knows nothing of streams
        nbytes, threads = tensor.numel() * tensor.element_size(), self.get_intra_op_parallelism()
        if nbytes == 0:
            return 0
        handle = library.register_file(file.direct_fd if file.direct_fd >= 0 else file.plain_fd)
        try:
            part = max(PAGE, -(-nbytes // threads // PAGE) * PAGE)
            one = partial(library.transfer, op, handle, tensor.data_ptr())
            first, *others = [(start, min(part, nbytes - start)) for start in range(0, nbytes, part)]
            jobs: list[Future[int]] = [self._pool.submit(one, s, n, offset + s, file.path) for s, n in others]
            try:
                moved = one(*first, offset, file.path)
            finally:
                results = [job.exception() for job in jobs]  # nothing may be under way when the handle goes
            for error in results:
                if error is not None:
                    raise error
            return moved + sum(job.result() for job in jobs)
        finally:
            library.deregister_file(handle)
