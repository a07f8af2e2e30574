"""The size at which a job fills its memory, found with few plans for each of many settings.

A size is the tokens of a sequence (`lengths.py`) or the blocks of a model (`sizes.py`). Memory over size is close to a
straight line, on the device and on the host. So a line through two plans leads near the end, and a few more plans find
it. The table and the picture show each setting that was tried.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from .answer import RESERVE
from .errors import PlanError, explains_itself
from .ledger import DISK, HOST
from .plans import Plan
from .text import bytes_text

__all__ = ["Reach", "Reached", "Setting", "climb", "described", "device_bytes", "ladder", "memory_picture", "speed"]

AGAIN = "recomputation"
_INPUTS = "activation_checkpointing.cpu_checkpointing"
_ZERO = "zero_optimization."
_CLOSE = 0.02
"""The answer is at most so much smaller than what fits."""
_MOST_PLANS = 14


@dataclass
class Reach:
    """The largest size that fits with one setting.

    Attributes:
        what: the setting in words.
        values: what it changes in the configuration, by dotted path.
        recompute: the model recomputes its blocks.
        size: the largest that fits: tokens of a sequence, or blocks of a model; 0 where none fits.
        plan: of that size.
        points: (size, bytes of the device, of the host, of the disk) of every plan, by size. Those of host and disk
            are of all ranks of a host.
        reason: why there is no plan.
    """

    what: str
    values: dict[str, Any]
    recompute: bool
    size: int = 0
    plan: Plan | None = None
    points: list[tuple[int, int, int, int]] = field(default_factory=list)
    reason: str = ""


@dataclass
class Reached:
    """The answer of `longest` and `largest`.

    Attributes:
        best: the first setting of those that reach farthest.
        reaches: every setting that was tried, in their order.
        room: bytes of a device that a process can use.
    """

    best: Reach
    reaches: list[Reach]
    room: int


Setting = tuple[str, dict[str, Any]]
"""A setting in words, and what it changes in the configuration, by dotted path."""


def ladder(
    base: Mapping[str, Any],
    stage: int,
    recompute: bool | None,
    *,
    first: Sequence[Setting] = (),
    last: Sequence[Setting] = (),
) -> list[Reach]:
    """The usual settings, each with what the one before has, so that each saves memory and costs time.

    Args:
        base: the configuration.
        stage: its ZeRO stage.
        recompute: whether the model recomputes its blocks; None: it begins to behind the settings of `first`.
        first, last: settings before and behind recomputation, ZeRO stage 3 and host memory.
    """
    zero = base.get("zero_optimization") or {}
    usual: list[Setting] = [("inputs of recomputed blocks in host memory", {_INPUTS: True})]
    if recompute is False:
        usual = []
    if stage < 3:
        usual.append(("ZeRO stage 3", {_ZERO + "stage": 3}))
    for word, key in (("optimizer states", "offload_optimizer"), ("parameters", "offload_param")):
        if not zero.get(key):
            usual.append((f"{word} in host memory", {_ZERO + key: {"device": "cpu"}}))
    again = [] if recompute is not None else [(AGAIN, {})]
    values: dict[str, Any] = {}
    found = [Reach("as configured", {}, bool(recompute))]
    for what, changes in (*first, *again, *usual, *last):
        values.update(changes)
        found.append(Reach(what, dict(values), found[-1].recompute or what == AGAIN))
    return found


def climb(
    tried: Sequence[Reach],
    plan_of: Callable[[Reach, int], Plan],
    *,
    what: str,
    start: int,
    step_of: Callable[[Reach], int],
    room: int,
    chosen: bool,
    report: Callable[[str], object],
) -> Reached:
    """Find how far each setting reaches. A setting begins where those before it ended.

    Args:
        tried: the settings, each slower than the one before.
        plan_of: plans a setting at a size.
        what: the sizes in words, for errors.
        start: the first size.
        step_of: a setting's sizes are multiples of it.
        room: bytes of a device that a process can use.
        chosen: recomputation was tried by `ladder`: settings behind it go without where the model cannot.
        report: hears which setting is planned.

    Raises:
        PlanError: nothing fits, or nothing can be planned.
    """
    recomputes = True
    for reach in tried:
        if chosen and not recomputes:
            reach.recompute = False
        report(reach.what)
        start, step = max(start, *(one.size for one in tried)), step_of(reach)
        try:
            _extend(reach, lambda size, reach=reach: plan_of(reach, size), -(-start // step) * step, step)
        except Exception as error:
            if not explains_itself(error):
                raise
            reach.reason = str(error)
            recomputes = recomputes and reach.what != AGAIN
    best = max(tried, key=lambda reach: reach.size)
    if not best.size:
        reasons = "; ".join(dict.fromkeys(f"{reach.what}: {reach.reason or 'does not fit'}" for reach in tried))
        raise PlanError(f"no setting can hold {what.format(start)}: {reasons}")
    return Reached(best, list(tried), room)


def _extend(reach: Reach, plan_of: Callable[[int], Plan], start: int, step: int) -> None:
    """Find the largest multiple of `step` that fits: along a line through two plans, then between what fits and what
    does not.
    """
    below, above, size = 0, 0, start
    for _ in range(_MOST_PLANS):
        answer = plan_of(size)
        reach.points = sorted({*reach.points, (size, *_bytes(answer))})
        if answer.fits:
            below, reach.size, reach.plan = size, size, answer
        else:
            above = size
        end = _end(answer, reach.points, below)
        close = max(step, int(_CLOSE * below))
        if (above and above - below <= close) or (below and end is not None and abs(end - below) <= close):
            return
        guess = 2 * below if not above else (below + above) // 2
        if end is not None and below < end and (not above or end < above):
            guess = int(end * (1 - _CLOSE / 2))
        least, most = below + step, above - step if above else max(guess, 2 * below)
        size = max(least, min(guess, most)) // step * step
        if size <= 0 or size in (below, above):
            return


def _bytes(answer: Plan) -> tuple[int, int, int]:
    """Bytes of a device, and of the memory and the disk of a host with its ranks."""
    host, disk = (answer.ranks_per_host * answer.peak.get(tier, 0) for tier in (HOST, DISK))
    return answer.peak_bytes + answer.fragmentation_bytes, host, disk


def _end(answer: Plan, points: list[tuple[int, int, int, int]], below: int) -> float | None:
    """Size at which the first of device, host and disk is full, by the lines through the points next to the end.
    `below` is the largest size that fits.
    """
    if len(points) < 2:
        return None
    fitting = sum(size <= below for size, *_ in points)
    first = max(0, min(fitting - 1, len(points) - 2))
    (a, *low), (b, *high) = points[first : first + 2]
    ends = [
        b + (room - there) * (b - a) / (there - here)
        for here, there, room in zip(low, high, _rooms(answer))
        if room is not None and there > here
    ]
    return min(ends, default=None)


def _rooms(answer: Plan) -> tuple[int | None, int | None, int | None]:
    """Bytes that there are for `_bytes`."""
    disk = answer.machine.get("disk_bytes")
    device, host = answer.machine.get("memory_bytes"), answer.machine.get("host_memory_bytes")
    on_cpu = answer.machine.get("device") == "cpu"  # then the device is the host's memory, which its ranks share
    rooms = [None if found is None else int(found * RESERVE) for found in (device, host)]
    if on_cpu:
        return (None if rooms[1] is None else rooms[1] // answer.ranks_per_host), None, disk
    if answer.short_of is not None and answer.short_of[0] == "device":  # less than the machine's: the communicators'
        rooms[0] = answer.short_of[2] - (answer.short_of[1] - _bytes(answer)[0])
    return rooms[0], rooms[1], disk


# - What people read


def described(found: Reached, columns: Mapping[str, Callable[[Plan], str]], heading: str, result: str) -> str:
    """A table of settings and the answer, for a terminal.

    Args:
        columns: cells of a row by their heading, behind the size.
        heading: that of the sizes.
        result: the line behind the table, with `{size}` and `{what}` of the best setting.
    """
    lines = ["  ".join([f"{heading:>12}", *(f"{name:>10}" for name in columns), "setting (each with those above it)"])]
    for reach in found.reaches:
        plan = reach.plan
        size, cells = (f"{reach.size:,}", [f(plan) for f in columns.values()]) if plan else ("-", ["-"] * len(columns))
        why = "" if plan else f": {reach.reason or 'does not fit'}"
        lines.append("  ".join([f"{size:>12}", *(f"{cell:>10}" for cell in cells), f"{reach.what}{why}"]))
    best = found.best
    changes = " ".join(f"--set {key}={json.dumps(value, separators=(',', ':'))}" for key, value in best.values.items())
    lines.append(result.format(size=f"{best.size:,}", what=best.what))
    lines.append(f"settings: {changes or 'as configured'}{' --recompute' if best.recompute else ''}")
    return "\n".join(lines) + "\n"


def device_bytes(plan: Plan) -> str:
    """The cell for what a device holds."""
    return bytes_text(plan.peak_bytes)


def speed(plan: Plan) -> str:
    """The cell for tokens per second."""
    return f"{plan.tokens_per_second:,.0f}"


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 380, 70, 50, 30, 20
_COLOURS = ("#0969da", "#1a7f37", "#9a6700", "#8250df", "#cf222e", "#bf3989", "#57606a", "#0a7ea4")
_STYLE = """text{font:12px system-ui,sans-serif;fill:#24292f}.axis{stroke:#57606a}.limit{stroke:#cf222e;
stroke-dasharray:5 4}.ground{fill:#fff}polyline{fill:none;stroke-width:2}@media (prefers-color-scheme:dark){text{
fill:#e6edf3}.axis{stroke:#8b949e}.ground{fill:#0d1117}}"""


def memory_picture(found: Reached, axis: str = "tokens of a sequence") -> str:
    """Memory of a device over the size, one line for each setting, as an SVG file. `axis` says what the sizes are."""
    drawn = [reach for reach in found.reaches if len(reach.points) > 1]
    farthest = max((point[0] for reach in drawn for point in reach.points), default=1)
    highest = 1.1 * found.room

    def x(size: float) -> float:
        return _LEFT + size / farthest * (_WIDTH - _LEFT - _RIGHT)

    def y(nbytes: float) -> float:
        return _HEIGHT - _BOTTOM - min(nbytes, highest) / highest * (_HEIGHT - _BOTTOM - _TOP)

    parts = [f'<rect class="ground" width="{_WIDTH}" height="{_HEIGHT}"/>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        at, mark = x(share * farthest), bytes_text(share * found.room)
        parts.append(f'<text x="{at:.0f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
                     f'{share * farthest:,.0f}</text>')  # fmt: skip
        parts.append(f'<text x="{_LEFT - 6}" y="{y(share * found.room) + 4:.0f}" text-anchor="end">{mark}</text>')
    limit = y(found.room)
    parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{limit:.1f}" y2="{limit:.1f}"/>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(0):.1f}" y2="{y(0):.1f}"/>')
    for number, reach in enumerate(drawn):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x(size):.1f},{y(nbytes):.1f}" for size, nbytes, *_ in reach.points)
        parts.append(f'<polyline points="{points}" stroke="{colour}"><title>{escape(reach.what)}</title></polyline>')
        parts.append(f'<text x="{_LEFT + 8}" y="{_TOP + 14 + 15 * number}" style="fill:{colour}">'
                     f'{escape(reach.what)}</text>')  # fmt: skip
    parts.append(f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{axis}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="memory over {axis}"><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )
