"""Draws the difficulties of a dataset as SVG: a histogram, and the fraction of samples up to each value."""

from __future__ import annotations

from html import escape

import numpy as np

from ..errors import DataArgumentError

__all__ = ["difficulty_picture"]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 400, 70, 60, 50, 50


def difficulty_picture(values: np.ndarray, *, title: str, bins: int = 60) -> str:
    """Draw the distribution of a metric.

    Args:
        values: the value of each sample.
        title: heading of the picture.
        bins: bars of the histogram.

    Returns:
        The text of an SVG file. Bars are counts of samples (left axis); the line is the fraction of samples with at
        most that value (right axis). The line of text below has the quartiles.

    Raises:
        DataArgumentError: there are no values.
    """
    numbers = np.asarray(values).reshape(-1)
    if not numbers.size:
        raise DataArgumentError("difficulty_picture: got no values, expected one per sample")
    low, high = float(numbers.min()), float(numbers.max())
    counts, edges = np.histogram(numbers, bins=bins, range=(low, high if high > low else low + 1))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    most = int(counts.max())
    parts = [_text(_LEFT, 26, f"{title}: {numbers.size} samples", size=16, anchor="start")]
    step = width / bins
    for number, count in enumerate(counts.tolist()):
        tall = height * count / most
        parts.append(
            f'<rect x="{_LEFT + number * step:.1f}" y="{_TOP + height - tall:.1f}" width="{max(step - 1, 0.5):.1f}"'
            f' height="{tall:.1f}" fill="#4c78a8"><title>{edges[number]:g} to {edges[number + 1]:g}:'
            f" {count}</title></rect>"
        )
    share = np.cumsum(counts) / numbers.size
    points = [f"{_LEFT:.1f},{_TOP + height:.1f}"]
    points += [f"{_LEFT + (i + 1) * step:.1f},{_TOP + height * (1 - s):.1f}" for i, s in enumerate(share.tolist())]
    parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="#e45756" stroke-width="2"/>')
    parts += _axes(low, float(edges[-1]), most, width, height)
    quartiles = np.percentile(numbers, [25, 50, 75])
    text = f"quartiles {quartiles[0]:g}, {quartiles[1]:g}, {quartiles[2]:g}; greatest {high:g}"
    parts.append(_text(_LEFT + width / 2, _HEIGHT - 8, text))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' font-family="sans-serif">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _axes(low: float, high: float, most: int, width: float, height: float) -> list[str]:
    lines = [f'<path d="M{_LEFT} {_TOP}v{height}h{width}v-{height}" fill="none" stroke="black"/>']
    for value in _ticks(low, high):
        x = _LEFT + width * (value - low) / (high - low)
        lines.append(_text(x, _TOP + height + 18, f"{value:g}"))
    for value in _ticks(0, most):
        lines.append(_text(_LEFT - 8, _TOP + height * (1 - value / most) + 4, f"{value:g}", anchor="end"))
    lines.append(_text(_LEFT, _TOP - 8, "samples", anchor="start", colour="#4c78a8"))
    lines.append(_text(_LEFT + width, _TOP - 8, "samples up to here", anchor="end", colour="#e45756"))
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + height * (1 - fraction)
        lines.append(_text(_LEFT + width + 8, y + 4, f"{fraction:.0%}", anchor="start", colour="#e45756"))
    return lines


def _ticks(low: float, high: float) -> list[float]:
    """About five values from `low` to `high`; whole numbers where the range is more than a few."""
    found = [low + (high - low) * fraction for fraction in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return [float(round(value)) for value in found] if high - low >= 4 and low == int(low) else found


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "middle", colour: str = "black") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
    )
