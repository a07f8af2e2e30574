"""The transfers that are measured: a tensor to and from one file in each folder, all folders at the same time."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dsx_core.device import Device

from ..gds import gds_handle
from ..handle import aio_handle
from .space import Setting


@dataclass
class Target:
    """Several folders, each with a file and a tensor of `nbytes`. As a context manager it removes its files."""

    folders: Sequence[str]
    nbytes: int
    device: str = "cpu"
    gds: bool = False
    drop_cache: bool = False
    files: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)

    def __enter__(self) -> Target:
        for folder in self.folders:
            os.makedirs(folder, exist_ok=True)
            self.files.append(os.path.join(folder, f"dsx-nvme-{uuid.uuid4().hex}"))
        return self

    def __exit__(self, *_: object) -> None:
        for path in self.files:
            if os.path.exists(path):
                os.unlink(path)

    def handle(self, setting: Setting) -> aio_handle:
        """A handle with a setting."""
        kind = gds_handle if self.gds else aio_handle
        s = setting
        return kind(s.block_size, s.queue_depth, s.single_submit, s.overlap_events, s.threads)

    def speed(self, setting: Setting, op: str, *, share: float = 1.0) -> float:
        """GB/s of one transfer per folder, all at the same time, with `share` of the bytes. Write before you read."""
        nbytes = max(4096, int(self.nbytes * share) // 4096 * 4096)
        with self.handle(setting) as handle:
            tensors = self._tensors(handle, nbytes)
            if op == "read" and self.drop_cache:
                self.forget_pages()
            start = time.perf_counter()
            for path, tensor in zip(self.files, tensors):
                if op == "write":
                    handle.async_pwrite(tensor, path, 0)
                else:
                    handle.async_pread(tensor, path, 0)
            handle.wait()
            Device.of(self.device).synchronize()
            seconds = time.perf_counter() - start
        return nbytes * len(self.files) / seconds / 1e9

    def forget_pages(self) -> None:
        """Drop the files from the page cache; this needs no special rights."""
        if not hasattr(os, "posix_fadvise"):
            return
        for path in self.files:
            fd = os.open(path, os.O_RDWR)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def _tensors(self, handle: Any, nbytes: int) -> list[torch.Tensor]:
        if not self.tensors:
            example = torch.empty(0, dtype=torch.uint8, device=self.device)
            for _ in self.files:
                if self.device == "cpu":
                    tensor = handle.new_cpu_locked_tensor(self.nbytes, example)
                    tensor.view(torch.int64)[: self.nbytes // 8].random_()  # random, because some devices compress
                else:
                    tensor = torch.randint(0, 256, (self.nbytes,), dtype=torch.uint8, device=self.device)
                self.tensors.append(tensor)
        return [tensor[:nbytes] for tensor in self.tensors]
