"""Gantt charts of a step as SVG: one row per rank, one box per action. Planned and measured steps look the same.

SVG is text, so no library is needed. `png` needs Pillow (`pip install pillow`) and raises an error if it is missing.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from ..errors import PipelineError
from .action import Kind
from .simulate import Span, Timeline

# the colours differ in brightness too, so that readers without colour vision can tell them apart
_COLOURS = {Kind.FORWARD: "#4c78c8", Kind.BACKWARD: "#e8a33d", Kind.INPUT: "#5fb8a6", Kind.WEIGHT: "#d9d0b4"}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input backward",
    Kind.WEIGHT: "weight backward",
}
_LEFT, _TOP, _ROW, _GAP = 64, 34, 30, 6


def svg(timeline: Timeline, *, width: int = 1200) -> str:
    """The chart as SVG text.

    Args:
        timeline: from `simulate`, or measured (`Pipeline.report().measured`).
        width: width of the time axis in pixels.
    """
    height = _TOP + timeline.ranks * (_ROW + _GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + width + 20}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="13">{escape(_title(timeline))}</text>',
    ]
    for rank in range(timeline.ranks):
        parts.append(f'<text x="8" y="{_row_top(rank) + _ROW / 2 + 4:.1f}">rank {rank}</text>')
    for left, top, wide, span in _boxes(timeline, width):
        action = span.action
        parts.append(
            f'<rect x="{left:.2f}" y="{top:.1f}" width="{wide:.2f}" height="{_ROW}" fill="{_COLOURS[action.kind]}" '
            f'stroke="white" stroke-width="0.5"><title>{action}: {span.start:.6g} to {span.end:.6g} s</title></rect>'
        )
        if wide >= 14:
            label = f"{action.stage}:{action.micro_batch}" if _several_stages(timeline) else str(action.micro_batch)
            parts.append(
                f'<text x="{left + wide / 2:.2f}" y="{top + _ROW / 2 + 4:.1f}" text-anchor="middle">{label}</text>'
            )
    parts += [*_legend(timeline, height), "</svg>"]
    return "\n".join(parts) + "\n"


def save(timeline: Timeline, path: str | Path, *, width: int = 1200) -> None:
    """Write the chart to a file whose name ends in .svg or .png.

    Raises:
        PipelineError: the name has another ending, or it ends in .png and Pillow is not installed.
    """
    path = Path(path)
    if path.suffix.lower() == ".svg":
        path.write_text(svg(timeline, width=width))
    elif path.suffix.lower() == ".png":
        png(timeline, width=width).save(path)
    else:
        raise PipelineError(f"chart: got the file name {path.name!r}, expected one that ends in .svg or .png")


def png(timeline: Timeline, *, width: int = 1200) -> Any:
    """The chart as a `PIL.Image.Image`, without the legend of `svg`.

    Raises:
        PipelineError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise PipelineError("a PNG chart needs Pillow: pip install pillow, or write an .svg file") from None
    image = Image.new("RGB", (_LEFT + width + 20, _TOP + timeline.ranks * (_ROW + _GAP) + 40), "white")
    pen = ImageDraw.Draw(image)
    pen.text((_LEFT, 8), _title(timeline), fill="black")
    for rank in range(timeline.ranks):
        pen.text((8, _row_top(rank) + _ROW / 2 - 6), f"rank {rank}", fill="black")
    for left, top, wide, span in _boxes(timeline, width):
        pen.rectangle((left, top, left + wide, top + _ROW), fill=_COLOURS[span.action.kind], outline="white")
        if wide >= 14:
            pen.text((left + wide / 2 - 4, top + _ROW / 2 - 6), str(span.action.micro_batch), fill="black")
    return image


def _boxes(timeline: Timeline, width: int) -> list[tuple[float, float, float, Span]]:
    start = min((s.start for s in timeline.spans), default=0.0)
    scale = width / timeline.length if timeline.length else 0.0
    return [
        (_LEFT + (s.start - start) * scale, _row_top(s.rank), (s.end - s.start) * scale, s)
        for s in timeline.spans if s.action.kind.computes
    ]  # fmt: skip


def _row_top(rank: int) -> float:
    return _TOP + rank * (_ROW + _GAP)


def _several_stages(timeline: Timeline) -> bool:
    return any(s.action.stage >= timeline.ranks for s in timeline.spans)


def _title(timeline: Timeline) -> str:
    return f"{timeline.name}: step {timeline.length:.4g}, bubble {100 * timeline.bubble_share:.1f} %"


def _legend(timeline: Timeline, height: int) -> list[str]:
    used = [kind for kind in _COLOURS if any(s.action.kind is kind for s in timeline.spans)]
    parts = []
    for i, kind in enumerate(used):
        x = _LEFT + i * 150
        parts.append(f'<rect x="{x}" y="{height - 26}" width="14" height="14" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 20}" y="{height - 15}">{_NAMES[kind]}</text>')
    return parts
