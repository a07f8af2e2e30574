"""Replays of pipelines: every rank of one pipeline is replayed, one after the other, by the runtime that carries it out
in a job.

Ranks differ, so each is handed what its neighbours have sent (`dsx_pipe.runtime.rehearsed`). A schedule keeps doing the
same between its beginning and its end; so of many micro-batches some are replayed, and what is alike is counted as
often as there are. Where the schedule does not repeat itself (all forwards first), all of them are.

When a rank waits for another is not seen in its trace. `step_of` says it, by `dsx_pipe`'s own timing of plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .cost import Timing, message_seconds
from .engine import BuiltEngine, StepWatcher
from .errors import PlanError
from .machine import Machine
from .models import Batch
from .record import Record, StageReplay, counted
from .recorder import Recorder
from .trace import MESSAGE, Trace

__all__ = ["PipelineStep", "PipelineSteps", "as_pair", "mail_of", "micro_batches_of", "replay_all", "step_of"]

ROUNDS = 4
"""The most rounds in which ranks are replayed because others sent something else than was guessed."""
FEW = (3, 4, 6, 8)
"""Micro-batches that are replayed for each rank of the pipeline: it fills, does the same for a while, and drains. The
first of these numbers with which something repeats itself is taken.
"""


def mail_of(stages: int, known: Mapping[int, Any]) -> Any:
    """The stand-in by which a rank gets the messages of the other stages; None without a pipeline."""
    if stages == 1:
        return None
    from dsx_pipe.runtime.rehearsed import RehearsedMail  # lazy import: only pipelines need the package

    return RehearsedMail(known)


def micro_batches_of(model: Any, stages: int, accumulation: int, section: Mapping[str, Any]) -> int:
    """The number of micro-batches of a step that are replayed.

    Args:
        model: as it is given to the engine: a `PipelineModule`, or what the configuration cuts.
        stages: ranks of the pipeline, as the configuration says.
        accumulation: micro-batches of a step.
        section: `pipeline` of the configuration, which says how a model is cut that is not cut yet.

    Raises:
        PlanError: the configuration says another number of stages.
    """
    made = getattr(model, "num_pipeline_stages", None)
    if made is not None and made() != stages:
        raise PlanError(
            f"pipeline.stages: got {stages}, and the model is a PipelineModule of {made()} stages, by which ranks are"
            f' divided; write "pipeline": {{"stages": {made()}}} into the configuration'
        )
    if made is None:
        return _replayed(section.get("schedule") or "1f1b", stages, section.get("chunks") or 1, accumulation)
    return _replayed(model.schedule, stages, len(model.stage_modules), accumulation)


def _replayed(schedule: Any, ranks: int, chunks: int, count: int) -> int:
    if not isinstance(schedule, str):
        return count
    from dsx_pipe import live_activations  # lazy import, as in mail_of

    for few in (each * ranks for each in FEW if each * ranks < count):
        short = _built(schedule, ranks, chunks, few)
        repeated = [_repeated(row) for row in short.actions]
        if any(found is None or (count - few) % found[2] for found in repeated):
            continue
        if live_activations(short) == live_activations(_built(schedule, ranks, chunks, count)):
            return few
    return count


def _built(schedule: str, ranks: int, chunks: int, count: int) -> Any:
    from dsx_pipe import build  # lazy import, as in mail_of

    # As the runtime builds it (`dsx_pipe.Pipeline`).
    return build(schedule, ranks, count, chunks if schedule == "interleaved" else None)


def _repeated(row: Sequence[Any]) -> tuple[int, int, int] | None:
    """A stretch of a rank's actions that repeats directly after it: first, end, micro-batches. None: there is none.

    It has as many of each of the rank's actions, and the action behind it is of the sort of its first. The first and
    the last action of a sort do more than those between (gradients are not there yet, they are looked at as a whole),
    so they are not in it.
    """
    places: dict[Any, list[int]] = {}
    for place, action in enumerate(row):
        places.setdefault(_sort(action), []).append(place)
    begin = 1 + max(found[0] for found in places.values())
    stop = min(found[-1] for found in places.values())
    for first in range(begin, stop):
        seen: Counter[Any] = Counter()
        for end in range(first + 1, stop + 1):
            seen[_sort(row[end - 1])] += 1
            if len(seen) == len(places) and len(set(seen.values())) == 1:
                if _sort(row[end]) == _sort(row[first]):
                    return first, end, seen[_sort(row[first])]
                break
    return None


def _sort(action: Any) -> tuple[int, str]:
    return action.stage, action.kind.value


def as_pair(batch: Batch, module: Any) -> tuple[Any, Any]:
    """The (inputs, labels) that a pipeline reads, of an example of a batch.

    Raises:
        PlanError: it has no labels, and the last stage needs some.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    labels = None
    if isinstance(batch, dict):
        batch = dict(batch)
        labels = batch.pop("labels", None)
        if set(batch) == {"input_ids"}:
            batch = batch["input_ids"]
    elif isinstance(batch, (tuple, list)):
        batch, *rest = batch
        if rest:
            raise PlanError(f"batch: got {len(rest) + 1} values, expected (inputs, labels) of a pipeline")
    if labels is None and module.loss_fn is not None:
        raise PlanError(
            "batch: got inputs without labels, expected a pair (inputs, labels): the last stage of the pipeline"
            " computes its loss with both"
        )
    return batch, labels


# - One rank


class PipelineSteps:
    """Steps of one rank of a pipeline.

    Args:
        built: with a pipeline.
        pair: inputs and labels of a micro-batch.
        micro_batches: that are run in a step.
        accumulation: those that it stands for.
    """

    def __init__(
        self, built: BuiltEngine, pair: tuple[Any, Any], micro_batches: int, accumulation: int, recorder: Recorder
    ) -> None:  # fmt: skip
        self._built, self._pair, self._recorder = built, pair, recorder
        self._micro_batches, self._accumulation = micro_batches, accumulation
        self._pipe: Any = built.pipeline
        self._mail: Any = recorder.mail
        self._pipe.stands_for = accumulation
        self._marks = self._pipe.clock = _Marks(recorder)
        if self._mail is not None:
            self._mail.begin(self._pipe)
        self._before_update = _BeforeUpdate(recorder, built.shards.state_bytes_by_tier)
        built.add_hook(self._before_update)

    def run(self, traffic: Any) -> Record:
        """Train for one update. See `Steps.run`."""
        recorder, record = self._recorder, Record(self._recorder.trace, traffic)
        self._marks.restart(traffic)
        recorder.begin("forward")
        self._built.engine.train_batch(iter([self._pair] * self._micro_batches))
        recorder.settle()
        spans = self._pipe.spans()
        repeated = _repeated([span.action for span in spans])
        if self._accumulation > self._micro_batches and repeated is not None:
            first, end, each = repeated
            record.cut(*self._marks.at(spans[first].start))
            more = (self._accumulation - self._micro_batches) // each
            record.cut(*self._marks.at(spans[end].start), times=1 + more)
        record.cut()
        record.resident = self._before_update.resident
        if traffic is not None:
            record.stage = self._stage(spans)
        return record

    def _stage(self, spans: Sequence[Any]) -> StageReplay:
        pipe, module = self._pipe, self._built.engine.module
        schedule = pipe.schedule
        if self._accumulation > self._micro_batches:
            schedule = _built(module.schedule, schedule.ranks, len(pipe.stages), self._accumulation)
        copies = {tie.name for tie in module.ties.ties if not tie.owned}
        infos = self._built.shards.runtime.infos
        places = self._marks.place
        return StageReplay(
            place=pipe.rank,
            ranks=tuple(pipe.groups.ranks),
            schedule=schedule,
            replayed=pipe.schedule,
            actions=[(span.action, places(span.start), places(span.end)) for span in spans],
            kept=pipe.most_kept(),
            copied=sum(info.numel for info in infos if info.name in copies),
            sent={} if self._mail is None else self._mail.sent,
            given={} if self._mail is None else self._mail.given,
        )


class _Marks:
    """A clock of `dsx_pipe`: its times are numbers of marks, each with its place in the trace and what was sent."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.restart(None)

    def restart(self, traffic: Any) -> None:
        """A step begins."""
        self._traffic, self._open = traffic, None
        self._places: list[int] = []
        self._counts: list[dict[str, tuple[int, float]]] = []

    def mark(self, action: Any) -> int:
        """An action begins or ends: an entry of the trace says when."""
        recorder = self._recorder
        if self._open is not action:
            self._open = action
            recorder.begin("forward" if action.kind.value == "F" else "backward")
        else:
            self._open = None
            recorder.mark()
        self._places.append(len(recorder.trace) - 1)
        self._counts.append(counted(self._traffic))
        return len(self._places) - 1

    def seconds(self, mark: int) -> float:
        """The number of the mark."""
        return float(mark)

    def at(self, mark: float) -> tuple[int, dict[str, tuple[int, float]]]:
        """Place and counts of a mark."""
        return self._places[int(mark)], self._counts[int(mark)]

    def place(self, mark: float) -> int:
        """Place of a mark in the trace."""
        return self._places[int(mark)]


class _BeforeUpdate(StepWatcher):
    """Notes what is held when all gradients are there."""

    def __init__(self, recorder: Recorder, state_bytes: Callable[[], dict[str, dict[str, int]]]) -> None:
        self._recorder, self._state_bytes = recorder, state_bytes
        self.resident: dict[str, dict[str, int]] = {}

    def before_update(self) -> None:
        """See `StepWatcher.before_update`."""
        self.resident = self._state_bytes()
        self._recorder.begin("step")


# - All ranks


def replay_all(replay_rank: Callable[[int, Mapping[int, Any]], Any]) -> list[Any]:
    """Replay every rank of the pipeline that rank 0 belongs to, in the order of the pipeline.

    Args:
        replay_rank: (global rank, letters by global rank of their sender) -> its `Replay`.

    Raises:
        PlanError: ranks send something else each time.
    """
    first = replay_rank(0, {})
    ranks = first.stage.ranks
    found = {0: first} if ranks[0] == 0 else {}
    stale = [rank for rank in ranks if rank not in found]
    for _ in range(ROUNDS):
        for rank in stale:
            known = {source: one.stage.sent.get(rank, []) for source, one in found.items() if source != rank}
            found[rank] = replay_rank(rank, known)
        stale = [rank for rank in ranks if not _got_what_was_sent(rank, found)]
        if not stale:
            return [found[rank] for rank in ranks]
    raise PlanError(
        f"a pipeline: rank {stale[0]} gets other tensors in each replay; stages that send one shape for one micro-batch"
        " and another for the next cannot be planned"
    )


def _got_what_was_sent(rank: int, found: Mapping[int, Any]) -> bool:
    given = found[rank].stage.given
    return all(
        list(given.get(source, [])) == list(one.stage.sent.get(rank, []))
        for source, one in found.items() if source != rank
    )  # fmt: skip


# - Time


@dataclass(frozen=True)
class PipelineStep:
    """The times of a step of a pipeline. Lists are by place in the pipeline.

    Attributes:
        seconds: of the whole step.
        timeline: of the schedule (`dsx_pipe.schedule.Timeline`).
        forward, backward: of one micro-batch through all stages of a rank.
        others: what a rank does beside forward and backward.
        ends: when its last backward ends.
    """

    seconds: float
    timeline: Any
    forward: list[float]
    backward: list[float]
    others: list[float]
    ends: list[float]


def step_of(replays: Sequence[Any], timings: Sequence[Timing], machine: Machine) -> PipelineStep:
    """From what each rank did, and how long that takes it alone, to the step of all.

    A stage's times are means over its micro-batches. What a rank does beside them (reductions that nothing hides, the
    update) follows its last backward.

    Args:
        replays: of all ranks, in the order of the pipeline.
        timings: theirs, without waiting for other stages.
        machine: what they run on.
    """
    import dsx_pipe  # lazy import, as in mail_of
    from dsx_pipe.runtime.report import stage_times_of

    schedule = replays[0].stage.schedule
    spans = [
        dsx_pipe.schedule.Span(one.stage.place, action, timing.at[first], timing.at[last])
        for one, timing in zip(replays, timings) for action, first, last in one.stage.actions
    ]  # fmt: skip
    times = stage_times_of(spans, schedule.stages)
    timeline = dsx_pipe.simulate(schedule, times, latency=_delays(replays, machine))
    ends = [max(span.end for span in timeline.spans if span.rank == place) for place in range(schedule.ranks)]
    others = [max(0.0, timing.step - timeline.busy(place)) for place, timing in enumerate(timings)]
    stages = [schedule.stages_of(place) for place in range(schedule.ranks)]
    return PipelineStep(
        seconds=max(end + other for end, other in zip(ends, others)),
        timeline=timeline,
        forward=[sum(times[s].forward for s in mine) for mine in stages],
        backward=[sum(times[s].input_backward + times[s].weight_backward for s in mine) for mine in stages],
        others=others,
        ends=ends,
    )


def _delays(replays: Sequence[Any], machine: Machine) -> list[float]:
    """Seconds of a message between each two stages next to each other: the longer of the two directions."""
    schedule, by_place = replays[0].stage.replayed, {one.stage.place: one for one in replays}
    found = []
    for here, there in zip(schedule.stage_ranks, schedule.stage_ranks[1:]):
        ways = [(here, there), (there, here)] if here != there else []
        found.append(max((_seconds_of_one(by_place[a], b, machine) for a, b in ways), default=0.0))
    return found


def _seconds_of_one(sender: Any, place: int, machine: Machine) -> float:
    """Mean seconds of what a rank sends to another about one micro-batch, header and structure included."""
    from dsx_pipe.runtime.rehearsed import keys_between  # lazy import, as in mail_of

    stage, trace = sender.stage, sender.trace
    count = sum(1 for _ in keys_between(stage.replayed, stage.place, place))
    return _sending(trace, stage.ranks[place], machine) / max(1, count)


def _sending(trace: Trace, peer: int, machine: Machine) -> float:
    total = 0.0
    for kind, number in zip(trace.kind, trace.number):
        if kind == MESSAGE:
            message = trace.messages[number]
            if message.op == "send" and message.peer == peer:
                total += message_seconds(message, machine)
    return total
