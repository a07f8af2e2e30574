"""`plan` and `search`: from a model and a configuration to answers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import DsxConfigError
from .allocator import fragmentation
from .configs import Ready, ready, with_values
from .cost import Timing, simulate
from .errors import PlanError
from .ledger import DEVICE, HOST
from .machine import Machine
from .models import Batch, describe, model_maker
from .plan import Change, Plan
from .replay import MOST_MICRO_BATCHES, Question, Replay, replay
from .trace import COPIES, COPY, MESSAGE

__all__ = ["plan", "search"]

RESERVE = 0.97
"""Share of a device's memory that a process can use: the rest is the context and the communication library's."""

Model = nn.Module | Callable[[], nn.Module] | str | os.PathLike
Config = Mapping[str, Any] | str | os.PathLike
MachineLike = Machine | str | os.PathLike | None


def plan(
    model: Model,
    config: Config,
    *,
    world_size: int,
    ranks_per_host: int | None = None,
    machine: MachineLike = None,
    batch: Batch | None = None,
    sequence: int | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    recompute: bool = False,
    changes: bool = True,
) -> Plan:
    """Say what a job needs and how long its steps take, without running it.

    The engine is built and run on one rank among `world_size` that are not there, on tensors without contents (see
    `replay`). No device is needed, and nothing of the model, of the process or of the disk is changed.

    Args:
        model: a module, a function that makes one, `file.py:function`, or a folder with a config.json of Hugging Face's
            format.
        config: the configuration that `dsx.initialize` would get.
        world_size: number of ranks.
        ranks_per_host: of them on one host; None: as many as the machine's hosts have, at most all.
        machine: a `Machine`, a name of the table ("H100-SXM"), a file (`dsx plan calibrate`), or None: this machine.
        batch: an example of one micro-batch: a tensor, positional arguments, or keyword arguments. Its first dimension
            is brought to the configured micro-batch. None: tokens, for models that say how large their vocabulary is.
        sequence: tokens of a sample where there is no example.
        loss: from the model's output to the loss; None: the output's `loss`, its first value, or its mean.
        optimizer: makes the optimizer where the configuration names none. None: AdamW.
        recompute: the model recomputes its blocks in backward (`gradient_checkpointing_enable`).
        changes: look for changes that make it fit where it does not.

    Raises:
        PlanError: the model, the batch or the machine cannot be planned with.
        DsxConfigError: the configuration is wrong.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise PlanError(f"world_size: got {world_size!r}, expected a number of ranks from 1")
    found = Machine.of(machine)
    on_host = _on_host(world_size, ranks_per_host, found)
    asked = _Asked(model, world_size, on_host, found, batch, sequence, loss, optimizer, recompute)
    answer = asked.plan(config)
    if not answer.fits and changes:
        answer.changes = _changes(asked, answer)
    return answer


def search(
    model: Model,
    config: Config,
    space: Mapping[str, Sequence[Any]],
    *,
    world_size: int,
    ranks_per_host: int | None = None,
    machine: MachineLike = None,
    batch: Batch | None = None,
    sequence: int | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> list[Plan]:
    """Plan every combination of values, and sort: what fits first, then most tokens per second.

    Args:
        space: values by dotted path of the configuration, `{"zero_optimization.stage": [1, 2, 3]}`. The word
            `recompute` stands for `plan`'s argument. A value None takes the key away.
        others: as for `plan`.

    Returns:
        The plans; each has its `config`. Combinations that contradict themselves are left out.

    Raises:
        PlanError: no combination can be planned; the message has the last reason.
    """
    if not space or any(
        isinstance(v, (str, bytes)) or not isinstance(v, Sequence) or not len(v) for v in space.values()
    ):
        raise PlanError("space: expected lists of values by path, as {'zero_optimization.stage': [1, 2, 3]}")
    base = ready_given(config)
    found, reason = [], ""
    found_machine = Machine.of(machine)
    on_host = _on_host(world_size, ranks_per_host, found_machine)
    for values in itertools.product(*space.values()):
        chosen = dict(zip(space, values))
        again = bool(chosen.pop("recompute", False))
        asked = _Asked(model, world_size, on_host, found_machine, batch, sequence, loss, optimizer, again)
        try:
            found.append(asked.plan(with_values(base, chosen)))
        except (DsxConfigError, PlanError) as error:
            reason = f"{', '.join(f'{key}={value}' for key, value in chosen.items())}: {error}"
    if not found:
        raise PlanError(f"search: none of the combinations can be planned; the last: {reason}")
    return sorted(found, key=lambda answer: (not answer.fits, -answer.tokens_per_second))


def usual_space(config: Config, world_size: int) -> dict[str, list[Any]]:
    """What `dsx plan --search` varies: stage, micro-batch with the same samples in a step, offload, recomputation."""
    prepared = ready(config if isinstance(config, (str, os.PathLike)) else dict(config), world_size)
    samples = prepared.micro * prepared.accumulation
    sizes = [m for m in (1, 2, 4, 8, 16, 32) if samples % m == 0] or [prepared.micro]
    return {
        "zero_optimization.stage": [1, 2, 3] if world_size > 1 else [0, 3],
        "train_micro_batch_size_per_gpu": sizes,
        "train_batch_size": [samples * prepared.layout["data"]],
        "gradient_accumulation_steps": [None],
        "zero_optimization.offload_optimizer": [None, {"device": "cpu"}],
        "recompute": [False, True],
    }


def ready_given(config: Config) -> dict[str, Any]:
    """The user's keys."""
    from ..config.source import read

    return dict(read(config if isinstance(config, (str, os.PathLike)) else dict(config)).data)


def _on_host(world_size: int, ranks_per_host: int | None, machine: Machine) -> int:
    given = ranks_per_host if ranks_per_host is not None else machine.ranks_per_host
    if given < 1:
        raise PlanError(f"ranks_per_host: got {given}, expected at least 1")
    found = min(given, world_size)
    if world_size % found:
        if ranks_per_host is not None:
            raise PlanError(f"ranks_per_host: got {given} for {world_size} ranks, expected a divisor of them")
        while world_size % found:
            found -= 1
    return found


class _Asked:
    """Everything about a question but the configuration."""

    def __init__(
        self, model: Model, world_size: int, on_host: int, machine: Machine, batch: Any, sequence: int | None,
        loss: Any, optimizer: Any, recompute: bool,
    ) -> None:  # fmt: skip
        self.model, self.world_size, self.on_host, self.machine = model, world_size, on_host, machine
        self.batch, self.sequence, self.loss, self.recompute = batch, sequence, loss, recompute
        self.optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-4))
        self.make = model_maker(model)

    def again(self, *, recompute: bool) -> _Asked:
        """The same with another word on recomputation."""
        return _Asked(
            self.model, self.world_size, self.on_host, self.machine, self.batch, self.sequence, self.loss,
            self.optimizer, recompute,
        )  # fmt: skip

    def plan(self, config: Config) -> Plan:
        """The plan for a configuration."""
        source = config if isinstance(config, (str, os.PathLike)) else dict(config)
        prepared = ready(source, self.world_size)
        return self._answer(prepared, self.replays(prepared))

    def replays(self, prepared: Ready) -> list[Replay]:
        """The replay of every rank that differs."""
        config = {
            **prepared.config,
            "gradient_accumulation_steps": min(prepared.accumulation, MOST_MICRO_BATCHES),
            "train_micro_batch_size_per_gpu": prepared.micro,
        }
        question = Question(
            make=self.make, config=config, world_size=self.world_size, rank=0, ranks_per_host=self.on_host,
            batch=self.batch, micro=prepared.micro, accumulation=prepared.accumulation, sequence=self.sequence,
            loss=self.loss, streams=self.machine.streams, optimizer=self.optimizer, recompute=self.recompute,
        )  # fmt: skip
        if prepared.layout["pipe"] > 1:
            raise PlanError(
                f"pipeline.stages: got {prepared.layout['pipe']}; pipelines cannot be planned yet: plan one stage as a"
                " model of its own"
            )
        return [replay(question)]

    def _answer(self, prepared: Ready, replays: list[Replay]) -> Plan:
        machine, (found,) = self.machine, replays
        timing = simulate(found.trace, found.segments, machine, ranks_per_host=self.on_host)
        peaks = {tier: peak.nbytes for tier, peak in found.ledger.peaks.items() if peak.nbytes}
        extra = fragmentation(found.ledger.requests) if machine.streams else 0
        short = _short_of(peaks, extra, machine, self.on_host)
        flops, again = _flops(found)
        samples = prepared.layout["data"] * prepared.micro * prepared.accumulation
        tokens = samples * found.tokens // max(1, prepared.micro)
        seconds = max(timing.step, 1e-12)
        return Plan(
            model=describe(self.model),
            world_size=self.world_size,
            ranks_per_host=self.on_host,
            machine=machine.to_dict(),
            config=prepared.given,
            layout={**prepared.layout, "recompute": int(self.recompute)},
            parameters=found.parameters,
            trainable=found.trainable,
            tokens=tokens,
            fits=short is None,
            short_of=short,
            peak_bytes=peaks.get(DEVICE, 0),
            peak=peaks,
            peak_parts=found.ledger.peaks[DEVICE].classes,
            fragmentation_bytes=extra,
            bytes=found.resident,
            traffic=_traffic(found),
            messages=found.messages,
            flops=flops,
            recomputed_flops=again,
            step_seconds=timing.step,
            parts=_parts(timing),
            tokens_per_second=tokens / seconds,
            mfu=(flops - again) / (seconds * machine.peak(prepared.dtype)),
            timeline=[(s.lane, s.name, s.start, s.end) for s in timing.spans],
            memory=_curve(found, timing),
            notes=[*prepared.notes, *found.notes, *_machine_notes(machine, prepared.dtype)],
        )


