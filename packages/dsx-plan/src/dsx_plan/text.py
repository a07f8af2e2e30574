"""Plans as text for a terminal."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence

from dsx_monitor.picture import bytes_text

from .configs import with_values
from .plans import Change, Plan, StagePlan

__all__ = ["bytes_text", "describe_plan", "describe_search", "describe_skipped", "saving_text", "seconds_text"]

_MIB = 1 << 20


def seconds_text(seconds: float) -> str:
    """Seconds, milliseconds or microseconds."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def count_text(number: float) -> str:
    """A count with k, M, G, T, P, E."""
    for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"


def layout_text(plan: Plan) -> str:
    """Axes, stage and batch in a line."""
    layout = plan.layout
    names = ("data", "pipe", "tensor", "sequence", "expert")
    axes = " x ".join(f"{name} {layout[name]}" for name in names if layout.get(name, 1) > 1)
    again = ", recomputation" if layout.get("recompute") else ""
    return (
        f"{axes or 'one rank'}, ZeRO stage {layout['stage']}, micro-batches of {layout['micro_batch']} x"
        f" {layout['accumulation']}{again}"
    )


def verdict(plan: Plan) -> str:
    """Does it fit?"""
    if plan.short_of is None:
        return "fits: yes"
    tier, needed, room = plan.short_of
    return f"fits: no, the {tier} needs {bytes_text(needed)} and has {bytes_text(room)}"


def describe_plan(plan: Plan) -> str:
    """A page of text."""
    machine = plan.machine["name"]
    whose = "a rank" if plan.pipeline is None else f"rank {plan.rank}"
    lines = [
        f"{plan.model}: {count_text(plan.parameters)} parameters on {plan.world_size} rank(s), {plan.ranks_per_host}"
        f" per host, {machine}",
        layout_text(plan),
        verdict(plan),
        "",
        *_pipeline(plan),
        f"memory of {whose}: at most {bytes_text(plan.peak_bytes)} on the device"
        + (f", and {bytes_text(plan.fragmentation_bytes)} that its allocator holds" * (plan.fragmentation_bytes > 0)),
        *_table([(name, bytes_text(size)) for name, size in _sorted(plan.peak_parts)]),
        *(["beside the tensors"] if any(plan.beside.values()) else []),
        *_table([(_BESIDE[name], bytes_text(size)) for name, size in _sorted(plan.beside) if size]),
    ]
    lines += [f"  {tier}: {bytes_text(size)}" for tier, size in plan.peak.items() if tier != "device"]
    rows = [(f"{kind}, {tier}", bytes_text(n)) for kind, tiers in plan.bytes.items() for tier, n in tiers.items() if n]
    lines += _phases(plan)
    lines += ["", "model state of a rank, gradients included", *_table(rows)]
    rows = [(name, bytes_text(size)) for name, size in plan.traffic.items() if size]
    lines += ["", "sent by a rank in a step", *_table(rows or [("to nobody", "0 B")])]
    rows = [(f"{op} x {calls}", bytes_text(sent)) for op, (calls, sent) in plan.messages.items()]
    lines += _table(rows)
    lines += ["", f"a step: {seconds_text(plan.step_seconds)}, {count_text(plan.flops)}flop a rank"]
    lines += _table([(_PARTS.get(name, name), seconds_text(value)) for name, value in plan.parts.items() if value])
    lines.append(f"  {count_text(plan.tokens_per_second)} tokens/s on all ranks, MFU {100 * plan.mfu:.1f} %")
    lines += _casts(plan)
    lines += _without(plan)
    if plan.changes:
        lines += ["", "what makes it fit, fastest first"]
        for change in plan.changes:
            took = seconds_text(change.step_seconds)
            lines.append(f"  {change.what}: {bytes_text(change.peak_bytes)}, {took} for the same samples")
            lines += [f"      {line}" for line in _to_paste(change)]
    elif not plan.fits:
        lines += ["", "no change that was tried makes it fit: use more ranks or a device with more memory"]
    if plan.notes:
        lines += ["", "notes", *(f"  {note}" for note in plan.notes)]
    return "\n".join(lines) + "\n"


_CAST_ON_DEVICE = {"gradients": "data_types.grad_accum_dtype: fp32 casts them there"}
"""The setting with which the device casts; without it the host casts."""


def _casts(plan: Plan) -> list[str]:
    """On which side of the link to the host values are cast, and what the other side would take."""
    lines = [""] * bool(plan.casts)
    for what, seconds in plan.casts.items():
        best, other = sorted(seconds, key=lambda side: (seconds[side], side != "host"))
        line = (
            f"casts of {what}: cheaper on the {best}, {seconds_text(seconds[best])} a step"
            f" ({seconds_text(seconds[other])} on the {other})"
        )
        if best == "device":
            line += f"; {_CAST_ON_DEVICE.get(what, 'dsx casts them on the host')}"
        lines.append(line)
    return lines


def _phases(plan: Plan) -> list[str]:
    """A line for each phase of a job with a generator: the most on the device, and of what it is made."""
    if not plan.phases:
        return []
    rows = [(name, bytes_text(sum(parts.values())), _sorted(parts)) for name, parts in plan.phases.items()]
    made = [(name, total, ", ".join(f"{kind} {bytes_text(n)}" for kind, n in parts)) for name, total, parts in rows]
    return ["", "memory of the device by phase", *(f"  {line}" for line in _columns(made))]


