"""`AsyncIOBuilder().load().aio_handle(...)`: the way existing scripts get DeepNVMe's handles.

Nothing is built: `load()` returns this package.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from . import cufile, native


class AsyncIOBuilder:
    """Gives access to `aio_handle`, `aio_read`, `aio_write` and `deepspeed_memcpy`."""

    NAME = "async_io"

    def load(self, verbose: bool = True) -> ModuleType:
        """The module with the handle classes."""
        return importlib.import_module("dsx_nvme")

    def is_compatible(self, verbose: bool = False) -> bool:
        """Returns True: without a native engine a thread pool does the work. `verbose` writes to stderr which it is."""
        if verbose:
            sys.stderr.write(f"{self.NAME}: {native.reason() or 'native engines'}\n")
        return True

    def builder(self) -> AsyncIOBuilder:
        """Returns this object; there is nothing to build."""
        return self


class GDSBuilder(AsyncIOBuilder):
    """Gives access to `gds_handle`."""

    NAME = "gds"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether cuFile can be loaded.

        Without it `load().gds_handle` goes through host memory. `verbose` writes the reason to stderr.
        """
        library, reason = cufile.load()
        if verbose:
            sys.stderr.write(f"{self.NAME}: {reason or 'cuFile'}\n")
        return library is not None
