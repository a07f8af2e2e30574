"""Checks a schedule: completeness, order, matching sends and receives, deadlock, memory.

`problems` lists everything that is wrong, `check` raises an error that lists it. The rules:

1. Every stage does the forward of every micro-batch once, on its own rank; if the schedule trains, also its backward,
   whole (B) or as input (I) and weight (W) parts.
2. On a rank a backward comes after its forward, and W after I.
3. If sends and receives are explicit, each send has exactly one receive on the neighbouring stage's rank and each
   receive has exactly one send; an output is computed before it is sent, an input is received before it is used.
4. There is no deadlock. With explicit sends the check is strict: a send waits until the receiver has
   come to its receive (rendezvous). If a program ends under rendezvous and its receives name their sender, it also ends
   with any amount of buffering, because more buffering only lets sends return earlier.
5. With `max_live`, no rank keeps more micro-batches' activations than that.
"""

from __future__ import annotations

from collections import Counter

from ..errors import ScheduleError
from .action import Action, Kind
from .plan import Schedule
from .simulate import simulate, uniform_times

_MAX_LISTED = 12  # largest number of problems that a message lists


def check(schedule: Schedule, *, max_live: int | None = None) -> None:
    """Raise `ScheduleError` with the problems of a schedule; return if there are none.

    `max_live` is the largest number of activations that a rank may keep; see `live_activations`.
    """
    found = problems(schedule, max_live=max_live)
    if found:
        more = f"\n  and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        listed = "\n  ".join(found[:_MAX_LISTED])
        raise ScheduleError(f"schedule {schedule.name!r} cannot be executed:\n  {listed}{more}")


def problems(schedule: Schedule, *, max_live: int | None = None) -> list[str]:
    """Everything that is wrong with a schedule, as sentences. The list is empty if the schedule is right."""
    found = _size_problems(schedule)
    if found:
        return found  # the other checks need valid stages, ranks and micro-batches
    found = _completeness_problems(schedule) + _order_problems(schedule) + _message_problems(schedule)
    if not found:
        found = _deadlock_problems(schedule)
    if max_live is not None:
        found += [
            f"rank {rank} keeps the activations of {live} micro-batches, the limit is {max_live}"
            for rank, live in enumerate(live_activations(schedule)) if live > max_live
        ]  # fmt: skip
    return found


