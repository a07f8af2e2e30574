"""The built-in schedules: functions from sizes to a `Schedule`.

With p ranks, m micro-batches and F, I, W the times of forward, input backward and weight backward, a step of balanced
stages takes m (F + I + W) plus the bubble:

| schedule | bubble | activations that rank s keeps | source |
|---|---|---|---|
| gpipe | (p - 1)(F + I + W) | m | Huang et al. 2019 |
| 1f1b | (p - 1)(F + I + W) | min(p - s, m) | Narayanan et al. 2019; Fan et al. 2021 |
| interleaved, v stages per rank | (p - 1)(F + I + W) / v | more than 1f1b, of 1/v the size | Narayanan et al. 2021 |
| zb-h1 | (p - 1)(F + I - W) | at most min(p, m) | Qi et al. 2023, handcrafted schedule 1 |
| zbv, 2 stages per rank | about (p - 1) F / 2 if F = I = W | at most 2p, of half the size | Qi et al. 2024, V-shape |
| inference | (p - 1) F | none | forward only |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ..errors import ScheduleError
from .action import Action, Kind
from .plan import Schedule

_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT


def _check_sizes(ranks: int, micro_batches: int, chunks: int = 1) -> None:
    for name, value in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{name}: got {value!r}, expected a whole number of at least 1")


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards."""
    _check_sizes(ranks, micro_batches)
    every = range(micro_batches)
    rows = tuple(tuple([Action(r, _F, m) for m in every] + [Action(r, _B, m) for m in every]) for r in range(ranks))
    return Schedule("gpipe", micro_batches, tuple(range(ranks)), rows)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """1F1B: rank s of p does p - s - 1 forwards, then one forward and one backward in turn, then the last backwards."""
    _check_sizes(ranks, micro_batches)
    rows = tuple(
        _warm_up_then_alternate(
            [Action(r, _F, m) for m in range(micro_batches)],
            [[Action(r, _B, m)] for m in range(micro_batches)],
            warm_up=ranks - r - 1,
        )
        for r in range(ranks)
    )
    return Schedule("1f1b", micro_batches, tuple(range(ranks)), rows)


def _warm_up_then_alternate(
    forwards: Sequence[Action], backwards: Sequence[Sequence[Action]], *, warm_up: int
) -> tuple[Action, ...]:
    """One rank's list: `warm_up` forwards, then one forward and one backward in turn, then the remaining backwards.

    `backwards` has as many entries as `forwards`. Each entry lists the actions of one backward.
    """
    row = list(forwards[:warm_up])
    for k, actions in enumerate(backwards):
        row += forwards[k + warm_up : k + warm_up + 1]
        row += actions
    return tuple(row)


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: rank r of p holds the stages r, r + p, r + 2p, ..., and micro-batches go in groups of p.

    Raises:
        ScheduleError: the number of micro-batches is not a multiple of the number of ranks.
    """
    _check_sizes(ranks, micro_batches, chunks)
    if micro_batches % ranks:
        raise ScheduleError(
            f"interleaved: got {micro_batches} micro-batches on {ranks} ranks, expected a multiple of {ranks}; "
            "1f1b and zb-h1 take any number"
        )
    total = micro_batches * chunks

    def nth(rank: int, k: int, kind: Kind) -> Action:
        group, within = divmod(k, ranks * chunks)
        chunk = within // ranks
        if kind is _B:
            chunk = chunks - 1 - chunk
        return Action(rank + chunk * ranks, kind, group * ranks + within % ranks)

    rows = tuple(
        _warm_up_then_alternate(
            [nth(r, k, _F) for k in range(total)],
            [[nth(r, k, _B)] for k in range(total)],
            warm_up=2 * (ranks - r - 1) + (chunks - 1) * ranks,
        )
        for r in range(ranks)
    )
    return Schedule(f"interleaved-{chunks}", micro_batches, tuple(s % ranks for s in range(ranks * chunks)), rows)


def zero_bubble_h1(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B with a split backward. Rank s does each weight part s micro-batches after its input part.

    The delayed weight parts fill the time at the end of the step in which rank s of 1F1B idles. Each rank keeps at most
    min(p, m) activations, as many as rank 0 of 1F1B.
    """
    _check_sizes(ranks, micro_batches)
    rows = []
    for r in range(ranks):
        backwards = [[Action(r, _I, m)] + ([Action(r, _W, m - r)] if m >= r else []) for m in range(micro_batches)]
        row = _warm_up_then_alternate(
            [Action(r, _F, m) for m in range(micro_batches)], backwards, warm_up=ranks - r - 1
        )
        rows.append((*row, *(Action(r, _W, m) for m in range(max(micro_batches - r, 0), micro_batches))))
    return Schedule("zb-h1", micro_batches, tuple(range(ranks)), tuple(rows))


def zero_bubble_v(ranks: int, micro_batches: int) -> Schedule:
    """ZBV: rank r holds the stages r and 2p - 1 - r, so that the last stage is on the same rank as the first.

    The lists are found by simulating the step in time units of F = I = W. In each unit a rank takes the first of these
    that is ready: the input backward that has waited longest; a forward, of its second stage first, while the rank
    keeps fewer than 2p activations; the weight backward that has waited longest.
    """
    _check_sizes(ranks, micro_batches)
    stage_ranks = tuple(range(ranks)) + tuple(reversed(range(ranks)))
    planner = _VShapePlanner(ranks, micro_batches)
    return Schedule("zbv", micro_batches, stage_ranks, planner.rows())


class _VShapePlanner:
    """Simulates a step of ZBV in time units; each rank chooses its actions by the rule of `zero_bubble_v`."""

    def __init__(self, ranks: int, micro_batches: int) -> None:
        self.ranks, self.micro_batches, self.last = ranks, micro_batches, 2 * ranks - 1
        self.done_at: dict[Action, int] = {}
        self.next: dict[tuple[int, Kind], int] = {(s, k): 0 for s in range(2 * ranks) for k in (_F, _I, _W)}

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        rows: list[list[Action]] = [[] for _ in range(self.ranks)]
        total = 6 * self.micro_batches  # two stages with three actions each
        time = 0
        while any(len(row) < total for row in rows):
            chosen = [(rank, self._choose(rank, time)) for rank in range(self.ranks) if len(rows[rank]) < total]
            for rank, action in chosen:
                if action is not None:
                    rows[rank].append(action)
                    self.next[action.stage, action.kind] += 1
                    self.done_at[action] = time + 1
            time += 1
        return tuple(map(tuple, rows))

    def _choose(self, rank: int, time: int) -> Action | None:
        first, second = rank, self.last - rank
        ready = [a for s in (second, first) if (a := self._ready(s, _I, time)) is not None]
        if ready:
            return min(ready, key=self._ready_since)
        kept = sum(self.next[s, _F] - self.next[s, _W] for s in (first, second))
        # the second stage's forward frees memory soon; the first stage leaves room for it
        for stage, limit in (
            (second, 2 * self.ranks),
            (first, 2 * self.ranks - (1 if self._second_stage_is_behind(rank) else 0)),
        ):
            action = self._ready(stage, _F, time)
            if action is not None and kept < limit:
                return action
        weights = [a for s in (first, second) if (a := self._ready(s, _W, time)) is not None]
        return min(weights, key=self._ready_since) if weights else None

    def _second_stage_is_behind(self, rank: int) -> bool:
        """True if the rank's second stage has done fewer forwards than its first stage."""
        return self.next[self.last - rank, _F] < self.next[rank, _F]

    def _ready(self, stage: int, kind: Kind, time: int) -> Action | None:
        m = self.next[stage, kind]
        if m >= self.micro_batches:
            return None
        needs = []
        if kind is _F and stage > 0:
            needs = [Action(stage - 1, _F, m)]
        elif kind is _I:
            needs = [Action(stage, _F, m)] + ([Action(stage + 1, _I, m)] if stage < self.last else [])
        elif kind is _W:
            needs = [Action(stage, _I, m)]
        return Action(stage, kind, m) if all(self.done_at.get(a, time + 1) <= time for a in needs) else None

    def _ready_since(self, action: Action) -> tuple[int, int]:
        before = Action(action.stage, _F if action.kind is _I else _I, action.micro_batch)
        after = Action(action.stage + 1, _I, action.micro_batch)
        return max(self.done_at.get(before, 0), self.done_at.get(after, 0)), -action.stage


def inference(ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Forward only: `micro_batches` micro-batches through `ranks` x `chunks` stages.

    Several stages per rank are placed as in `interleaved`.

    Raises:
        ScheduleError: a number is below 1.
    """
    _check_sizes(ranks, micro_batches, chunks)
    stage_ranks = tuple(s % ranks for s in range(ranks * chunks))
    return inference_over(stage_ranks, micro_batches)


@lru_cache(maxsize=32, typed=True)
def inference_over(stage_ranks: tuple[int, ...], micro_batches: int) -> Schedule:
    """Forward only, for stages placed on the ranks `stage_ranks`. Each micro-batch is computed as early as possible."""
    _check_sizes(max(stage_ranks) + 1, micro_batches)
    rows: list[list[Action]] = [[] for _ in range(max(stage_ranks) + 1)]
    # if every stage takes one tick, micro-batch m reaches stage s at tick m + s; each rank's actions are sorted by it
    for _, stage, m in sorted((m + s, s, m) for s in range(len(stage_ranks)) for m in range(micro_batches)):
        rows[stage_ranks[stage]].append(Action(stage, _F, m))
    return Schedule("inference", micro_batches, stage_ranks, tuple(map(tuple, rows)))


BUILDERS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zbv": zero_bubble_v,
    "inference": inference,
}


def build(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule of this name.

    Args:
        name: gpipe, 1f1b, interleaved, zb-h1, zbv or inference.
        ranks: number of ranks.
        micro_batches: number of micro-batches of a step.
        chunks: stages per rank, for interleaved (2 if not given) and inference (1).

    Raises:
        ScheduleError: the name is unknown, the schedule does not take these sizes, or `chunks` is not its fixed number
            of stages per rank.
    """
    if name not in BUILDERS:
        raise ScheduleError(f"schedule: got {name!r}, expected one of {', '.join(BUILDERS)}, or a Schedule of your own")
    fixed = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zbv": 2}
    if chunks is None:
        return BUILDERS[name](ranks, micro_batches)
    if name in fixed:
        if chunks != fixed[name]:
            raise ScheduleError(f"{name}: got chunks={chunks}, this schedule has {fixed[name]} per rank")
        return BUILDERS[name](ranks, micro_batches)
    return BUILDERS[name](ranks, micro_batches, chunks)
