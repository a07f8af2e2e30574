"""The picture of `dsx bench comm`: an SVG file, made without a plotting library.

One panel per operation. Time over message size, both logarithmic, one line per backend and a dashed one for what the
memory allows; an operation that has one size only (a barrier has none) is drawn as bars. All panels have the same time
axis, so that operations compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Protocol

WIDTH, HEIGHT, COLUMNS = 340, 250, 3  # of a panel, in pixels; panels in a row
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 46  # margins of a panel, for its ticks and labels
HEAD = 64  # title and legend
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by the colour-blind too
GREY, LIGHT = "#555", "#ddd"


class Row(Protocol):
    """One operation at one size: milliseconds by backend, and of the floor (0: none)."""

    @property
    def op(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def times(self) -> dict[str, float]: ...
    @property
    def floor(self) -> float: ...


def plot(rows: Sequence[Row], subtitle: str = "") -> str:
    """The SVG text. `rows` have the same backends; `subtitle` says how they were measured."""
    names = list(rows[0].times)
    panels = {
        op: sorted((r for r in rows if r.op == op), key=lambda r: r.nbytes) for op in dict.fromkeys(r.op for r in rows)
    }
    axis = TimeAxis.around(t for row in rows for t in row.times.values())
    columns = min(COLUMNS, len(panels))
    width, height = max(520, columns * WIDTH), HEAD + ceil(len(panels) / columns) * HEIGHT
    parts = [
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(12, 22, f"Time of a collective, {rows[0].ranks} ranks", size=15, weight="bold"),
        _text(12, 40, subtitle, colour=GREY),
        *_legend(names, any(map(has_floor, rows))),
    ]
    for number, (op, found) in enumerate(panels.items()):
        place = Panel(number % columns * WIDTH, HEAD + number // columns * HEIGHT, axis)
        one_size = op == "barrier" or len(found) == 1
        parts += place.frame(op)
        parts += place.bars(found[0], names, op != "barrier") if one_size else place.lines(found, names)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'{head} font-family="sans-serif" font-size="11">\n' + "\n".join(parts) + "\n</svg>\n"


@dataclass(frozen=True)
class TimeAxis:
    """Milliseconds on a logarithmic axis between two whole decades."""

    low: int
    high: int

    @classmethod
    def around(cls, values: Iterable[float]) -> TimeAxis:
        """The decades that hold all values."""
        logs = [log10(max(value, 1e-6)) for value in values]
        low, high = floor(min(logs)), ceil(max(logs))
        return cls(low, max(high, low + 1))

    def share(self, ms: float) -> float:
        """The height of a time on the axis, 0 to 1."""
        return min(1.0, max(0.0, (log10(max(ms, 1e-6)) - self.low) / (self.high - self.low)))

    def ticks(self) -> list[float]:
        """Times that get a line and a label."""
        decades = range(self.low, self.high + 1)
        steps = (1, 2, 5) if len(decades) <= 3 else (1,)
        return [step * 10.0**decade for decade in decades for step in steps if step == 1 or decade < self.high]


@dataclass(frozen=True)
class Panel:
    """The place of one operation: its corner at (x, y)."""

    x: float
    y: float
    axis: TimeAxis

    def frame(self, op: str) -> list[str]:
        """Title, time axis and grid."""
        left, right = self.x + LEFT, self.x + WIDTH - RIGHT
        parts = [_text(left, self.y + 20, op, size=12, weight="bold")]
        for tick in self.axis.ticks():
            at = self._height(tick)
            parts.append(f'<line x1="{left}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="{LIGHT}"/>')
            parts.append(_text(left - 6, at + 4, time_text(tick), anchor="end", size=10))
        middle = self.y + (TOP + HEIGHT - BOTTOM) / 2
        turned = f'transform="rotate(-90 {self.x + 12} {middle})"'
        parts.append(_text(self.x + 12, middle, "time per call", anchor="middle", colour=GREY, size=10, extra=turned))
        box = f'x="{left}" y="{self.y + TOP}" width="{right - left}" height="{HEIGHT - TOP - BOTTOM}"'
        return [*parts, f'<rect {box} fill="none" stroke="{GREY}"/>']

    def lines(self, rows: Sequence[Row], names: Sequence[str]) -> list[str]:
        """Times over sizes."""
        low, high = log10(rows[0].nbytes), log10(rows[-1].nbytes)
        span = WIDTH - LEFT - RIGHT - 24

        def across(row: Row) -> float:
            return self.x + LEFT + 12 + (log10(row.nbytes) - low) / (high - low or 1.0) * span

        parts = []
        foot = self.y + HEIGHT - BOTTOM
        for row in spread(rows, 5):
            at = across(row)
            parts.append(f'<line x1="{at:.1f}" y1="{foot}" x2="{at:.1f}" y2="{foot + 4}" stroke="{GREY}"/>')
            parts.append(_text(at, foot + 16, size_text(row.nbytes), anchor="middle", size=10))
        parts.append(
            _text(
                self.x + LEFT + 12 + span / 2,
                foot + 32,
                "bytes of the larger side",
                anchor="middle",
                colour=GREY,
                size=10,
            )
        )
        floors = [(across(r), self._height(r.floor)) for r in rows if has_floor(r) and r.floor >= 10.0**self.axis.low]
        if len(floors) == 1:
            ((at, up),) = floors
            floors = [(at - 12, up), (at + 12, up)]
        if floors:
            parts.append(f'<polyline points="{_points(floors)}" fill="none" stroke="{GREY}" stroke-dasharray="4 3"/>')
        for number, name in enumerate(names):
            found = [(across(row), self._height(row.times[name])) for row in rows]
            colour = COLOURS[number % len(COLOURS)]
            parts.append(f'<polyline points="{_points(found)}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts += [_marker(at, up, number) for at, up in found]
        return parts

    def bars(self, row: Row, names: Sequence[str], sized: bool) -> list[str]:
        """Times of one size, a bar for each backend with its time above."""
        foot, span = self.y + HEIGHT - BOTTOM, WIDTH - LEFT - RIGHT
        step = span / len(names)
        parts = []
        for number, name in enumerate(names):
            top, middle = self._height(row.times[name]), self.x + LEFT + (number + 0.5) * step
            box = f'x="{middle - step / 4:.1f}" y="{top:.1f}" width="{step / 2:.1f}" height="{foot - top:.1f}"'
            parts.append(f'<rect {box} fill="{COLOURS[number % len(COLOURS)]}"/>')
            parts.append(
                _text(middle, max(top - 4, self.y + TOP + 11), time_text(row.times[name]), anchor="middle", size=10)
            )
            parts.append(_text(middle, foot + 16, name, anchor="middle", size=10))
        if has_floor(row):
            left, up = self.x + LEFT, self._height(row.floor)
            ends = f'x1="{left}" y1="{up:.1f}" x2="{left + span}" y2="{up:.1f}"'
            parts.append(f'<line {ends} stroke="{GREY}" stroke-dasharray="4 3"/>')
        if sized:
            parts.append(
                _text(self.x + LEFT + span / 2, foot + 32, size_text(row.nbytes), anchor="middle", colour=GREY, size=10)
            )
        return parts

    def _height(self, ms: float) -> float:
        return self.y + HEIGHT - BOTTOM - self.axis.share(ms) * (HEIGHT - TOP - BOTTOM)


def has_floor(row: Row) -> bool:
    """Whether the floor says something: small messages never leave the caches."""
    return row.floor > 0 and row.nbytes >= 1 << 20


def spread(rows: Sequence[Row], most: int) -> list[Row]:
    """At most `most` of the rows, the first and the last among them: labels need room."""
    if len(rows) <= most:
        return list(rows)
    places = {round(number * (len(rows) - 1) / (most - 1)) for number in range(most)}
    return [rows[place] for place in sorted(places)]


def time_text(ms: float) -> str:
    """ "25 µs", "1.5 ms", "2 s"."""
    for factor, unit in ((1e-3, "µs"), (1.0, "ms"), (1e3, "s")):
        if ms < 999.5 * factor or unit == "s":
            return f"{ms / factor:.3g} {unit}"
    return ""


def size_text(nbytes: float) -> str:
    """ "64 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return ""


def _legend(names: Sequence[str], floor_drawn: bool) -> list[str]:
    parts, at = [], 12.0
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<line x1="{at}" y1="54" x2="{at + 24}" y2="54" stroke="{colour}" stroke-width="2"/>')
        parts += [_marker(at + 12, 54, number), _text(at + 30, 58, name)]
        at += 48 + 7 * len(name)
    if floor_drawn:
        parts.append(f'<line x1="{at}" y1="54" x2="{at + 24}" y2="54" stroke="{GREY}" stroke-dasharray="4 3"/>')
        parts.append(_text(at + 30, 58, "what the memory allows"))
    return parts


def _points(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _marker(x: float, y: float, number: int) -> str:
    """Each backend has a shape of its own, for prints without colour."""
    fill = f'fill="{COLOURS[number % len(COLOURS)]}"'
    if number % 3 == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" {fill}/>'
    if number % 3 == 1:
        return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" {fill}/>'
    return f'<polygon points="{_points([(x, y - 4), (x + 4, y + 3), (x - 4, y + 3)])}" {fill}/>'


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    size: int = 11,
    weight: str = "normal",
    colour: str = "black",
    extra: str = "",
) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style} {extra}>{escape(words)}</text>'
