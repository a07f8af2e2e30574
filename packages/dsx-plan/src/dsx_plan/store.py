"""State on disk in a replay: names and sizes, no file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .ledger import DISK
from .recorder import Recorder

__all__ = ["PlannedStore"]


class _Transfer:
    """A transfer under way."""

    def __init__(self, recorder: Recorder, mark: int) -> None:
        self._recorder, self._mark = recorder, mark

    def is_completed(self) -> bool:
        """Only where it was waited for; so never before."""
        return False

    def wait(self) -> None:
        """Let what follows see it."""
        self._recorder.wait_mark(self._mark)


class PlannedStore:
    """A `dsx_zero.homes.stored.TensorStore` that keeps sizes. Transfers go over a lane of their own."""

    folder = "(planned)"

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lane = recorder.lane(torch.device("cpu"))
        self._sizes: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def put(self, name: str, tensor: torch.Tensor) -> Any:
        """Note a tensor."""
        size = tensor.numel() * tensor.element_size()
        self._recorder.ledger.add_bytes(DISK, "states", size - self._sizes.get(name, 0))
        self._sizes[name] = size
        return self._transfer(2, size)

    def get(self, name: str, out: torch.Tensor | None = None) -> Any:
        """Read nothing into `out`."""
        return self._transfer(3, self._sizes[name])

    def listen(self, on_transfer: Callable[..., Any]) -> Callable[[], None]:
        """Nobody hears of transfers of a plan."""
        return lambda: None

    def close(self) -> None:
        """Forget everything."""
        self._sizes.clear()

    def _transfer(self, direction: int, nbytes: int) -> _Transfer:
        self._lane.see_writes_so_far()
        ticket = self._lane.submit(lambda: self._recorder.copied(direction, nbytes))
        return _Transfer(self._recorder, ticket.number)
