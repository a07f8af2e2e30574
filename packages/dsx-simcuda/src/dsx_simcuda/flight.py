"""Dumps of the flight recorder of the simulated NCCL, in the form of torch's own.

torch has a recorder for the CPU's collectives (`_dump_fr_trace`), and in CUDA builds one for NCCL's
(`_dump_nccl_trace`). The first also records the gloo group that carries the bytes of the simulated NCCL, which no
program has made: it is left out. Not recorded: durations, the time limits of calls, the threads' numbers, and each
message of a batch, which is one call here.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

from . import findings, native

VERSION = "2.10"
"""Of the form of a dump."""


def dump(
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
) -> bytes:
    """The pickled dump, as torch's `_dump_nccl_trace` returns it. Its arguments are torch's, and true by default but
    for the last one, which leaves out what has completed.
    """
    found = native.read("sim_flights")
    keys = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    content: dict[str, Any] = {
        "version": VERSION,
        "comm_lib_version": "simulated",
        "pg_config": {
            name: {"name": name, "desc": group["about"], "ranks": str(group["ranks"])}
            for name, group in found["groups"].items()
        },
        "pg_status": {group: dict(zip(keys, status)) for group, status in found["status"].items()},
    }
    if includeCollectives is not False:
        calls = [call for call in found["calls"] if not (onlyActive and call["completed"])]
        content["entries"] = [_entry(call, includeStackTraces is not False) for call in calls]
    return pickle.dumps(content, protocol=2)


def _entry(call: dict[str, Any], with_stack: bool) -> dict[str, Any]:
    message = bool(call["message"])
    state = "completed" if call["completed"] else "started" if call["started"] else "scheduled"
    entry: dict[str, Any] = {
        "record_id": call["id"],
        "pg_id": call["group"],
        "process_group": (call["group_name"], call["group_about"]),
        "collective_seq_id": 0 if message else call["number"],
        "p2p_seq_id": call["number"] if message else 0,
        "op_id": call["id"],
        "profiling_name": call["name"],
        "thread_name": call["thread"],
        "time_created_ns": call["launched"],
        "time_discovered_started_ns": call["started"] or None,
        "time_discovered_completed_ns": call["completed"] or None,
        "state": state,
        "retired": state == "completed",
        "is_p2p": message,
    }
    for side in ("input", "output"):
        entry |= {f"{side}_sizes": call[f"{side}s"]["sizes"], f"{side}_dtypes": call[f"{side}s"]["types"]}
    if with_stack:
        frames = findings.stack_of(call["stack"])
        entry["frames"] = [{"name": f.function, "filename": f.file, "line": f.line} for f in frames]
    return entry


def without_group(name: str, recorder: Callable[..., bytes]) -> Callable[..., bytes]:
    """torch's recorder `recorder` without the groups of this name."""
    hidden: set[str] = set()
    lock = threading.Lock()

    def dump_without(
        includeCollectives: bool | None = None,
        includeStackTraces: bool | None = None,
        onlyActive: bool | None = None,
    ) -> bytes:
        with lock:  # the entries tell which groups are hidden, so all are asked for
            stacks = includeCollectives is not False and includeStackTraces is not False
            content = pickle.loads(recorder(True, stacks, False))  # made by this process a moment ago
            entries = content.pop("entries", [])
            hidden.update(str(entry["pg_id"]) for entry in entries if entry["process_group"][0] == name)
        if includeCollectives is not False:
            shown = (entry for entry in entries if str(entry["pg_id"]) not in hidden)
            content["entries"] = [
                entry for entry in shown if not (onlyActive and entry["time_discovered_completed_ns"])
            ]
        content["pg_status"] = {key: status for key, status in content["pg_status"].items() if key not in hidden}
        content["pg_config"].pop(name, None)
        return pickle.dumps(content, protocol=2)

    return dump_without
