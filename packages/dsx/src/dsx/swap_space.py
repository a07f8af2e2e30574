"""The store for state on disk: a `dsx_nvme.TensorStore` for each rank, with the settings of the `aio` section.

Swap space is temporary: files are removed when it is closed, and the next start uses a folder that a killed process
left behind. Two jobs cannot share a folder (`NvmeError` names the other process).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dsx_zero
import torch
from dsx_core import with_code

from .utils.logging import logger

__all__ = ["Init", "SwapSpace", "remove_leftovers"]

OnTransfer = Callable[[str, str, int], Callable[[], None]]
"""Is called when a transfer begins (operation, name, bytes); it returns what is called once when it has ended."""


class SwapSpace:
    """A store of tensors on disk for this rank; see `dsx_zero.homes.stored.TensorStore`.

    Args:
        folder: the `nvme_path` of the configuration.
        name: the name of a folder in it, one per rank and use.
        aio: the `aio` section; None: its defaults.
    """

    def __init__(self, folder: str | os.PathLike, name: str, aio: Any = None) -> None:
        import dsx_nvme as nvme  # lazy imports here: few jobs keep state on disk
        from dsx_nvme import files

        settings = nvme.AioConfig() if aio is None else aio
        self._engine = (_direct_engine(settings) if settings.use_gds else None) or nvme.Engine(
            block_size=settings.block_size,
            queue_depth=settings.queue_depth,
            threads=settings.intra_op_parallelism,
            single_submit=settings.single_submit,
            overlap_events=settings.overlap_events,
        )
        self.reaches_device = hasattr(self._engine, "goes_directly")
        """Whether tensors on a device are read and written without a copy in host memory (`aio.use_gds`)."""
        try:
            place = os.path.join(folder, name)
            os.makedirs(place, exist_ok=True)
            kind = files.file_system(os.stat(place).st_dev)
            if kind in files.IN_MEMORY:
                raise dsx_zero.ZeroConfigError(
                    "zero_optimization.offload_*.nvme_path",
                    f"got {os.fspath(folder)!r}, which lies in memory ({kind}); expected a folder on a disk. For state"
                    " in host memory set device to cpu",
                )
            self._store = nvme.TensorStore(place, engine=self._engine, keep=False)
        except OSError as error:
            self._engine.close()
            raise dsx_zero.ZeroConfigError(
                "zero_optimization.offload_*.nvme_path",
                f"got {os.fspath(folder)!r}, which cannot be written to ({error}); expected a folder on a local disk"
                " with room for the state",
            ) from error
        except BaseException:
            self._engine.close()
            raise
        self._closed = False
        self._listener: OnTransfer | None = None

    @property
    def folder(self) -> str:
        """The folder of the files."""
        return self._store.folder

    def __contains__(self, name: str) -> bool:
        return name in self._store

    def listen(self, on_transfer: OnTransfer) -> Callable[[], None]:
        """Call `on_transfer` when a transfer begins (operation, name, bytes), and call its result when the transfer has
        ended; `dsx_monitor.Timeline.transfer` is such a function. Returns a function that stops this.
        """
        self._listener = on_transfer

        def end() -> None:
            self._listener = None

        return end

    def put(self, name: str, tensor: torch.Tensor) -> Any:
        """Start storing a host tensor. Do not write to it before you have waited."""
        self._check_open()
        return self._begin("write", name, tensor, lambda: self._store.put(name, tensor))

    def get(self, name: str, out: torch.Tensor) -> Any:
        """Start reading."""
        self._check_open()
        return self._begin("read", name, out, lambda: self._store.get(name, out).ticket)

    def delete(self, name: str) -> None:
        """Delete a tensor; its room is used again."""
        self._check_open()
        self._store.delete(name)

    def _begin(self, op: str, name: str, tensor: torch.Tensor, start: Callable[[], Any]) -> Any:
        if self._listener is None:
            return start()
        over = self._listener(op, name, tensor.numel() * tensor.itemsize)
        try:
            return _Watched(start(), over)
        except BaseException:
            over()  # it could not start: its end is reported at once
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise dsx_zero.ZeroStateError(
                f"this state lived on disk in {self.folder} and went with its engine (destroy(), or its model was"
                " sharded again); read parameters and save checkpoints before that"
            )

    def close(self) -> None:
        """Wait for all transfers and remove the files. A second call does nothing."""
        self._closed = True
        try:
            self._store.close()
        finally:
            self._engine.close()


class _Watched:
    """A ticket of a transfer, and the function to call when the transfer has ended, well or badly.

    The end is seen where somebody waits for it. So a transfer that ends earlier, while the program computes, seems to
    last until the wait.
    """

    def __init__(self, ticket: Any, over: Callable[[], None]) -> None:
        self._ticket, self._over = ticket, over

    def wait(self) -> int:
        """See `dsx_nvme.ticket.Ticket.wait`."""
        try:
            return self._ticket.wait()
        finally:
            self._tell()

    def exception(self) -> BaseException | None:
        """See `dsx_nvme.ticket.Ticket.exception`."""
        try:
            return self._ticket.exception()
        finally:
            self._tell()

    def done(self) -> bool:
        """See `dsx_nvme.ticket.Ticket.done`."""
        return self._ticket.done()

    def _tell(self) -> None:
        if self._ticket.done():  # it is not done if a signal ended the wait
            over, self._over = self._over, _nothing
            over()


def _nothing() -> None:
    """The end of a transfer was reported."""


_FOLDER = re.compile(r"dsx-(?:init\d+-)?rank(\d+)")


def remove_leftovers(folder: str | os.PathLike, rank: int, world_size: int) -> None:
    """Remove folders that killed jobs have left in `folder` and that no rank of this job would use: those of models
    that `Init` built on this rank, and those of ranks that this job does not have. Folders in use stay.
    """
    import dsx_nvme as nvme

    try:
        names = sorted(os.listdir(folder))
    except OSError:  # the folder is missing or cannot be used; the code that makes the store reports that
        return
    for name in names:
        found = _FOLDER.fullmatch(name)
        place = os.path.join(folder, name)
        if found is None or not (int(found[1]) == rank or int(found[1]) >= world_size) or not os.path.isdir(place):
            continue
        with contextlib.suppress(nvme.NvmeError, nvme.errors.FormatError, OSError):  # in use, or not ours to remove
            if os.listdir(place):
                nvme.TensorStore(place, keep=False).close()


def _direct_engine(settings: Any) -> Any:
    """An engine for direct transfers between disk and device memory (`aio.use_gds`); None, with a warning that says
    why, if that is not possible.
    """
    from dsx_nvme import gds

    handle = gds.gds_handle(
        settings.block_size,
        settings.queue_depth,
        settings.single_submit,
        settings.overlap_events,
        settings.intra_op_parallelism,
    )
    if handle.mode == "cufile":
        return gds.DirectEngine(handle)
    reason = handle.reason or "cuFile was not found"
    handle.close()
    text = "aio.use_gds: state on disk goes through host memory, because cuFile cannot be used: %s"
    logger.warning(with_code(text, "DSX652"), reason)
    return None


class Init(dsx_zero.Init):
    """`dsx_zero.Init` that makes the store for `remote_device="nvme"` itself: in a folder of this rank inside
    `zero_optimization.offload_param.nvme_path`. The store is removed when no parameter uses it any more.
    """

    def _store_on_disk(self, path: str | None) -> Any:
        if path is None:
            raise dsx_zero.ZeroConfigError(
                "Init.config_dict_or_path",
                "got remote_device='nvme' and no folder; expected zero_optimization.offload_param.nvme_path in the"
                " configuration",
            )
        from dsx_nvme.errors import FolderInUseError

        for number in itertools.count():  # the first number that no other model of this process uses
            try:
                space = SwapSpace(path, f"dsx-init{number}-rank{self._ranks.data.rank}", self._aio)
            except FolderInUseError:
                continue
            lent = _Lent(space)
            weakref.finalize(lent, space.close)
            return lent

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("config") or kwargs.get("config_dict_or_path") or (args[5] if len(args) > 5 else None)
        self._aio = _aio_of(given)
        super().__init__(*args, **kwargs)


class _Lent:
    """The store that parameters hold a reference to. It is closed when the last of them is freed."""

    def __init__(self, space: SwapSpace) -> None:
        self._space = space
        self.put, self.get, self.delete = space.put, space.get, space.delete
        self.reaches_device = space.reaches_device

    def __contains__(self, name: str) -> bool:
        return name in self._space


def _aio_of(config: Any) -> Any:
    """The `aio` section of a configuration, if it has one."""
    import dsx_nvme as nvme

    if isinstance(config, (str, Path)):
        from dsx_zero.params.init_config import read_config  # lazy import: only files need it

        config = read_config(config)
    section = config.get("aio") if isinstance(config, Mapping) else None
    return None if section is None else nvme.AioConfig.from_dict(dict(section))
