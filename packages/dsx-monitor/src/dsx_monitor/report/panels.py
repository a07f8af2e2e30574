"""Groups curves into charts, with titles, units and an order. The input and the result are plain data.

A run directory may hold several runs. Where the steps of a curve go back because the run was started again, the rest is
a curve of its own, named after its start. Areas of two starts would hide each other, so that a stack has a chart for
each start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .curve import Curve
from .read import RunData

__all__ = ["Panel", "panels_of"]


@dataclass
class Panel:
    """One chart.

    Attributes:
        title, unit: the quantity that is drawn, and its unit.
        series: `{"name", "start", "x", "y", "t"}` per curve; y is null where the value was not finite; `line` is true
            for a curve that is drawn over a stack and is not a part of it.
        log: whether the y axis may be logarithmic (all values positive and far apart).
        stacked: whether the curves of one start are parts of a sum, to be drawn as areas on each other.
        main: whether the chart is at the top; the others are folded under "more".
    """

    title: str
    unit: str
    series: list[dict[str, Any]] = field(default_factory=list)
    log: bool = False
    stacked: bool = False
    main: bool = True


Runs = list[tuple[int, Curve]]
"""The pieces of a curve, each with the number of its start."""

# Charts known by name: title, unit, ends of labels (without the part before the last slash) and name in the legend.
_KNOWN = (
    ("Loss", "", (("train_loss", "training"), ("val_loss", "validation"))),
    ("Bits per byte", "", (("bits_per_byte", "validation"), ("train_bits_per_byte", "training"))),
    ("Throughput", "tokens/s", (("tokens_per_second", "all ranks"),)),
    ("Throughput", "samples/s", (("samples_per_second", "all ranks"),)),
    ("Learning rate", "", (("lr", "group 0"),)),
    ("Gradient norm", "", (("grad_norm", "before clipping"),)),
    ("Loss scale", "", (("loss_scale", "scale"),)),
    ("Compute", "TFLOPS", (("tflops", "all ranks"),)),
    ("Gradient noise scale", "samples", (("gradient_noise_scale", "estimate"),)),
    ("Sent to other ranks", "bytes per step, rank 0", (("bytes_communicated", "rank 0"),)),
)
# Charts of all curves of a group: title, unit, beginning of labels, factor, whether they are parts of a sum.
_GROUPS = (
    ("Memory by class", "MiB, rank 0", "Train/Memory/", 2**-20, True),
    ("Largest curvature of each block", "relative", "Train/Eigenvalues/", 1.0, False),
)
_SUMS = ("total",)
"""Curves of a stacked chart that are the sum of others."""
_TIMES = "elapsed_time_ms_"
_PARTS_OF_BACKWARD = {"backward_inner", "backward_allreduce"}
_MOST_POINTS = 2000


def panels_of(data: RunData) -> list[Panel]:
    """The charts of a run, in the order in which they are shown."""
    left = {label: pieces.runs for label, pieces in data.curves.items()}
    panels = [panel for known in _KNOWN if (panel := _known(left, *known)) is not None]
    if any(panel.unit == "tokens/s" for panel in panels):
        panels = [panel for panel in panels if panel.unit != "samples/s"]  # the same curve in another unit
    panels += _memory(data)
    panels += [panel for group in _GROUPS for panel in _group(left, *group)]
    panels += _times(left)
    panels += [Panel(label, "", _series(runs, _last(label)), main=False) for label, runs in sorted(left.items())]
    return panels


def _last(label: str) -> str:
    return label.rsplit("/", 1)[-1]


def _named(label: str, name: str) -> bool:
    """Whether the last part of a label, or of the file name that the CSV writer made of it, is `name`."""
    return _last(label) == name or label.endswith(f"Samples_{name}")


def _known(left: dict[str, Runs], title: str, unit: str, names: tuple[tuple[str, str], ...]) -> Panel | None:
    series = []
    for name, shown in names:
        for label in [label for label in left if _named(label, name)]:
            series += _series(left.pop(label), shown)
    return Panel(title, unit, series, log=title == "Loss scale") if series else None


def _group(left: dict[str, Runs], title: str, unit: str, start: str, scale: float, stacked: bool) -> list[Panel]:
    # The CSV writer's file names have "_" for "/".
    named = {label[len(start) :]: label for label in left if label.startswith((start, start.replace("/", "_")))}
    if stacked:
        return _stacks(title, unit, {name: left.pop(label) for name, label in named.items()}, scale)
    series = [one for name, label in named.items() for one in _series(left.pop(label), name, scale)]
    return [Panel(title, unit, series)] if series else []


def _times(left: dict[str, Runs]) -> list[Panel]:
    """The phases of a step on each other. `backward` is left out where its two parts are there."""
    timed = {_last(label)[len(_TIMES) :]: left.pop(label) for label in list(left) if _last(label).startswith(_TIMES)}
    if timed.keys() >= _PARTS_OF_BACKWARD:
        timed.pop("backward", None)
    return _stacks("Time of a step", "ms", timed)


def _stacks(title: str, unit: str, parts: dict[str, Runs], scale: float = 1.0) -> list[Panel]:
    """A chart of parts of a sum for each start of the run that has any."""
    panels = []
    starts = sorted({start for runs in parts.values() for start, _ in runs})
    for start in starts:
        series = [
            {**_piece(curve, name, start, scale), **({"line": True} if name in _SUMS else {})}
            for name, runs in parts.items()
            for number, curve in runs
            if number == start
        ]
        panels.append(Panel(title if len(starts) == 1 else f"{title}, start {start}", unit, series, stacked=True))
    return panels


def _memory(data: RunData) -> list[Panel]:
    """One chart per kind of memory, one curve per rank; device memory only if there is any."""
    shown = (
        ("Memory of each process", "pss", "rss"),
        ("Device memory, allocated", "cuda_allocated", None),
        ("Device memory, reserved", "cuda_reserved", None),
    )
    panels = []
    for title, name, instead in shown:
        chosen = name if any(name in curves for curves in data.memory.values()) else instead
        series = [
            one
            for rank, curves in sorted(data.memory.items())
            if chosen in curves and any(any(curve.values) for _, curve in curves[chosen].runs)
            for one in _series(curves[chosen].runs, f"rank {rank}", scale=2**-20)
        ]
        if series:
            note = {"pss": "MiB, proportional share (PSS)", "rss": "MiB, resident (RSS)"}.get(str(chosen), "MiB")
            panels.append(Panel(title, note, series))
    return panels


def _series(runs: Runs, name: str, scale: float = 1.0) -> list[dict[str, Any]]:
    """The pieces of a curve as JSON."""
    one = len(runs) == 1
    return [_piece(curve, name if one else f"{name}, start {start}", start, scale) for start, curve in runs]


def _piece(curve: Curve, name: str, start: int, scale: float) -> dict[str, Any]:
    """A curve as JSON. A long curve is thinned: of each stretch the lowest and the highest point are kept."""
    points = curve.thinned(_MOST_POINTS)
    return {
        "name": name,
        "label": curve.label,
        "start": start,
        "x": [curve.steps[i] for i in points],
        "y": [_number(curve.values[i] * scale) for i in points],
        "t": [round(curve.times[i], 1) for i in points] if len(curve.times) == len(curve.steps) else [],
    }


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
