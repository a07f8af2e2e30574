"""The text of the hang explainer's report: pure functions of what the ranks answered."""

from __future__ import annotations

import json
import os
import traceback
from typing import Any

import torch.distributed as dist
from dsx_core.together import some_ranks

_MOST_LINES = 16  # in a report
_TRANSFERS = frozenset(("send", "recv", "isend", "irecv", "batch_isend_irecv"))
_OURS = (os.path.dirname(__file__), os.path.dirname(dist.__file__))


def place_of(frame: Any) -> str:
    """`file:line in function` of the innermost frame outside this package and torch.distributed."""
    if frame is None:
        return "an unknown place"
    stack = traceback.extract_stack(frame)
    theirs = [f for f in stack if not f.filename.startswith(_OURS)]
    last = (theirs or stack)[-1]
    return f"{last.filename}:{last.lineno} in {last.name}"


def missing_ranks(raised: dict[str, Any], answers: dict[int, Any]) -> list[int]:
    """The ranks that the call that `raised` names waits for, as far as the answers tell.

    Each rank issues as many collectives of a group as the others, but not as many sends and receives. So a rank is
    missing from a collective if it has issued fewer calls, and from a send or receive if it is in no call at all.
    """
    members = [r for r in sorted(answers) if answers[r]["member"]]
    if _is_transfer(raised):
        return [r for r in members if not answers[r]["in"]]
    return [r for r in members if answers[r]["issued"] < raised["number"]]


def _is_transfer(raised: dict[str, Any]) -> bool:
    return raised["what"].split()[0] in _TRANSFERS


def explain(raised: dict[str, Any], answers: dict[int, Any], world_size: int = 0) -> str:
    """A text that names the ranks missing from the call in `raised`, and the call that each rank is in.

    `answers` is by rank. Ranks of `world_size` that are not in it did not answer.
    """
    group, number = raised["group"], raised["number"]
    silent = [r for r in range(world_size) if r not in answers]
    missing = missing_ranks(raised, answers)
    head = f"{raised['what']} (call #{number} of group {group}) has waited {raised['waited']:.1f} s. "
    if missing and _is_transfer(raised):
        head += f"Rank(s) {_list(missing)} neither sent nor received meanwhile. "
    elif missing:
        head += f"Rank(s) {_list(missing)} did not enter it. "
    if silent:
        head += f"Rank(s) {_list(silent)} did not answer (ended, frozen, or busy without giving up the interpreter). "
    if not missing and not silent:
        head += "All ranks have issued it: they may differ in what they called. "
    return "\n".join([head.rstrip(), *_lines(answers)])


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= _MOST_LINES else some_ranks(ranks)


def _lines(answers: dict[int, Any]) -> list[str]:
    """A line for each rank, or of many ranks one for those that do the same at the same place: the text goes to all."""
    if len(answers) <= _MOST_LINES:
        return [_line(rank, answers[rank]) for rank in sorted(answers)]
    alike: dict[str, list[int]] = {}
    for rank in sorted(answers):
        alike.setdefault(json.dumps({**answers[rank], "for": None}), []).append(rank)
    kinds = sorted(alike.values(), key=len)  # few ranks that do something else are the reason
    lines = [
        f"  rank(s) {some_ranks(ranks)}, as rank{_line(ranks[0], answers[ranks[0]]).removeprefix('  rank')}"
        if len(ranks) > 1
        else _line(ranks[0], answers[ranks[0]])
        for ranks in kinds[: _MOST_LINES - 1]
    ]
    others = [rank for ranks in kinds[_MOST_LINES - 1 :] for rank in ranks]
    return [*lines, f"  rank(s) {some_ranks(others)}: in calls and at places of their own"] if others else lines


def _line(rank: int, answer: dict[str, Any]) -> str:
    inside = answer["in"]
    if inside:
        label = f" for {inside['label']}" if inside["label"] else ""
        call = f"(call #{inside['number']} of group {inside['group']})"
        text = f"in {inside['what']}{label} {call} since {answer['for']:.1f} s"
    else:
        text = f"in no communication; last call of this group: #{answer['issued']} {answer['last']}"
    return f"  rank {rank}: {text}, at {answer['at']}"
