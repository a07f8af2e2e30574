"""The state of a rendezvous in a store, as JSON.

torch's backend keeps the state as a pickle, and every agent loads it at every heartbeat: whoever reaches the store can
run code in the agents. Here the store holds numbers and names only, and what is not exactly such a state is refused.
torch's state holder takes and gives pickles; those are made and read within this process.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from dsx_core import strict_json
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
)

__all__ = ["JsonState", "state_from_text", "text_of_state"]

_NOTHING = "{}"  # a read of a key that is not there would wait for it
_MOST_CHARACTERS = 1 << 24  # of a state of 100 000 hosts


def text_of_state(state: _RendezvousState) -> str:
    """The state as JSON."""
    return json.dumps({
        "round": state.round,
        "complete": state.complete,
        "deadline": None if state.deadline is None else state.deadline.isoformat(),
        "closed": state.closed,
        "participants": [[*_listed(node), rank] for node, rank in state.participants.items()],
        "wait_list": sorted(map(_listed, state.wait_list)),
        "redundancy_list": sorted(map(_listed, state.redundancy_list)),
        "last_heartbeats": [[*_listed(node), when.isoformat()] for node, when in state.last_heartbeats.items()],
    })  # fmt: skip


def state_from_text(text: str) -> _RendezvousState:
    """The state of a text. Raises ValueError for anything that `text_of_state` does not make."""
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"got {len(text)} characters, expected at most {_MOST_CHARACTERS}")
    told = strict_json.parse(text)
    state = _RendezvousState()
    if not isinstance(told, dict) or set(told) != set(vars(state)):
        raise ValueError(f"expected an object with {', '.join(vars(state))}")
    state.round = _of_kind(int, told["round"])
    state.complete, state.closed = _of_kind(bool, told["complete"]), _of_kind(bool, told["closed"])
    state.deadline = None if told["deadline"] is None else _time(told["deadline"])
    state.participants = {_node(one[:-1]): _of_kind(int, one[-1]) for one in _lists(told["participants"])}
    state.wait_list = {_node(one) for one in _lists(told["wait_list"])}
    state.redundancy_list = {_node(one) for one in _lists(told["redundancy_list"])}
    state.last_heartbeats = {_node(one[:-1]): _time(one[-1]) for one in _lists(told["last_heartbeats"])}
    return state


def _listed(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _lists(value: Any) -> list[list[Any]]:
    return [_of_kind(list, one) for one in _of_kind(list, value)]


def _node(told: list[Any]) -> _NodeDesc:
    if len(told) != 3:
        raise ValueError(f"got {len(told)} values for a host, expected address, process id and number")
    return _NodeDesc(_of_kind(str, told[0]), _of_kind(int, told[1]), _of_kind(int, told[2]))


def _time(told: Any) -> datetime:
    when = datetime.fromisoformat(_of_kind(str, told))
    if when.tzinfo is None:
        raise ValueError("a time without its zone")
    return when.astimezone(timezone.utc)


def _of_kind(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"got {type(value).__name__}, expected {kind.__name__}")
    return value


class JsonState(RendezvousBackend):
    """Keeps the state of one job in a store.

    Args:
        store: where all hosts of the job look.
        run_id: of the job.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self.key = f"dsx.rendezvous.{run_id}"
        self._ask(lambda: store.compare_set(self.key, "", _NOTHING))

    @property
    def name(self) -> str:
        """See torch."""
        return "dsx-json"

    def get_state(self) -> tuple[bytes, Token] | None:
        """See torch."""
        return self._given(self._ask(lambda: self._store.get(self.key)))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """See torch."""
        own = text_of_state(pickle.loads(state))  # torch has made it in this process a moment ago
        before = token.decode() if isinstance(token, bytes) else _NOTHING
        there = self._ask(lambda: self._store.compare_set(self.key, before, own))
        given = self._given(there)
        return None if given is None else (*given, there == own.encode())

    def _given(self, there: bytes) -> tuple[bytes, Token] | None:
        if there == _NOTHING.encode():
            return None
        try:
            state = state_from_text(there.decode())
        except (ValueError, RecursionError, IndexError, OverflowError) as error:
            raise RendezvousStateError(
                f"the store holds something else than a state under {self.key!r} ({error}): a program that is not part"
                " of the job writes to it"
            ) from error
        return pickle.dumps(state), there

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (ValueError, RuntimeError) as error:
            raise RendezvousConnectionError(f"the store does not answer: {error}") from error
