"""`AsyncIOBuilder().load().aio_handle(...)`: the way scripts reach DeepNVMe.

Nothing is built: `load()` returns this package.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from . import cufile, native


class AsyncIOBuilder:
    """Accessor of `aio_handle`, `aio_read`, `aio_write`, `deepspeed_memcpy`."""

    NAME = "async_io"

    def load(self, verbose: bool = True) -> ModuleType:
        """The module with the handle classes."""
        return importlib.import_module("dsx_nvme")

    def is_compatible(self, verbose: bool = False) -> bool:
        """Always true: where no native engine runs, a thread pool serves. `verbose` writes which it is to stderr."""
        if verbose:
            sys.stderr.write(f"{self.NAME}: {native.reason() or 'native engines'}\n")
        return True

    def builder(self) -> AsyncIOBuilder:
        """Itself; there is nothing to build."""
        return self


class GDSBuilder(AsyncIOBuilder):
    """Accessor of `gds_handle`."""

    NAME = "gds"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether cuFile loads.

        Without it `load().gds_handle` goes through host memory. `verbose` writes the reason to stderr.
        """
        library, reason = cufile.load()
        if verbose:
            sys.stderr.write(f"{self.NAME}: {reason or 'cuFile'}\n")
        return library is not None
