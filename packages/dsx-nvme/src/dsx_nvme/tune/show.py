"""Output for people: a progress bar on stderr, bars of text, and a picture as SVG, without a plotting library."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TextIO

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str | int) -> int:
    """The number of bytes that "400M", "1G" or 4096 stand for. Raises ValueError."""
    if isinstance(text, int):
        return text
    word = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = word[-1:] if word[-1:] in UNITS and word[-1:] else ""
    number = float(word[: len(word) - len(unit)])
    if number <= 0 or number * UNITS[unit] != int(number * UNITS[unit]):
        raise ValueError(f"size {text!r}: expected a positive number of bytes, as 4096, 400M or 1G")
    return int(number * UNITS[unit])


def parse_count(text: str) -> int:
    """A whole number of at least 1. Raises ValueError."""
    number = int(text)
    if number < 1:
        raise ValueError(f"got {text}, expected a whole number of at least 1")
    return number


def size_text(nbytes: int) -> str:
    """ "1M" for 1048576."""
    for unit in ("T", "G", "M", "K"):
        if nbytes % UNITS[unit] == 0 and nbytes:
            return f"{nbytes // UNITS[unit]}{unit}"
    return str(nbytes)


@dataclass
class Progress:
    """A bar that redraws itself on a terminal. Elsewhere only its last line is written."""

    title: str
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    width: int = 28
    started: float = field(default_factory=time.perf_counter)

    def update(self, part: float, note: str = "") -> None:
        """Show that `part` (0 to 1) is done."""
        if not self.stream.isatty():
            return
        done = round(max(0.0, min(1.0, part)) * self.width)
        seconds = time.perf_counter() - self.started
        bar = "#" * done + "." * (self.width - done)
        self.stream.write(f"\r{self.title} [{bar}] {part:4.0%} {seconds:3.0f} s  {note:.60}\x1b[K")
        self.stream.flush()

    def finish(self, note: str = "") -> None:
        """End the line."""
        end = "\r\x1b[K" if self.stream.isatty() else ""
        self.stream.write(f"{end}{self.title}: {time.perf_counter() - self.started:.1f} s {note}\n")


def text_bars(rows: Sequence[tuple[str, float]], unit: str, width: int = 40) -> str:
    """Horizontal bars, one line a row."""
    most = max((value for _, value in rows), default=0.0) or 1.0
    names = max((len(name) for name, _ in rows), default=0)
    return "\n".join(
        f"{name:{names}} {'█' * max(1, round(value / most * width)):{width}} {value:.2f} {unit}" for name, value in rows
    )


def svg_bars(title: str, groups: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str) -> str:
    """A picture: per group (label, [(series, value), ...]) one bar per series."""
    colors = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0"]
    series = list(dict.fromkeys(name for _, bars in groups for name, _ in bars))
    most = max((value for _, bars in groups for _, value in bars), default=0.0) or 1.0
    row, left, wide = 16, 330, 420
    lines, y = [f'<text x="10" y="22" font-size="15" font-weight="bold">{escape(title)}</text>'], 40
    for number, name in enumerate(series):
        x = left + number * 110
        lines.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colors[number % 4]}"/>')
        lines.append(f'<text x="{x + 14}" y="{y}">{escape(name)}</text>')
    y += 12
    for label, bars in groups:
        middle = y + row * len(bars) / 2 + 4
        lines.append(f'<text x="{left - 8}" y="{middle}" text-anchor="end">{escape(label)}</text>')
        for name, value in bars:
            length, color = value / most * wide, colors[series.index(name) % 4]
            lines.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{row - 3}" fill="{color}"/>')
            lines.append(f'<text x="{left + length + 5:.1f}" y="{y + row - 5}">{value:.2f} {escape(unit)}</text>')
            y += row
        y += 7
    size = f'width="860" height="{y + 10}" font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>\n"])
