"""The state of a rendezvous in a store, as JSON.

torch's backend keeps the state as a pickle, and every agent loads it at every heartbeat: whoever reaches the store can
run code in the agents. Here the store holds numbers and names only, and what is not exactly such a state is refused.
torch's state holder takes and gives pickles; those are made and read within this process. The hosts' signs of life are
not part of the state that all of them replace (`elastic_beats.py`).
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

from .elastic_beats import Beats

__all__ = ["JsonState", "state_from_text", "text_of_state"]

_NOTHING = "{}"  # a read of a key that is not there would wait for it
_MOST_CHARACTERS = 1 << 24  # of a state of 100 000 hosts


def text_of_state(state: _RendezvousState) -> str:
    """The state without the hosts' signs of life, as JSON."""
    return json.dumps({
        "round": state.round,
        "complete": state.complete,
        "deadline": None if state.deadline is None else state.deadline.isoformat(),
        "closed": state.closed,
        "participants": [[*_listed(node), rank] for node, rank in state.participants.items()],
        "wait_list": sorted(map(_listed, state.wait_list)),
        "redundancy_list": sorted(map(_listed, state.redundancy_list)),
    })  # fmt: skip


def state_from_text(text: str) -> _RendezvousState:
    """The state of a text. Raises ValueError for anything that `text_of_state` does not make."""
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"got {len(text)} characters, expected at most {_MOST_CHARACTERS}")
    told = strict_json.parse(text)
    state = _RendezvousState()
    names = vars(state).keys() - {"last_heartbeats"}
    if not isinstance(told, dict) or set(told) != names:
        raise ValueError(f"expected an object with {', '.join(sorted(names))}")
    state.round = _of_kind(int, told["round"])
    state.complete, state.closed = _of_kind(bool, told["complete"]), _of_kind(bool, told["closed"])
    state.deadline = None if told["deadline"] is None else _time(told["deadline"])
    state.participants = {_node(one[:-1]): _of_kind(int, one[-1]) for one in _lists(told["participants"])}
    state.wait_list = {_node(one) for one in _lists(told["wait_list"])}
    state.redundancy_list = {_node(one) for one in _lists(told["redundancy_list"])}
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
        keep_alive_s: seconds between two signs of life of a host.
    """

    def __init__(self, store: Store, run_id: str, keep_alive_s: float = 1.0) -> None:
        self._store = store
        self.key = f"dsx.rendezvous.{run_id}"
        self._beats = Beats(store, f"{self.key}.beat", keep_alive_s)
        self._heard: dict[_NodeDesc, datetime] = {}
        self._ask(lambda: store.compare_set(self.key, "", _NOTHING))

    @property
    def name(self) -> str:
        """See torch."""
        return "dsx-json"

    def get_state(self) -> tuple[bytes, Token] | None:
        """See torch."""
        return self._given(self._ask(lambda: self._store.get(self.key)))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """See torch. A sign of life alone leaves the state as it is."""
        made: _RendezvousState = pickle.loads(state)  # torch has made it in this process a moment ago
        own = text_of_state(made)
        before = token.decode() if isinstance(token, bytes) else _NOTHING
        for node, when in made.last_heartbeats.items():
            if self._heard.get(node) != when:  # torch has changed this host's only
                self._ask(lambda node=node, when=when: self._beats.give(node, when))
        if own == before:
            there = self._ask(lambda: self._store.get(self.key))
        else:
            there = self._ask(lambda: self._store.compare_set(self.key, before, own))
        given = self._given(there)
        return None if given is None else (*given, own == before or there == own.encode())

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
        nodes = {*state.participants, *state.wait_list, *state.redundancy_list}
        self._heard = state.last_heartbeats = self._ask(lambda: self._beats.heard(nodes))
        return pickle.dumps(state), there

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (ValueError, RuntimeError) as error:
            raise RendezvousConnectionError(f"the store does not answer: {error}") from error
