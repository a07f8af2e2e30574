"""`log_summary`: the log as a table and as a dictionary, and the straggler analysis across ranks."""

from __future__ import annotations

import sys
import time
from typing import Any

from .bandwidth import gbps, size_text, trimmed_mean
from .groups import get_rank, get_world_size, is_initialized
from .log import LOG, Entry

_COLUMNS = "{:<28}{:>14}{:>8}{:>20}{:>18}{:>18}{:>18}"
_HEADS = ("Comm. Op", "Message Size", "Count")
_HEADS += ("Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)")
_STRAGGLER = "{:>22}{:>22}"


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the communication log on rank 0; every rank calls it when `show_straggler` is set.

    Args:
        show_straggler: add, per row, how much of this rank's time was waiting: the sum over calls of its latency minus
            the lowest latency any rank had in that call. Ranks exchange their latencies for it.
        return_dict: return the numbers, on every rank.

    Returns:
        {"summary": {name: {bytes: {...}}}, "straggler_analysis": ... or None, "metadata": {...}} or None.
        Calls of one name and size in groups of different sizes are one row; its bandwidth is that of the mix.
    """
    from .exchange import barrier  # after the group is known to be there

    entries = LOG.entries()
    together = show_straggler and is_initialized() and get_world_size() > 1
    stragglers = _stragglers(entries) if together else ({} if show_straggler else None)
    rank = get_rank() if is_initialized() else 0
    summary = _summary(entries)
    if rank == 0:
        sys.stdout.write(_table(summary, stragglers))
        sys.stdout.flush()
    if together:
        barrier()
    if not return_dict:
        return None
    world = get_world_size() if is_initialized() else 1
    metadata = {"world_size": world, "rank": rank, "timestamp": time.time(), "pending": LOG.pending()}
    return {"summary": summary, "straggler_analysis": stragglers, "metadata": metadata}


def _summary(entries: dict[Any, Entry]) -> dict[str, dict[int, dict[str, Any]]]:
    rows: dict[str, dict[int, list[Entry]]] = {}
    for (name, message, _), entry in entries.items():
        rows.setdefault(name, {}).setdefault(message, []).append(entry)
    return {
        name: {message: _row(message, mix) for message, mix in sorted(sizes.items())} for name, sizes in rows.items()
    }


def _row(message: int, mix: list[Entry]) -> dict[str, Any]:
    count = sum(e.count for e in mix)
    rates = [(gbps(e.op, message, t, e.size)) for e in mix for t in e.samples]
    return {
        "count": count,
        "total_latency_ms": sum(e.total_ms for e in mix),
        "avg_latency_ms": trimmed_mean([t for e in mix for t in e.samples]),
        "tput_avg_gbps": trimmed_mean([a for a, _ in rates]),
        "busbw_avg_gbps": trimmed_mean([b for _, b in rates]),
        "msg_size_bytes": message,
        "msg_size_str": size_text(message),
    }


def _stragglers(entries: dict[Any, Entry]) -> dict[str, dict[int, dict[str, Any]]]:
    """Per row: this rank's latencies and what it waited. Rows that ranks recorded differently often are marked."""
    from .objects import all_gather_object

    mine = {key: list(entry.samples) for key, entry in entries.items()}
    by_rank: list[dict[Any, list[float]]] = [{} for _ in range(get_world_size())]
    all_gather_object(by_rank, mine)
    result: dict[str, dict[int, dict[str, Any]]] = {}
    for key, latencies in mine.items():
        name, message, size = key
        others = [theirs[key] for theirs in by_rank if key in theirs]
        comparable = all(len(o) == len(latencies) for o in others) and len(others) == size
        waited = sum(own - min(o[i] for o in others) for i, own in enumerate(latencies)) if comparable else None
        row = result.setdefault(name, {}).setdefault(
            message, {"total_comm_lat_ms": 0.0, "total_straggler_ms": 0.0, "comparable": True}
        )
        row["total_comm_lat_ms"] += sum(latencies)
        row["comparable"] &= comparable
        row["total_straggler_ms"] += waited or 0.0
    return result


def _table(summary: dict[str, dict[int, dict[str, Any]]], stragglers: dict[str, Any] | None) -> str:
    lines = [_COLUMNS.format(*_HEADS)]
    if stragglers is not None:
        lines[0] += _STRAGGLER.format("Total Comm Lat(ms)", "Total straggler(ms)")
    for name, sizes in summary.items():
        lines.append(name)
        for message, row in sizes.items():
            numbers = [row["total_latency_ms"], row["avg_latency_ms"], row["tput_avg_gbps"], row["busbw_avg_gbps"]]
            line = _COLUMNS.format("", row["msg_size_str"], row["count"], *(f"{n:.2f}" for n in numbers))
            waited = (stragglers or {}).get(name, {}).get(message)
            if waited is not None:
                text = f"{waited['total_straggler_ms']:.2f}" if waited["comparable"] else "differs by rank"
                line += _STRAGGLER.format(f"{waited['total_comm_lat_ms']:.2f}", text)
            lines.append(line)
    return "\n".join(lines) + "\n"
