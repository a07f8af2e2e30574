"""The packages that dsx is made of: is each installed, in the version that belongs to this dsx?

dsx pins them exactly, so pip sees to it. A checkout in which some packages were updated, or an environment that was put
together by hand, ends here with a message instead of an error in the middle of training.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from ._version import DISTRIBUTION, __version__
from .errors import DsxError, in_checkout

__all__ = ["MissingPartError", "check_siblings", "needed_siblings"]


class MissingPartError(DsxError, ImportError):
    """A package of dsx is not installed, or its version does not belong to this version of dsx."""

    code = "DSX601"


def check_siblings() -> None:
    """Compare what is loaded or installed with what this dsx needs. Nothing is imported.

    Raises:
        MissingPartError: a package is missing, or has another version.
    """
    for distribution, wanted in needed_siblings().items():
        _check(distribution, wanted)


def needed_siblings() -> dict[str, str]:
    """Distribution -> version of what this dsx needs of us; empty where it is not installed but on the path."""
    try:
        needed = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return {}  # the imports tell what is missing
    found = (re.fullmatch(r"(dsx-[a-z-]+)==([\w.]+)", requirement) for requirement in needed)
    return {match[1]: match[2] for match in found if match}


def _check(distribution: str, wanted: str) -> None:
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        raise MissingPartError(
            f"dsx {__version__} needs {distribution}, which is not installed; {in_checkout(distribution)}"
        ) from None
    loaded = sys.modules.get(distribution.replace("-", "_"))
    installed = getattr(loaded, "__version__", installed)
    if installed != wanted:
        raise MissingPartError(
            f"dsx {__version__} needs {distribution} {wanted}, but {distribution} {installed} is"
            f" installed; {in_checkout(distribution)}"
        )
