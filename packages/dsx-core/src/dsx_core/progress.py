"""A progress bar on standard error for long work, without a dependency.

On a terminal one line is drawn repeatedly; otherwise (a log file) one line is written every half minute. A disabled
bar costs an addition per call.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

__all__ = ["Progress"]

_REDRAW_SECONDS = 0.2
_LINE_SECONDS = 30.0
_CELLS = 24


class Progress:
    """Counts work done and shows it.

    Args:
        total: amount of work, in `unit`.
        label: what is being done, a few words.
        unit: plural of what is counted; "bytes" are shown in GB.
        shown: False: count, but write nothing.
        stream: where to write; None: standard error.
    """

    def __init__(
        self, total: int, label: str, *, unit: str = "samples", shown: bool = True, stream: TextIO | None = None
    ) -> None:
        self.total, self.label, self.unit, self.done = total, label, unit, 0
        self._stream = sys.stderr if stream is None else stream
        self._shown = shown
        self._terminal = bool(getattr(self._stream, "isatty", lambda: False)())
        self._begin = time.monotonic()
        self._last = self._begin

    def add(self, amount: int) -> None:
        """Count `amount` more. Redraws the bar if the last drawing is old enough."""
        self.done += amount
        now = time.monotonic()
        if self._shown and now - self._last >= (_REDRAW_SECONDS if self._terminal else _LINE_SECONDS):
            self._last = now
            self._write(end="" if self._terminal else "\n")

    def reach(self, done: int, total: int) -> None:
        """Say that `done` of `total` are done, for work that counts itself."""
        self.total = total
        self.add(done - self.done)

    def line(self) -> str:
        """The bar as text: label, bar, fraction done, rate per second and the seconds that remain."""
        seconds = max(time.monotonic() - self._begin, 1e-9)
        share = min(1.0, self.done / self.total) if self.total else 1.0
        filled = round(share * _CELLS)
        rate = self.done / seconds
        left = f", {(self.total - self.done) / rate:.0f} s left" if 0 < self.done < self.total else ""
        bar = "#" * filled + "." * (_CELLS - filled)
        counts = f"{self.done}/{self.total} {self.unit}, {rate:.0f}/s"
        if self.unit == "bytes":
            counts = f"{self.done / 1e9:.2f}/{self.total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s"
        return f"{self.label} [{bar}] {share:4.0%} {counts}{left}"

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._write(end="\n")

    def _write(self, end: str) -> None:
        start = "\r\x1b[2K" if self._terminal else ""
        self._stream.write(f"{start}{self.line()}{end}")
        self._stream.flush()
