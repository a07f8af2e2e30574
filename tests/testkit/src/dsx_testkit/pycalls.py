"""How many Python calls into our own files a piece of work makes, and how deep they nest.

On a device every such call is host time between two kernels. The count is exact and the same on every machine, so it
can be a test where a time cannot. `sys.setprofile` sees Python functions only; calls into C and torch are not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["CallCount", "count_calls"]


class CallCount:
    """What was counted: `total` calls, `depth` of the deepest, calls by function and by file."""

    def __init__(self) -> None:
        self.total = 0
        self.depth = 0
        self.functions: Counter[str] = Counter()
        self.files: Counter[str] = Counter()

    def table(self, most: int = 20) -> str:
        """The functions with the most calls, one per line."""
        rows = [f"{count:6d}  {name}" for name, count in self.functions.most_common(most)]
        return "\n".join([f"{self.total} calls in {len(self.files)} files, depth {self.depth}", *rows])


@contextmanager
def count_calls(*packages: str) -> Iterator[CallCount]:
    """Count calls of Python functions in files of the named import packages, on this thread.

    Args:
        packages: import names, for example "dsx_zero"; files anywhere below a folder of that name count.
    """
    found = CallCount()
    ours: dict[str, bool] = {}
    wanted = set(packages)
    depth = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        del argument
        if event not in ("call", "return"):
            return
        name = frame.f_code.co_filename
        inside = ours.get(name)
        if inside is None:
            inside = ours[name] = name != __file__ and not wanted.isdisjoint(Path(name).parts)
        if not inside:
            return
        if event == "return":
            depth -= 1
            return
        depth += 1
        found.total += 1
        found.depth = max(found.depth, depth)
        found.files[name] += 1
        found.functions[f"{Path(name).stem}.{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(before)
