"""Adds explicit sends and receives to a schedule, so that it also runs if a send waits for its receive.

The idea: put all actions of all ranks into one sequence, sorted by the end of each action in a simulated step, and put
every message directly after the action that produces it. Each rank's list is its part of that sequence. The sequence
itself is a valid serial run, so ranks cannot wait for each other in a circle, with any amount of buffering.
"""

from __future__ import annotations

from collections.abc import Sequence

from .action import Action, Kind
from .plan import Schedule
from .simulate import StageTimes, simulate, uniform_times


def with_communication(schedule: Schedule, times: Sequence[StageTimes] | None = None) -> Schedule:
    """The schedule with explicit sends and receives. Sends and receives that it has already are replaced.

    Args:
        schedule: any schedule without a deadlock.
        times: seconds per stage, which decide the order of the messages; default: 1 for a forward, 2 for a backward.

    Raises:
        ScheduleError: the schedule has a deadlock.
    """
    plain = schedule.without_communication()
    timeline = simulate(plain, times or uniform_times(plain.stages))
    order = sorted(timeline.spans, key=lambda s: (s.end, s.start, s.rank))
    rows: list[list[Action]] = [[] for _ in range(plain.ranks)]
    for span in order:
        rows[span.rank].append(span.action)
        send = _send_after(plain, span.action)
        if send is not None:
            rows[span.rank].append(send)
            receive = send.counterpart()
            rows[plain.stage_ranks[receive.stage]].append(receive)
    return Schedule(plain.name, plain.micro_batches, plain.stage_ranks, tuple(map(tuple, rows)))


def _send_after(schedule: Schedule, action: Action) -> Action | None:
    """The send that follows an action; None if no other rank needs its result."""
    if action.kind is Kind.FORWARD:
        kind, peer = Kind.SEND_F, action.stage + 1
    elif action.kind in (Kind.BACKWARD, Kind.INPUT):
        kind, peer = Kind.SEND_B, action.stage - 1
    else:
        return None
    if not 0 <= peer < schedule.stages or schedule.stage_ranks[peer] == schedule.stage_ranks[action.stage]:
        return None
    return Action(action.stage, kind, action.micro_batch)
