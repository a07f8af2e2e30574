"""The modules `deepspeed` and `deepspeed.*`, made from the tables in `names`.

A module of this kind is empty when it is made. Its names are loaded on first use (`__getattr__`), so that importing
`deepspeed` loads neither pydantic nor any package of dsx. A value that is assigned to a module stays there, as in any
module, because some programs replace functions temporarily.

Every module counts as a package. Then `from deepspeed.x import name` asks the finder below for a submodule `name` if
the module has no such attribute. So the error for a name that dsx does not have can say what to use. `hasattr` is False
for such a name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from ._version import DEEPSPEED_VERSION
from .activation import mixed_files
from .errors import NotSupportedError, WrongDeepSpeedError
from .names import COMMANDS, MODULES
from .unsupported import UNSUPPORTED, UNSUPPORTED_MODULES

__all__ = ["take_over"]

ROOT = "deepspeed"


def take_over(name: str) -> None:
    """Fill the package `deepspeed` that is being imported, and provide its modules from now on.

    Raises:
        WrongDeepSpeedError: files of another DeepSpeed were written over ours.
    """
    if mixed := mixed_files():
        raise WrongDeepSpeedError(
            f"deepspeed: got {len(mixed)} files of another installation among dsx-compat's ({mixed[0]}, ...), expected"
            " none; run: pip uninstall -y deepspeed dsx-compat, then in the checkout of dsx: pip install --no-deps"
            " ./packages/dsx-compat"
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    package = sys.modules[name]
    vars(package).update(
        __version__=DEEPSPEED_VERSION,
        version=DEEPSPEED_VERSION,
        __version_major__=int(DEEPSPEED_VERSION.split(".")[0]),
        __version_minor__=int(DEEPSPEED_VERSION.split(".")[1]),
        __version_patch__=int(DEEPSPEED_VERSION.split(".")[2]),
        git_hash=None,
        git_branch=None,
        __git_hash__=None,
        __git_branch__=None,
    )
    _make_lazy(package)
    from . import parameters  # lazy import: it needs torch, and tools that only read the tables import this module

    parameters.attach()


class _Finder(MetaPathFinder):
    """Finds the modules `deepspeed.*`, and no others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{ROOT}."):
            return None
        if fullname in MODULES:
            return ModuleSpec(fullname, _Loader(), is_package=True)
        parent, _, name = fullname.rpartition(".")
        if name == "__main__" and parent in COMMANDS:
            return ModuleSpec(fullname, _Loader())
        reason = _unsupported_reason(fullname)
        if reason is not None:
            raise NotSupportedError(reason, name=fullname)
        if name in MODULES.get(parent, ()):
            resolve(MODULES[parent][name], fullname)  # it raises, else the attribute would have been found
        return None


class _Loader(Loader):
    """Makes one module from its table in `names`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"`{module.__name__}` over dsx; the table is in `dsx_compat.names`."
        _make_lazy(module)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code that `python -m deepspeed.x` runs. Python asks for `x.__main__`: every module is a package."""
        command = COMMANDS.get(fullname.removesuffix(".__main__"))
        if command is None:
            return None
        place, function = command.split(":")
        source = f"import sys\nfrom {place} import {function}\nsys.exit({function}())\n"
        return compile(source, f"<{fullname}>", "exec")


def _unsupported_reason(fullname: str) -> str | None:
    """Text that says what to use instead of a name that dsx does not have; None if the name is not in the tables."""
    parent, _, name = fullname.rpartition(".")
    reason = UNSUPPORTED.get(parent, {}).get(name)
    for prefix in sorted(UNSUPPORTED_MODULES, key=len):  # the longest that fits says it best
        if fullname == prefix or fullname.startswith(f"{prefix}."):
            reason = UNSUPPORTED_MODULES[prefix]
    return None if reason is None else f"{fullname}: dsx does not have it; {reason}"


def _make_lazy(module: ModuleType) -> None:
    """Give a module functions that find its names in the tables."""
    own = module.__name__
    names = MODULES[own]

    def find(name: str) -> Any:
        if name in names:
            try:
                value = resolve(names[name], f"{own}.{name}")
            except NotSupportedError as error:
                raise AttributeError(str(error), name=name, obj=module) from error
            setattr(module, name, value)
            return value
        if f"{own}.{name}" in MODULES:
            return importlib.import_module(f"{own}.{name}")
        reason = None if name.startswith("__") else _unsupported_reason(f"{own}.{name}")
        raise AttributeError(reason or f"module {own!r} has no attribute {name!r}", name=name, obj=module)

    def known() -> list[str]:
        children = {full[len(own) + 1 :] for full in MODULES if full.startswith(f"{own}.")}
        return sorted({*vars(module), *names, *(child for child in children if "." not in child)})

    vars(module).update(__getattr__=find, __dir__=known, __all__=[n for n in names if not n.startswith("_")])


def resolve(target: str, shown: str) -> Any:
    """The object that a table names: `module` or `module:attribute`.

    Raises:
        NotSupportedError: this version of dsx does not have it yet.
    """
    place, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(place)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith(("dsx", "deepspeed")):
            raise  # a library that the package of dsx needs is missing
        raise NotSupportedError(
            f"{shown}: needs {target.replace(':', '.')}, which this version of dsx does not have", name=shown
        ) from error
    return found
