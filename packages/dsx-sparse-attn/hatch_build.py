"""Finds the shared build hook: the sdist's own copy first, then the repository's."""

import sys
from pathlib import Path

here = Path(__file__).resolve().parent
for place in (here / "_build_support", here.parent.parent / "tools"):
    if (place / "dsx_build.py").is_file():
        sys.path.insert(0, str(place))
        break
from dsx_build import DsxNativeHook as _Hook  # noqa: E402


class Hook(_Hook):
    """The hook, under a name of this file."""


def get_build_hook() -> type[Hook]:
    """Needed because two hook classes are visible here."""
    return Hook