def live_activations(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the greatest number of (stage, micro-batch) activations it keeps at one time.

    An activation is kept from its forward to the end of its backward; if the backward is split, to the end of W. A
    schedule without backward keeps nothing.
    """
    found = []
    for row in schedule.actions:
        live = most = 0
        for action in row:
            if action.kind is Kind.FORWARD and schedule.trains:
                live += 1
                most = max(most, live)
            elif action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                live -= 1
        found.append(most)
    return tuple(found)


def _size_problems(schedule: Schedule) -> list[str]:
    found = []
    if schedule.micro_batches < 1:
        found.append(f"micro_batches is {schedule.micro_batches}, expected at least 1")
    if not schedule.actions or not schedule.stage_ranks:
        found.append("there are no ranks or no stages")
    for stage, rank in enumerate(schedule.stage_ranks):
        if not 0 <= rank < schedule.ranks:
            found.append(f"stage {stage} lies on rank {rank}, the ranks are 0..{schedule.ranks - 1}")
    found += [
        f"rank {rank} holds no stage" for rank in range(schedule.ranks) if rank not in schedule.stage_ranks
    ]  # fmt: skip
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if not 0 <= action.stage < schedule.stages:
                found.append(f"rank {rank}: {action}: the stages are 0..{schedule.stages - 1}")
            elif schedule.stage_ranks[action.stage] != rank:
                found.append(
                    f"rank {rank}: {action}: stage {action.stage} is on rank {schedule.stage_ranks[action.stage]}"
                )
            elif not 0 <= action.micro_batch < schedule.micro_batches:
                found.append(f"rank {rank}: {action}: the micro-batches are 0..{schedule.micro_batches - 1}")
    return found


def _completeness_problems(schedule: Schedule) -> list[str]:
    counts = Counter(action for row in schedule.actions for action in row)
    found = [f"{action} appears {n} times" for action, n in counts.items() if n > 1]
    for stage in range(schedule.stages):
        for m in range(schedule.micro_batches):
            forward, whole, part, weight = (
                Action(stage, kind, m) in counts for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
            )
            if not forward:
                found.append(f"{Action(stage, Kind.FORWARD, m)} is missing")
            if whole and (part or weight):
                found.append(f"stage {stage}, micro-batch {m}: B together with I or W; expected B, or I and W")
            elif part != weight:
                missing = Kind.WEIGHT if part else Kind.INPUT
                found.append(f"{Action(stage, missing, m)} is missing")
            elif schedule.trains and not whole and not part:
                found.append(f"{Action(stage, Kind.BACKWARD, m)} is missing (or its I and W)")
    return found


def _order_problems(schedule: Schedule) -> list[str]:
    found = []
    for rank, row in enumerate(schedule.actions):
        at = {action: i for i, action in enumerate(row)}
        for action, i in at.items():
            for earlier in _earlier_on_rank(schedule, action):
                present = [a for a in earlier if a in at]
                if present and at[present[0]] > i:
                    found.append(f"rank {rank}: {action} comes before {present[0]}")
    return found


def _earlier_on_rank(schedule: Schedule, action: Action) -> list[tuple[Action, ...]]:
    stage, m = action.stage, action.micro_batch
    forward, grad = Action(stage, Kind.FORWARD, m), (Action(stage, Kind.BACKWARD, m), Action(stage, Kind.INPUT, m))
    return {
        Kind.FORWARD: [(Action(stage, Kind.RECV_F, m),)],
        Kind.BACKWARD: [(forward,), (Action(stage, Kind.RECV_B, m),)],
        Kind.INPUT: [(forward,), (Action(stage, Kind.RECV_B, m),)],
        Kind.WEIGHT: [(Action(stage, Kind.INPUT, m),)],
        Kind.SEND_F: [(forward,)],
        Kind.SEND_B: [grad],
        Kind.RECV_F: [],
        Kind.RECV_B: [],
    }[action.kind]


def _message_problems(schedule: Schedule) -> list[str]:
    if not schedule.communicates:
        return []
    present = {action for row in schedule.actions for action in row}
    found = []
    for action in sorted((a for a in present if not a.kind.computes), key=str):
        peer = action.peer_stage()
        if not 0 <= peer < schedule.stages:
            found.append(f"{action}: stage {action.stage} has no neighbour there")
        elif schedule.stage_ranks[peer] == schedule.stage_ranks[action.stage]:
            found.append(f"{action}: stages {action.stage} and {peer} are on one rank and need no message")
        elif action.counterpart() not in present:
            other = "receive" if action.kind.sends else "send"
            found.append(
                f"{action} has no {other}: {action.counterpart()} is missing on rank {schedule.stage_ranks[peer]}"
            )
    for stage in range(schedule.stages):
        for m in range(schedule.micro_batches):
            for receive in _needed_receives(schedule, stage):
                if Action(stage, receive, m) not in present:
                    found.append(f"{Action(stage, receive, m)} is missing: stage {stage} needs it")
    return found


def _needed_receives(schedule: Schedule, stage: int) -> list[Kind]:
    rank = schedule.stage_ranks
    needed = []
    if stage > 0 and rank[stage - 1] != rank[stage]:
        needed.append(Kind.RECV_F)
    if schedule.trains and stage < schedule.stages - 1 and rank[stage + 1] != rank[stage]:
        needed.append(Kind.RECV_B)
    return needed


def _deadlock_problems(schedule: Schedule) -> list[str]:
    try:
        simulate(schedule, uniform_times(schedule.stages))
    except ScheduleError as error:
        return [str(error)]
    return _rendezvous_problems(schedule) if schedule.communicates else []


def _rendezvous_problems(schedule: Schedule) -> list[str]:
    """Execute the schedule with sends that wait for their receive. Computations are not checked again here."""
    position = [0] * schedule.ranks
    progressed = True
    while progressed:
        progressed = False
        for rank, row in enumerate(schedule.actions):
            while position[rank] < len(row):
                action = row[position[rank]]
                if not action.kind.computes:
                    peer = schedule.stage_ranks[action.peer_stage()]
                    theirs = schedule.actions[peer]
                    if position[peer] >= len(theirs) or theirs[position[peer]] != action.counterpart():
                        break
                    position[peer] += 1
                position[rank] += 1
                progressed = True
    waiting = [f"rank {r} at {row[position[r]]}" for r, row in enumerate(schedule.actions) if position[r] < len(row)]
    if not waiting:
        return []
    return [f"deadlock without buffering (a send waits for its receive): {', '.join(waiting)}"]
