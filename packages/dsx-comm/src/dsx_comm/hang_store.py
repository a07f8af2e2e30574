"""The hang explainer's part of the job's store: alarms, and what the ranks answer to them."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from .meeting import fresh_prefix

__all__ = ["answers", "collect", "connected"]


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


def collect(store: Any, alarm: str) -> dict[int, Any]:
    """The answers to an alarm that are there, by rank."""
    keys = {rank: f"{alarm}/{rank}" for rank in range(dist.get_world_size())}
    return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
