"""Curves over one axis as an SVG file with the palettes of `dsx_monitor.picture`: what a schedule does over the steps.

The pages that need one show how numbers of a schedule or a formula go, which neither a plan nor the trace of a run has.
Left out: interaction and thinning, which the report of a run has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from dsx_monitor.picture import WIDTH

LEFT, RIGHT, TOP, PLOT, LOW = 64, 20, 78, 230, 46
COLOURS = (  # on light and on dark ground
    ("#2a78d6", "#62a4f0"), ("#b36b00", "#e5a64a"), ("#1a9a6c", "#4cc795"), ("#c2456b", "#ee8aa8"),
    ("#8256c9", "#b493ec"),
)  # fmt: skip
DASHES = ("", "8 4", "2 3", "10 3 2 3", "4 4")  # told apart without colours, too


class Curve(NamedTuple):
    """A name, and points (x, y) with rising x. `dots`: the points alone, without a line between them."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def curve_picture(title: str, across: str, up: str, curves: Sequence[Curve]) -> str:
    """Draw curves; `across` and `up` name the axes with their units. The vertical axis begins at 0."""
    low, high = (choose(x for curve in curves for x, _ in curve.points) for choose in (min, max))
    step_x, step_y = tick(high - low), tick(max(y for curve in curves for _, y in curve.points))
    top = step_y * math.ceil(max(y for curve in curves for _, y in curve.points) / step_y - 1e-9)
    height, base = TOP + PLOT + LOW, TOP + PLOT

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT), base - y / top * PLOT

    body = [f'<text x="10" y="20" font-weight="600">{escape(title)}</text>']
    for number in range(round(top / step_y) + 1):
        y = at(low, number * step_y)[1]
        body.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number * step_y:g}</text>')
    for number in range(math.ceil(low / step_x), math.floor(high / step_x) + 1):
        x = at(number * step_x, 0)[0]
        body.append(f'<text x="{x:.1f}" y="{base + 18}" text-anchor="middle">{number * step_x:g}</text>')
    body.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    body.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{base + 38}" text-anchor="middle">{escape(across)}</text>')
    body.append(f'<text x="10" y="{TOP - 12}">{escape(up)}</text>')
    body += [line for number, curve in enumerate(curves) for line in _curve(curve, number, at)]
    body += _key(curves)
    return "\n".join([_head(title, height, len(curves)), *body, "</svg>"]) + "\n"


def tick(span: float) -> float:
    """A round number that about five of cover the span."""
    power = 10 ** math.floor(math.log10(span / 5))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= span / 5 * 0.999)


def _head(title: str, height: int, count: int) -> str:
    def palette(dark: int) -> str:
        return "".join(f".c{n}{{stroke:{COLOURS[n][dark]}}}.d{n}{{fill:{COLOURS[n][dark]}}}" for n in range(count))

    style = (
        "text{font:13px system-ui,sans-serif;fill:#222} .axis{stroke:#999} .grid{stroke:#e4e7ea}"
        f" polyline{{fill:none;stroke-width:2}} {palette(0)}\n@media (prefers-color-scheme: dark)"
        f"{{text{{fill:#e6e6e6}} .axis{{stroke:#777}} .grid{{stroke:#363b41}} {palette(1)}}}"
    )
    said = f'role="img" aria-label="{escape(title)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {said}>\n<style>{style}</style>'


def _curve(curve: Curve, number: int, at) -> list[str]:
    places = [at(x, y) for x, y in curve.points]
    if curve.dots:
        return [f'<circle class="d{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    title = f"<title>{escape(curve.name)}</title>"
    return [f'<polyline class="c{number}" stroke-dasharray="{DASHES[number]}" points="{points}">{title}</polyline>']


def _key(curves: Sequence[Curve]) -> list[str]:
    lines, x, y = [], 10.0, 40
    for number, curve in enumerate(curves):
        if curve.dots:
            lines.append(f'<circle class="d{number}" cx="{x + 12:.0f}" cy="{y}" r="3"/>')
        else:
            dash = f'stroke-dasharray="{DASHES[number]}"'
            lines.append(f'<polyline class="c{number}" {dash} points="{x:.0f},{y} {x + 26:.0f},{y}"/>')
        lines.append(f'<text x="{x + 32:.0f}" y="{y + 4}">{escape(curve.name)}</text>')
        x += 60 + 7 * len(curve.name)
    return lines
