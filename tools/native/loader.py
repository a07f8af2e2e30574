"""Finds a compiled module of a package at its first use, and keeps the reason when there is none.

The one source is `tools/native/loader.py` of the repository; the build puts a copy into every package with native code,
as `_native_loader.py`, because no package of ours lies below all of them. Change the source, not a copy.

Importing never fails and prints nothing. What keeps a module from running (not built, another interface, switched off,
a machine that it is not for) is a sentence in `reason`, never an error; only a misspelt `DSX_ISA` also warns.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

REBUILD = (
    "install a C++ compiler (g++ or clang++) and reinstall: pip install --no-cache-dir --force-reinstall --no-deps "
    "./packages/{} in the checkout of dsx (a wheel built without a compiler may be in pip's cache)"
)


def nothing_to_say(*_: Any) -> str:
    """A check that always passes."""
    return ""


class NativeLoader:
    """One compiled module, `name` as in "dsx_ops._C", or the reason why there is none.

    `abi`: what the module's `ABI` must be. `unfit()`: why this machine cannot run it, asked before the import;
    `refuse(module)`: asked after it; "" passes. `hint`: what to do when the module is missing. `DSX_<PACKAGE>_NATIVE=0`
    switches it off.
    """

    def __init__(
        self,
        name: str,
        abi: int,
        unfit: Callable[[], str] = nothing_to_say,
        refuse: Callable[[Any], str] = nothing_to_say,
        hint: str = "",
    ) -> None:
        package = name.partition(".")[0]
        self.name, self.abi, self._unfit, self._refuse = name, abi, unfit, refuse
        self.project = package.replace("_", "-")
        self.switch = f"{package.upper()}_NATIVE"
        self.hint = hint or REBUILD.format(self.project)
        self.reason = ""
        self._module: Any = None
        self._looked = False
        self._lock = threading.Lock()
        self._disabled = 0
        self._warned = False

    def module(self) -> Any:
        """The compiled module, or None. Looked for once; several threads may ask."""
        if not self._looked:
            with self._lock:
                if not self._looked:
                    self._module, self.reason = self._find()
                    self._looked = True
        return None if self._disabled else self._module

    def why_not(self) -> str:
        """The reason that `module()` is None; "" when the module is there."""
        if self.module() is not None:
            return ""
        return self.reason or "switched off by reference_only()"

    def _find(self) -> tuple[Any, str]:
        if os.environ.get(self.switch, "1") == "0":
            return None, f"switched off by {self.switch}=0"
        reason = self._unfit()
        if reason:
            return None, reason
        try:
            module = importlib.import_module(self.name)
        except ModuleNotFoundError:
            return None, f"the compiled module {self.name} is not installed; {self.hint}"
        except ImportError as error:
            return None, f"the compiled module {self.name} does not load ({error}); {self.hint}"
        if self.abi != module.ABI:
            return None, f"{self.name} has interface {module.ABI}, expected {self.abi}: reinstall {self.project}"
        reason = self._refuse(module) or self._wrong_isa(module)
        return (None, reason) if reason else (module, "")

    def _wrong_isa(self, module: Any) -> str:
        """The reason that the instruction set DSX_ISA names cannot be used; "" if it can, or if none can be chosen."""
        if not hasattr(module, "isa"):
            return ""
        try:
            module.isa()
        except ValueError as error:
            reason = f"DSX_ISA={os.environ.get('DSX_ISA')!r}: {error}"
            text = f"{self.project} runs without native code: {reason} [DSX653] docs: dsx explain DSX653"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return reason
        return ""

    def warn_once(self, text: str) -> None:
        """One RuntimeWarning per process about work on the slow path, to the caller's caller."""
        if self._warned or self._disabled:
            return
        self._warned = True
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    @property
    def disabled(self) -> bool:
        """Whether `reference_only()` holds right now."""
        return self._disabled > 0

    @contextlib.contextmanager
    def reference_only(self) -> Iterator[None]:
        """Within this context there is no module: the PyTorch reference serves (to compare the two)."""
        self._disabled += 1
        try:
            yield
        finally:
            self._disabled -= 1
