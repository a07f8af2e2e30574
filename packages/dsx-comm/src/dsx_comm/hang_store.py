"""The hang explainer's part of the job's store: alarms, what the ranks answer to them, and the report that one rank
makes of the answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from .meeting import fresh_prefix

__all__ = ["answer", "answers", "collect", "connected", "publish", "published"]


def connected(state: Any) -> Any:
    """The part of the store that is this world's alarms. `state`: of the watch, which knows the part's name."""
    own = _own_connection()
    if not state.prefix:  # the store may have alarms of an earlier world
        state.prefix = fresh_prefix(own, "dsx_hang", dist.get_rank())
    store = dist.PrefixStore(state.prefix, own)  # pyright: ignore[reportPrivateImportUsage]
    state.departures.connect(store)
    return store


def answers(store: Any) -> bool:
    """Whether the store is there."""
    try:
        store.check(["alarm/0"])
    except Exception:  # noqa: BLE001 - also where it was never reached
        return False
    return True


def _own_connection() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        return store.clone()  # another thread may be blocked inside the job's own one
    except (AttributeError, RuntimeError):  # not every kind of store has it
        return store


def answer(store: Any, alarm: str, rank: int, said: Any) -> None:
    """Leave this rank's answer to an alarm: one request. The answers of all ranks are one value, so that they are one
    request for who reads them; where the kind of store cannot add to a value, each is one of its own.
    """
    text = json.dumps(said)
    if store.has_extended_api():
        store.append(f"{alarm}/answers", f"{rank} {text}\n")
    else:
        store.set(f"{alarm}/{rank}", text)


def collect(store: Any, alarm: str) -> dict[int, Any]:
    """The answers to an alarm that are there, by rank. For one rank to call."""
    if store.has_extended_api():
        lines = store.get(f"{alarm}/answers").decode().splitlines()
        return {int(rank): json.loads(text) for rank, text in (line.split(" ", 1) for line in lines)}
    keys = {rank: f"{alarm}/{rank}" for rank in range(dist.get_world_size())}
    return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}


def publish(store: Any, alarm: str, text: str, missing: Sequence[int]) -> None:
    """Leave the report for the other ranks."""
    store.set(f"{alarm}/report", json.dumps([text, list(missing)]))


def published(store: Any, alarm: str) -> tuple[str, tuple[int, ...]] | None:
    """The report and the missing ranks, if they are there."""
    if not store.check([f"{alarm}/report"]):
        return None
    text, missing = json.loads(store.get(f"{alarm}/report"))
    return text, tuple(missing)