def _to_paste(change: Change) -> list[str]:
    """A change as JSON for the configuration, and as words of the command line."""
    values = {path: value for path, value in change.config.items() if path != "recompute"}
    kept = with_values({}, {path: value for path, value in values.items() if value is not None})
    gone = [path for path, value in values.items() if value is None]
    words = [shlex.quote(f"{path}={json.dumps(value)}") for path, value in values.items()]
    line = [*(f"--set {word}" for word in words), *(["--recompute"] if change.config.get("recompute") else [])]
    return [
        *([f"in the configuration: {json.dumps(kept)}"] if kept else []),
        *([f"taken away there: {', '.join(gone)}"] if gone else []),
        f"to plan it: {' '.join(line)}",
    ]


def _without(plan: Plan) -> list[str]:
    """A line for each setting that is there to send less: does it save time?"""
    return [""] * bool(plan.without) + [saving_text(plan, change) for change in plan.without]


def saving_text(plan: Plan, change: Change) -> str:
    """Whether a setting saves time, from the plan with it and the numbers without it."""
    saved = change.step_seconds - plan.step_seconds
    more = plan.peak_bytes - change.peak_bytes
    memory = f", and takes {bytes_text(more)} more memory" if more > _MIB else ""
    verdict = "saves" if saved > 0 else "saves no time: it costs"
    return (
        f"{change.what} {verdict} {seconds_text(abs(saved))} a step ({seconds_text(plan.step_seconds)} with it,"
        f" {seconds_text(change.step_seconds)} without{memory})"
    )


def _pipeline(plan: Plan) -> list[str]:
    """The stages of a pipeline, a line for each rank."""
    found = plan.pipeline
    if found is None:
        return []
    head = f"pipeline {found.schedule}: {found.micro_batches} micro-batches, bubble {100 * found.bubble_share:.1f} %"
    return [head, *(f"  {line}" for line in _columns([STAGE_HEAD, *map(stage_row, found.ranks)])), ""]


STAGE_HEAD = ("rank", "stages", "parameters", "peak", "forward", "backward", "beside", "sent", "kept")


def stage_row(stage: StagePlan) -> tuple[str, ...]:
    """A rank of a pipeline, in the columns of `STAGE_HEAD`."""
    sent = sum(nbytes for _, nbytes in stage.messages.values())
    return (
        str(stage.rank),
        ", ".join(map(str, stage.stages)),
        count_text(stage.parameters),
        bytes_text(stage.peak_bytes + stage.fragmentation_bytes),
        seconds_text(stage.forward_seconds),
        seconds_text(stage.backward_seconds),
        seconds_text(stage.other_seconds),
        bytes_text(sent),
        f"{stage.kept} micro-batches",
    )


_PARTS = {
    "products": "matmuls",
    "attention": "attention kernels",
    "operators": "memory-bound kernels",
    "overhead": "kernel launch overhead",
    "optimizer": "of these in the optimizer step",
    "interference": "of these by communication beside them",
    "communication": "communication, total",
    "exposed_communication": "exposed communication",
    "copies": "copies between tiers, total",
    "exposed_copies": "stalls for copies",
    "bubble": "pipeline bubble",
    "stragglers": "wait for the slowest rank",
}


def describe_search(plans: Sequence[Plan], keys: Sequence[str]) -> str:
    """A table of plans, best first; `keys` are the paths that were varied."""
    head = ["", *keys, "peak", "step", "tokens/s", "MFU"]
    rows = [head]
    for plan in plans:
        rows.append(
            [
                "" if plan.fits else "does not fit",
                *(_shown(plan, key) for key in keys),
                bytes_text(plan.peak_bytes + plan.fragmentation_bytes),
                seconds_text(plan.step_seconds),
                count_text(plan.tokens_per_second),
                f"{100 * plan.mfu:.1f} %",
            ]
        )
    return "\n".join(_columns(rows)) + "\n"


_MOST_REASONS = 12


def describe_skipped(points: Sequence[tuple[Mapping[str, object], str]]) -> str:
    """The reasons why points have no plan: a line for each, with the number of points and one of them. Reasons that
    differ in numbers only (of ranks, of a stage) share the line of the first.
    """
    by_reason: dict[str, tuple[str, list[Mapping[str, object]]]] = {}
    for values, reason in points:
        text = " ".join(reason.split())
        by_reason.setdefault(re.sub(r"\d+", "", text), (text, []))[1].append(values)
    ordered = sorted(by_reason.values(), key=lambda item: -len(item[1]))
    lines = [
        f"left out {len(found)}: {reason if len(reason) <= 240 else reason[:237] + '...'}"
        f" ({', '.join(f'{key}={value}' for key, value in found[0].items())})"
        for reason, found in ordered[:_MOST_REASONS]
    ]
    rest = sum(len(found) for _, found in ordered[_MOST_REASONS:])
    return "".join(f"{line}\n" for line in [*lines, *([f"left out {rest} for other reasons"] if rest else [])])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]


def _shown(plan: Plan, key: str) -> str:
    if key == "recompute":
        return str(bool(plan.layout.get("recompute")))
    value: object = plan.config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return str(value)


_BESIDE = {
    "allocator": "fragmentation of the allocator", "communicators": "NCCL's communicators", "context": "CUDA's context",
}  # fmt: skip


def _sorted(parts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(parts.items(), key=lambda item: -item[1])


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:{width}}  {value:>12}" for name, value in rows]
