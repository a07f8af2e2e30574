"""`longest`: the longest sequence that fits, and the settings that reach it.

Settings are tried in an order in which each costs more time than the one before: more ranks for a sequence,
recomputation, its inputs in host memory, sharded parameters, states and parameters in host memory, chunks of attention
in host memory. Memory over length is close to a straight line, so few plans find the end of each setting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .answer import RESERVE
from .configs import ready, with_values
from .engine import EngineToPlan, engine_to_plan
from .errors import PlanError, explains_itself
from .machine import Machine
from .models import Batch
from .planner import Asked, Config, MachineLike, Model
from .plans import Plan
from .text import bytes_text

__all__ = ["Longest", "Reach", "describe_longest", "longest", "memory_picture"]

HOST = {"device": "cpu"}
AGAIN = "recomputation"
CHUNKS = 8
"""Chunks of attention in host memory."""
_CLOSE = 0.02
"""The answer is at most so much shorter than what fits."""
_MOST_PLANS = 14


@dataclass
class Reach:
    """How far a setting reaches.

    Attributes:
        what: the setting in words.
        values: what it changes in the configuration, by dotted path.
        recompute: the model recomputes its blocks.
        length: the longest sequence in tokens; 0 where none fits.
        plan: of that sequence.
        points: (tokens, bytes of the device) of every plan, in the order of tokens.
        reason: why there is no plan.
    """

    what: str
    values: dict[str, Any]
    recompute: bool
    length: int = 0
    plan: Plan | None = None
    points: list[tuple[int, int]] = field(default_factory=list)
    reason: str = ""


@dataclass
class Longest:
    """What `longest` found.

    Attributes:
        best: the first setting of those that reach farthest.
        reaches: every setting that was tried, in their order.
        room: bytes of a device that a process can use.
    """

    best: Reach
    reaches: list[Reach]
    room: int


def longest(
    model: Model,
    config: Config,
    *,
    world_size: int,
    ranks_per_host: int | None = None,
    machine: MachineLike = None,
    batch: Callable[[int], Batch] | None = None,
    recompute: bool | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    start: int = 4096,
    report: Callable[[str], object] = lambda text: None,
    engine: EngineToPlan | None = None,
) -> Longest:
    """The longest sequence that can be trained, one sample at a time on each rank.

    Args:
        batch: makes an example of one micro-batch with sequences of a given length; large tensors best on the meta
            device. None: tokens, for models that say how large their vocabulary is.
        recompute: True or False: the model recomputes its blocks, or does not. None: both are tried.
        settings: what is tried: changes of the configuration by dotted path, by name; None: see the module's text.
        start: tokens of the first plan.
        report: hears what is planned.
        others: as for `plan`.

    Raises:
        PlanError: nothing fits, or nothing can be planned.
        DsxConfigError: the configuration is wrong.
    """
    if isinstance(start, bool) or not isinstance(start, int) or start < 1:
        raise PlanError(f"start: got {start!r}, expected a number of tokens from 1")
    found_engine = engine_to_plan(engine)
    base = found_engine.read(config if isinstance(config, (str, os.PathLike)) else dict(config))
    base = with_values(base, {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1})
    device = Machine.of(machine)

    def plan_of(reach: Reach, length: int) -> Plan:
        given = None if batch is None else batch(length)
        asked = Asked(
            model, world_size, ranks_per_host, device, given, length if batch is None else None, loss, optimizer,
            found_engine,
        )  # fmt: skip
        return asked.plan(with_values(base, reach.values), reach.recompute)

    tried = _ladder(base, world_size, found_engine, recompute) if settings is None else [
        Reach(name, dict(values), bool(recompute)) for name, values in settings.items()
    ]  # fmt: skip
    recomputes = True
    for reach in tried:
        if settings is None and recompute is None and not recomputes:
            reach.recompute = False
        report(reach.what)
        start = max(start, *(one.length for one in tried))
        step = 2 * int(with_values(base, reach.values).get("sequence_parallel_size", 1) or 1)
        try:
            _extend(reach, lambda length, reach=reach: plan_of(reach, length), -(-start // step) * step, step)
        except Exception as error:
            if not explains_itself(error):
                raise
            reach.reason = str(error)
            recomputes = recomputes and reach.what != AGAIN  # a model that cannot: the settings behind it go without
    best = max(tried, key=lambda reach: reach.length)
    if not best.length:
        reasons = "; ".join(dict.fromkeys(f"{reach.what}: {reach.reason or 'does not fit'}" for reach in tried))
        raise PlanError(f"longest: no setting can hold a sequence of {start} tokens: {reasons}")
    return Longest(best, tried, int(device.memory_bytes * RESERVE))


def _ladder(base: Mapping[str, Any], world_size: int, engine: EngineToPlan, recompute: bool | None) -> list[Reach]:
    """The usual settings, each with what the one before has."""
    layout = ready(dict(base), world_size, engine).layout
    values: dict[str, Any] = {}
    again = bool(recompute)
    found = [Reach("as configured", {}, again)]

    def rung(what: str, **changes: Any) -> None:
        values.update({key.replace("__", "."): value for key, value in changes.items()})
        found.append(Reach(what, dict(values), again))

    whole = world_size // layout["pipe"] // layout["tensor"]
    if layout["sequence"] < whole:
        rung(f"each sequence over {whole} ranks", sequence_parallel_size=whole)
    if recompute is None:
        again = True
        rung(AGAIN)
    if again:
        rung("inputs of recomputed blocks in host memory", activation_checkpointing__cpu_checkpointing=True)
    if layout["stage"] < 3:
        rung("ZeRO stage 3", zero_optimization__stage=3)
    zero = base.get("zero_optimization") or {}
    if not zero.get("offload_optimizer"):
        rung("optimizer states in host memory", zero_optimization__offload_optimizer=HOST)
    if not zero.get("offload_param"):
        rung("parameters in host memory", zero_optimization__offload_param=HOST)
    if max(layout["sequence"], values.get("sequence_parallel_size", 1)) > 1:
        rung("attention in chunks that wait in host memory", sequence_parallel__host_chunks=CHUNKS)
    return found


def _extend(reach: Reach, plan_of: Callable[[int], Plan], start: int, step: int) -> None:
    """Find the longest multiple of `step` that fits: along a line through two plans, then between what fits and what
    does not.
    """
    below, above, length = 0, 0, start
    for _ in range(_MOST_PLANS):
        answer = plan_of(length)
        reach.points = sorted({*reach.points, (length, answer.peak_bytes + answer.fragmentation_bytes)})
        if answer.fits:
            below, reach.length, reach.plan = length, length, answer
        else:
            above = length
        end = _end(answer, reach.points, below)
        close = max(step, int(_CLOSE * below))
        if (above and above - below <= close) or (below and end is not None and abs(end - below) <= close):
            return
        guess = 2 * below if not above else (below + above) // 2
        if end is not None and below < end and (not above or end < above):
            guess = int(end * (1 - _CLOSE / 2))
        least, most = below + step, above - step if above else max(guess, 2 * below)
        length = max(least, min(guess, most)) // step * step
        if length <= 0 or length in (below, above):
            return


def _end(answer: Plan, points: list[tuple[int, int]], below: int) -> float | None:
    """Where the line through the points next to the end meets what a device has; None where something else is short.
    `below` is the longest length that fits.
    """
    room = _room(answer)
    if len(points) < 2 or room is None or (answer.short_of is not None and answer.short_of[0] != "device"):
        return None
    fitting = sum(length <= below for length, _ in points)
    first = max(0, min(fitting - 1, len(points) - 2))
    (a, low), (b, high) = points[first : first + 2]
    return None if high <= low else b + (room - high) * (b - a) / (high - low)


def _room(answer: Plan) -> int | None:
    if answer.short_of is not None:
        return answer.short_of[2] - (answer.short_of[1] - answer.peak_bytes - answer.fragmentation_bytes)
    found = answer.machine.get("memory_bytes")
    return None if found is None else int(found * RESERVE)


def describe_longest(found: Longest) -> str:
    """A table of settings, and the longest sequence, for a terminal."""
    lines = [f"{'tokens':>12}  {'device':>10}  {'tokens/s':>10}  setting (each with those above it)"]
    for reach in found.reaches:
        if reach.plan is None:
            lines.append(f"{'-':>12}  {'-':>10}  {'-':>10}  {reach.what}: {reach.reason or 'does not fit'}")
            continue
        speed = f"{reach.plan.tokens_per_second:,.0f}"
        lines.append(f"{reach.length:>12,}  {bytes_text(reach.plan.peak_bytes):>10}  {speed:>10}  {reach.what}")
    best = found.best
    changes = " ".join(f"--set {key}={_json(value)}" for key, value in best.values.items())
    lines.append(f"longest sequence: {best.length:,} tokens ({best.what})")
    lines.append(f"settings: {changes or 'as configured'}{' --recompute' if best.recompute else ''}")
    return "\n".join(lines) + "\n"


def _json(value: Any) -> str:
    import json

    return json.dumps(value, separators=(",", ":"))


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 380, 70, 50, 30, 20
_COLOURS = ("#0969da", "#1a7f37", "#9a6700", "#8250df", "#cf222e", "#bf3989", "#57606a", "#0a7ea4")
_STYLE = """text{font:12px system-ui,sans-serif;fill:#24292f}.axis{stroke:#57606a}.limit{stroke:#cf222e;
stroke-dasharray:5 4}.ground{fill:#fff}polyline{fill:none;stroke-width:2}@media (prefers-color-scheme:dark){text{
fill:#e6edf3}.axis{stroke:#8b949e}.ground{fill:#0d1117}}"""


def memory_picture(found: Longest) -> str:
    """Memory of a device over the length of a sequence, one line for each setting, as an SVG file."""
    from xml.sax.saxutils import escape

    drawn = [reach for reach in found.reaches if len(reach.points) > 1]
    farthest = max((point[0] for reach in drawn for point in reach.points), default=1)
    highest = 1.1 * found.room

    def x(tokens: float) -> float:
        return _LEFT + tokens / farthest * (_WIDTH - _LEFT - _RIGHT)

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
        points = " ".join(f"{x(tokens):.1f},{y(nbytes):.1f}" for tokens, nbytes in reach.points)
        parts.append(f'<polyline points="{points}" stroke="{colour}"><title>{escape(reach.what)}</title></polyline>')
        parts.append(f'<text x="{_LEFT + 8}" y="{_TOP + 14 + 15 * number}" style="fill:{colour}">'
                     f'{escape(reach.what)}</text>')  # fmt: skip
    parts.append(f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">tokens of a sequence</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="memory over the length of a sequence"><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )
