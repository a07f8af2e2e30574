"""The known schedules, as functions from sizes to data.

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

from ..errors import ScheduleError
from .action import Action, Kind
from .plan import Schedule

_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT


def _sizes(ranks: int, micro_batches: int, chunks: int = 1) -> None:
    for name, value in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{name}: got {value!r}, expected a whole number of at least 1")


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards."""
    _sizes(ranks, micro_batches)
    every = range(micro_batches)
    rows = tuple(tuple([Action(r, _F, m) for m in every] + [Action(r, _B, m) for m in every]) for r in range(ranks))
    return Schedule("gpipe", micro_batches, tuple(range(ranks)), rows)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """1F1B: rank s does p - s - 1 forwards first, then one forward and one backward in turn, then what is left."""
    _sizes(ranks, micro_batches)
    rows = tuple(
        _ahead_then_in_turn(
            [Action(r, _F, m) for m in range(micro_batches)],
            [[Action(r, _B, m)] for m in range(micro_batches)],
            ahead=ranks - r - 1,
        )
        for r in range(ranks)
    )
    return Schedule("1f1b", micro_batches, tuple(range(ranks)), rows)


def _ahead_then_in_turn(
    forwards: Sequence[Action], backwards: Sequence[Sequence[Action]], *, ahead: int
) -> tuple[Action, ...]:
    """One rank's list: `ahead` forwards, then a forward and a backward in turn, then backwards only.

    `backwards` has as many entries as `forwards`; each is what the rank does for one backward.
    """
    row = list(forwards[:ahead])
    for k, actions in enumerate(backwards):
        row += forwards[k + ahead : k + ahead + 1]
        row += actions
    return tuple(row)


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: rank r holds the stages r, r + p, r + 2p, ...; micro-batches go in groups of p.

    Raises:
        ScheduleError: the number of micro-batches is no multiple of the number of ranks.
    """
    _sizes(ranks, micro_batches, chunks)
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
        _ahead_then_in_turn(
            [nth(r, k, _F) for k in range(total)],
            [[nth(r, k, _B)] for k in range(total)],
            ahead=2 * (ranks - r - 1) + (chunks - 1) * ranks,
        )
        for r in range(ranks)
    )
    return Schedule(f"interleaved-{chunks}", micro_batches, tuple(s % ranks for s in range(ranks * chunks)), rows)


def zero_bubble_h1(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B with the weight backward apart and done s micro-batches later on rank s.

    Rank s would idle at the start and at the end where 1F1B does; it keeps its weight backwards for the end. It so
    keeps min(p, m) activations at most, as many as rank 0 of 1F1B.
    """
    _sizes(ranks, micro_batches)
    rows = []
    for r in range(ranks):
        backwards = [[Action(r, _I, m)] + ([Action(r, _W, m - r)] if m >= r else []) for m in range(micro_batches)]
        row = _ahead_then_in_turn([Action(r, _F, m) for m in range(micro_batches)], backwards, ahead=ranks - r - 1)
        rows.append((*row, *(Action(r, _W, m) for m in range(max(micro_batches - r, 0), micro_batches))))
    return Schedule("zb-h1", micro_batches, tuple(range(ranks)), tuple(rows))


def zero_bubble_v(ranks: int, micro_batches: int) -> Schedule:
    """ZBV: rank r holds the stages r and 2p - 1 - r, so that the last stage is on the same rank as the first.

    Each rank's list is found by carrying the step out in time units of F = I = W: a rank takes the input backward that
    has waited longest, else a forward (of its second stage first) while it keeps fewer than 2p activations, else a
    weight backward. Before each weight backward it looks whether it may still take a forward.
    """
    _sizes(ranks, micro_batches)
    stage_ranks = tuple(range(ranks)) + tuple(reversed(range(ranks)))
    planner = _VShape(ranks, micro_batches)
    return Schedule("zbv", micro_batches, stage_ranks, planner.rows())


class _VShape:
    """A step of ZBV carried out in unit time, each rank with the rule of `zero_bubble_v`."""

    def __init__(self, ranks: int, micro_batches: int) -> None:
        self.ranks, self.micro_batches, self.last = ranks, micro_batches, 2 * ranks - 1
        self.done_at: dict[Action, int] = {}
        self.next: dict[tuple[int, Kind], int] = {(s, k): 0 for s in range(2 * ranks) for k in (_F, _I, _W)}

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        rows: list[list[Action]] = [[] for _ in range(self.ranks)]
        total = 6 * self.micro_batches  # two stages, three actions
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
            return min(ready, key=self._waits_since)
        kept = sum(self.next[s, _F] - self.next[s, _W] for s in (first, second))
        # the second stage's forward frees memory soon; the first stage leaves room for it
        for stage, limit in ((second, 2 * self.ranks), (first, 2 * self.ranks - (1 if self._owes(rank) else 0))):
            action = self._ready(stage, _F, time)
            if action is not None and kept < limit:
                return action
        weights = [a for s in (first, second) if (a := self._ready(s, _W, time)) is not None]
        return min(weights, key=self._waits_since) if weights else None

    def _owes(self, rank: int) -> bool:
        """True while forwards of the second stage are still to come for what the first stage has taken."""
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

    def _waits_since(self, action: Action) -> tuple[int, int]:
        before = Action(action.stage, _F if action.kind is _I else _I, action.micro_batch)
        after = Action(action.stage + 1, _I, action.micro_batch)
        return max(self.done_at.get(before, 0), self.done_at.get(after, 0)), -action.stage


def inference(ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Forward only: `micro_batches` through `ranks` x `chunks` stages. With several stages per rank they lie as in
    `interleaved`. Raises `ScheduleError` for a number below 1.
    """
    _sizes(ranks, micro_batches, chunks)
    stage_ranks = tuple(s % ranks for s in range(ranks * chunks))
    return inference_over(stage_ranks, micro_batches)


def inference_over(stage_ranks: tuple[int, ...], micro_batches: int) -> Schedule:
    """Forward only, for the placement of stages in `stage_ranks`: each micro-batch as early as possible."""
    _sizes(max(stage_ranks) + 1, micro_batches)
    rows: list[list[Action]] = [[] for _ in range(max(stage_ranks) + 1)]
    # micro-batch m reaches stage s at tick m + s if every stage takes one tick; stages of one rank take turns by that
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
        ScheduleError: no such schedule, sizes that it does not take, or `chunks` for one that has a fixed number.
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
