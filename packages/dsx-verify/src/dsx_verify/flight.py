"""Reads and explains dumps of torch's flight recorder: which ranks are missing from which collective, or differ in it.

torch keeps the last collectives of each process group: operation, sizes, place in the program. Dumps of all ranks tell
why a job hangs, whichever system issued the calls; those of DDP's C++ code are in them, too. The functions here are
pure: they read dumps and compare them.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dsx_core.together import some_ranks

from .errors import AuditError

__all__ = ["Hang", "explain_dumps", "lateness", "read_dumps"]

_INSIDE = re.compile(r"/torch/(distributed|nn|autograd|_ops|utils)|/dsx_verify/")


@dataclass(frozen=True)
class Hang:
    """The reason that a process group does not continue.

    Attributes:
        kind: "missing" (ranks did not enter a collective), "other collective", "other sizes", "other dtypes",
            "other order" (of the calls of two groups), or "slow" (all ranks are in the same call).
        group: the group's description.
        number: of the collective in its group.
        operation: the collective.
        ranks: the ranks that are missing, or that differ from most of the others.
        text: the explanation, one line a rank.
    """

    kind: str
    group: str
    number: int
    operation: str
    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return self.text


class _Plain(pickle.Unpickler):
    """Dumps hold dicts, lists, texts and numbers. Anything else in a file is refused, as it could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump holds no {module}.{name}")