def _machine_notes(machine: Machine, dtype: str) -> list[str]:
    stranger = machine.stranger()
    notes = [f"{machine.name}: {stranger}"] if stranger else []
    if dtype not in machine.flops:
        notes.append(f"{machine.name} has no rate for {dtype}; its slowest one is taken")
    return notes


def _short_of(peaks: Mapping[str, int], extra: int, machine: Machine, on_host: int) -> tuple[str, int, int] | None:
    """What has no room: tier, bytes needed, bytes there."""
    if machine.device == "cpu":  # the device is the host's memory
        needed = (peaks.get(DEVICE, 0) + peaks.get(HOST, 0)) * on_host
        room = int(machine.host_memory_bytes * RESERVE)
        return ("host", needed, room) if needed > room else None
    needed, room = peaks.get(DEVICE, 0) + extra, int(machine.memory_bytes * RESERVE)
    if needed > room:
        return "device", needed, room
    needed, room = peaks.get(HOST, 0) * on_host, int(machine.host_memory_bytes * RESERVE)
    return ("host", needed, room) if needed > room else None


def _flops(found: Replay) -> tuple[int, int]:
    every = again = 0
    for start, end, times in found.segments:
        one, twice = found.trace.flops_of(start, end)
        every, again = every + times * one, again + times * twice
    return every, again


def _traffic(found: Replay) -> dict[str, float]:
    traffic = {"inside host": 0.0, "between hosts": 0.0, **dict.fromkeys(COPIES, 0.0)}
    trace = found.trace
    for start, end, times in found.segments:
        for place in range(start, end):
            if trace.kind[place] == MESSAGE:
                message = trace.messages[trace.number[place]]
                traffic["inside host"] += times * message.inside
                traffic["between hosts"] += times * message.outside
            elif trace.kind[place] == COPY:
                traffic[COPIES[trace.number[place]]] += times * trace.extra[place]
    return traffic


