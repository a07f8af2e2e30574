"""The course of a search as one SVG file: what each experiment came to, what was expected, and the best so far.

Self-contained (no script, no font, no network), readable on light and dark backgrounds, and scaled by its viewer.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from .results import UNITS, Result, metric_text

__all__ = ["svg"]

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 60
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f; } .axis { stroke: #57606a; } .grid { stroke: #d0d7de; }
.best { fill: none; stroke: #1a7f37; stroke-width: 2; } .measured { fill: #0969da; }
.failed { stroke: #cf222e; stroke-width: 2; }
.predicted { fill: none; stroke: #0969da; stroke-width: 1.5; } .ground { fill: #ffffff; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .axis { stroke: #8b949e; } .grid { stroke: #30363d; }
.best { stroke: #3fb950; } .measured { fill: #58a6ff; } .failed { stroke: #f85149; } .predicted { stroke: #58a6ff; }
.ground { fill: #0d1117; } }
"""


def svg(result: Result) -> str:
    """The picture of a result with at least one row."""
    values = [result.value(row) for row in result.rows]
    predicted = [result.expected(row) for row in result.rows]
    top = 1.08 * max([*filter(None, values), *filter(None, predicted)], default=1.0)

    def x(index: int) -> float:
        return _LEFT + (index + 0.5) * (_WIDTH - _LEFT - _RIGHT) / len(result.rows)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_frame(result, top, y)]
    course = _best_so_far(values, smaller=result.metric == "latency")
    points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(course) if value is not None)
    parts.append(f'<polyline class="best" points="{points}"/>')
    for index, (row, value, expected) in enumerate(zip(result.rows, values, predicted)):
        said = f"{row.name}: {metric_text(value)} {UNITS[result.metric]}" if value is not None else row.outcome.reason
        title = f"<title>{escape(said)}, predicted {metric_text(expected)}</title>"
        if expected is not None:
            parts.append(f'<circle class="predicted" cx="{x(index):.1f}" cy="{y(expected):.1f}" r="6">{title}</circle>')
        if value is not None:
            parts.append(f'<circle class="measured" cx="{x(index):.1f}" cy="{y(value):.1f}" r="4">{title}</circle>')
        else:
            left, base = x(index) - 5, _HEIGHT - _BOTTOM - 5
            parts.append(f'<path class="failed" d="M{left:.1f} {base - 5} l10 10 m0 -10 l-10 10">{title}</path>')
        parts.append(f'<text x="{x(index):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{index + 1}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="course of the search"><style>{_STYLE}</style>' + "".join(parts) + "</svg>\n"
    )


def _frame(result: Result, top: float, y) -> str:
    """Background, title, axes and lines of equal value."""
    low, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [f'<rect class="ground" width="{_WIDTH}" height="{_HEIGHT}"/>']
    best = result.best
    ending = "" if best is None else f"; best: {best.name}, {metric_text(result.value(best))}"
    title = f"{result.metric} ({UNITS[result.metric]}){ending}"
    parts.append(f'<text x="{_LEFT}" y="22">{escape(title)}</text>')
    for part in range(5):
        value = top * part / 4
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{metric_text(value)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{low}" y2="{low}"/>')
    legend = "experiment (dot: measured, ring: predicted, line: best so far, cross: failed)"
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 14}">{legend}</text>')
    return "".join(parts)


def _best_so_far(values: list[float | None], *, smaller: bool) -> list[float | None]:
    course: list[float | None] = []
    best: float | None = None
    for value in values:
        if value is not None and (best is None or (value < best if smaller else value > best)):
            best = value
        course.append(best)
    return course