def read_dumps(paths: Iterable[str | Path]) -> dict[int, dict[str, Any]]:
    """Dumps from files, by rank: the number at the end of a file's name. Pickled as torch writes them, or JSON.

    Raises:
        AuditError: a file has no rank in its name, or is no dump.
    """
    found = {}
    for path in map(Path, paths):
        number = re.search(r"(\d+)(?:\.\w+)?$", path.name)
        if number is None:
            raise AuditError(f"{path}: expected a name that ends with the rank, such as trace_rank_3")
        content = path.read_bytes()
        try:
            dump = json.loads(content) if content[:1] == b"{" else _Plain(io.BytesIO(content)).load()
            entries = dump["entries"]
        except (ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            raise AuditError(f"{path} is no dump of torch's flight recorder: {error}") from error
        found[int(number[1])] = {**dump, "entries": entries}
    return found


def explain_dumps(
    dumps: Mapping[int, Mapping[str, Any]], places: Mapping[int, str] | None = None, *, world_size: int = 0
) -> Hang | None:
    """The reason that the job does not continue; None if no rank waits for a collective.

    Args:
        dumps: of each rank that could tell.
        places: where in the program each rank is, for those that wait for nothing.
        world_size: number of ranks; those without a dump did not answer.
    """
    found = [_of_group(group, dumps, places or {}, world_size) for group in _groups(dumps)]
    hangs = [hang for hang in found if hang is not None]
    order = ("other collective", "other sizes", "other dtypes", "missing", "other order", "slow")
    return min(hangs, key=lambda hang: (order.index(hang.kind), len(hang.ranks)), default=None)


def lateness(dumps: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """The delay of each rank behind the first one at collectives, in milliseconds: the median of those that are in
    all dumps. A rank that is late each time holds the others up. The ranks' clocks must agree.
    """
    late: dict[int, list[float]] = {rank: [] for rank in dumps}
    for group in _groups(dumps):
        calls = {rank: _calls(dump, group) for rank, dump in dumps.items()}
        calls = {rank: own for rank, own in calls.items() if own}
        for number in set.intersection(*(set(own) for own in calls.values())) if len(calls) > 1 else ():
            begun = {rank: own[number].get("time_created_ns", 0) for rank, own in calls.items()}
            for rank, when in begun.items():
                late[rank].append((when - min(begun.values())) / 1e6)
    return {rank: median(times) if times else 0.0 for rank, times in late.items()}


def _group(entry: Mapping[str, Any]) -> tuple[str, str]:
    """The group's name, and the backend: a group may have two, which number their calls apart."""
    return str(entry["process_group"][0]), str(entry["profiling_name"]).partition(":")[0]


def _groups(dumps: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(_group(entry) for dump in dumps.values() for entry in dump["entries"]))


def _calls(dump: Mapping[str, Any], group: tuple[str, str]) -> dict[int, Mapping[str, Any]]:
    """The collectives of a group by number; sends and receives are numbered apart, and left out."""
    own = (e for e in dump["entries"] if _group(e) == group and not e.get("is_p2p"))
    return {int(entry["collective_seq_id"]): entry for entry in own}


def _completed(dump: Mapping[str, Any], calls: Mapping[int, Mapping[str, Any]]) -> int:
    """The number of the last call that has ended."""
    if not calls:
        return 0
    ended = [number for number, entry in calls.items() if entry.get("state") == "completed" or entry.get("retired")]
    status = dump.get("pg_status", {}).get(str(next(iter(calls.values())).get("pg_id", "")), {})
    return max([0, *ended, int(status.get("last_completed_collective", 0))])  # torch says -1 for none


def _of_group(
    group: tuple[str, str], dumps: Mapping[int, Mapping[str, Any]], places: Mapping[int, str], world_size: int
) -> Hang | None:
    name, _ = group
    calls = {rank: _calls(dump, group) for rank, dump in dumps.items()}
    done = {rank: _completed(dumps[rank], own) for rank, own in calls.items()}
    waiting = {rank for rank, own in calls.items() if own and max(own) > done[rank]}
    if not waiting:
        return None
    number = min(done[rank] for rank in waiting) + 1
    members = _members(name, dumps, {rank for rank, own in calls.items() if own}, world_size)
    there = {rank: calls[rank][number] for rank in sorted(calls) if number in calls[rank]}
    absent = [rank for rank in members if rank not in there and max(calls.get(rank, {0: {}}), default=0) < number]
    silent = [rank for rank in range(world_size) if rank not in dumps and rank in (members or range(world_size))]
    operation = _operation(there[min(there)]) if there else "a collective"
    kind, odd = _kind(there, absent or silent)
    head = {
        "missing": f"rank {some_ranks(odd)} did not enter {operation}",
        "other collective": f"rank {some_ranks(odd)} called another collective than most ranks",
        "other sizes": f"rank {some_ranks(odd)} called it with other sizes than most ranks",
        "other dtypes": f"rank {some_ranks(odd)} called it with other dtypes than most ranks",
        "other order": f"rank {some_ranks(odd)} queued {operation} behind a call of another group, which waits, too",
        "slow": f"all ranks are in {operation}: a link or a device does not go on",
    }[kind]
    lines = [f"{head}; call {number} of group {name} ({_described(name, there)})"]
    for rank in members or sorted(dumps):
        shown = f" in {_dtypes(there[rank])}" if kind == "other dtypes" and rank in there else ""
        what = _operation(there[rank]) + shown + _at(there[rank]) if rank in there else "not there"
        place = f", now at {places[rank]}" if rank in places else ""
        lines.append(f"  rank {rank}: {'did not answer' if rank in silent else what + place}")
    return Hang(kind, name, number, operation, tuple(odd), "\n".join(lines[:20]))


def _kind(there: Mapping[int, Mapping[str, Any]], absent: list[int]) -> tuple[str, list[int]]:
    for kind, key in (("other collective", _name), ("other sizes", _sizes), ("other dtypes", _dtypes)):
        by_value: dict[Any, list[int]] = {}
        for rank, entry in there.items():
            by_value.setdefault(key(entry), []).append(rank)
        if len(by_value) > 1:
            most = max(by_value.values(), key=len)
            return kind, sorted(rank for ranks in by_value.values() if ranks is not most for rank in ranks)
    if absent:
        return "missing", absent
    queued = [rank for rank, entry in there.items() if entry.get("state") == "scheduled"]
    # Without timing, NCCL's recorder knows of no call that it has started: then the order is not known.
    return ("other order", queued) if 0 < len(queued) < len(there) else ("slow", [])


def _members(name: str, dumps: Mapping[int, Mapping[str, Any]], seen: set[int], world_size: int) -> list[int]:
    """Global ranks of a group; where no dump says them, those that have called something in it, and for the whole job
    all ranks.
    """
    for dump in dumps.values():
        config = dump.get("pg_config", {}).get(name) or (dump.get("pg_config", {}).get("") if name == "0" else None)
        if config and (ranks := re.findall(r"\d+", str(config.get("ranks")))):
            return sorted(map(int, ranks))
    return sorted({*range(world_size), *dumps} if name == "0" else seen)


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2]


def _sizes(entry: Mapping[str, Any]) -> str:
    return str(entry.get("input_sizes")) if _name(entry) not in ("gather", "scatter") else ""


def _dtypes(entry: Mapping[str, Any]) -> str:
    return ", ".join(map(str, entry.get("input_dtypes") or ()))


def _operation(entry: Mapping[str, Any]) -> str:
    return f"{_name(entry)} of {entry.get('input_sizes')}"


def _described(name: str, there: Mapping[int, Mapping[str, Any]]) -> str:
    entry = next(iter(there.values()), {"process_group": (name, "")})
    return str(entry["process_group"][1]) or "without a name"


def _at(entry: Mapping[str, Any]) -> str:
    frames = [f for f in entry.get("frames", ()) if not _INSIDE.search(str(f.get("filename", "")))]
    return f" at {frames[0]['filename']}:{frames[0]['line']} in {frames[0]['name']}" if frames else ""