def _parts(timing: Timing) -> dict[str, float]:
    names = ("products", "operators", "overhead", "optimizer", "communication", "exposed_communication", "copies",
             "exposed_copies")  # fmt: skip
    return {name: getattr(timing, name) for name in names}


_MOST_POINTS = 1500


def _curve(found: Replay, timing: Timing) -> list[tuple[float, int]]:
    """Memory over time, at most so many points: of each stretch its greatest value."""
    curve, ends = found.ledger.curve, timing.at
    points = [(ends[min(place, len(ends) - 1)] if ends else 0.0, nbytes) for place, nbytes in curve]
    stretch = max(1, -(-len(points) // _MOST_POINTS))
    kept = [max(points[i : i + stretch], key=lambda p: p[1]) for i in range(0, len(points), stretch)]
    latest, ordered = 0.0, []
    for at, nbytes in kept:
        latest = max(latest, at)
        ordered.append((latest, nbytes))
    return ordered


# - What makes it fit


def _candidates(answer: Plan) -> list[tuple[str, dict[str, Any], bool]]:
    """Changes to try, each as words, keys and recomputation: the cheap ones first."""
    config, layout = answer.config, answer.layout
    zero = config.get("zero_optimization") or {}
    stage, micro, accumulation = layout["stage"], layout["micro_batch"], layout["accumulation"]
    found: list[tuple[str, dict[str, Any], bool]] = []
    again = bool(layout["recompute"])
    smaller: dict[str, Any] = {}
    if micro > 1 and micro % 2 == 0:
        smaller = {
            "train_batch_size": None,
            "train_micro_batch_size_per_gpu": micro // 2,
            "gradient_accumulation_steps": accumulation * 2,
        }
        found.append((f"micro-batches of {micro // 2} and twice the accumulation", smaller, again))
    if not again:
        found.append(("recompute the blocks in backward (gradient_checkpointing_enable)", {}, True))
    stages = {f"zero_optimization.stage={s}": s for s in range(stage + 1, 4) if answer.world_size > 1 or s == 3}
    found += [(text, {"zero_optimization.stage": s}, again) for text, s in stages.items()]
    host = {"device": "cpu"}
    top = {"zero_optimization.stage": max(1, stage)}
    if not zero.get("offload_optimizer"):
        found.append(("optimizer states in host memory", {**top, "zero_optimization.offload_optimizer": host}, again))
    everything = {"zero_optimization.stage": 3}
    if not zero.get("offload_param"):
        both = {
            **everything,
            "zero_optimization.offload_optimizer": zero.get("offload_optimizer") or host,
            "zero_optimization.offload_param": host,
        }
        found.append(("parameters and optimizer states in host memory, stage 3", both, again))
    if stage < 3 and not again:
        found.append(("stage 3 and recomputation", everything, True))
    least = {**everything, **({"train_batch_size": None, "train_micro_batch_size_per_gpu": 1,
                              "gradient_accumulation_steps": accumulation * micro} if micro > 1 else {})}  # fmt: skip
    if micro > 1 or stage < 3:
        found.append(("stage 3, recomputation, micro-batches of 1", least, True))
    found.append(
        (
            "stage 3, recomputation, micro-batches of 1, parameters and optimizer states in host memory",
            {**least, "zero_optimization.offload_optimizer": host, "zero_optimization.offload_param": host},
            True,
        )
    )
    return found


def _changes(asked: _Asked, answer: Plan) -> list[Change]:
    """The changes that make a plan fit, fastest first."""
    found: list[Change] = []
    for what, values, again in _candidates(answer):
        try:
            other = asked.again(recompute=again).plan(with_values(answer.config, values))
        except (DsxConfigError, PlanError, ValueError):
            continue  # not every model recomputes, not every configuration has every stage
        if other.fits:
            config = {**values, **({"recompute": True} if again and not answer.layout["recompute"] else {})}
            seconds = other.step_seconds * answer.tokens / max(1, other.tokens)
            found.append(Change(what, config, other.peak_bytes, seconds))
    return sorted(found, key=lambda change: change.step_seconds)
