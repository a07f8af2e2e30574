"""One flat float32 buffer for a value of every compressed parameter, so that a step is one all-reduce.

Parameters see their parts as views in their own shapes. The buffer, the two errors and the rules of where what lies
come from `dsx_comm.compressed`; here they meet parameters. With `one_scale` the whole buffer is one segment (1-bit
LAMB, which scales momenta to one size itself); otherwise every parameter has a scale of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from ..compressed import ErrorFeedback, OneBitLayout, compressed_all_reduce
from ..compressed.signs import Measure

_log = logging.getLogger(__name__)

WORKER, SERVER = "worker_error@", "server_error@all"
"""Names of the errors in checkpoints. '@' says that ranks hold different values or ranges of their own choosing."""


class Arena:
    """The flat buffer of the parameters on one device."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], *, group: Any, world_size: int, one_scale: bool, scale: Measure
    ) -> None:
        sizes = [p.numel() for p in parameters]
        lengths = (sum(sizes),) if one_scale else tuple(sizes)
        self.layout = OneBitLayout.of(lengths, world_size)
        device = parameters[0].device
        self.flat = torch.zeros(self.layout.numel, device=device)
        # one rank compresses nothing and keeps no errors
        self.feedback = ErrorFeedback(lengths, group, device, scale) if world_size > 1 else None
        starts = list(accumulate(sizes, initial=0))[:-1] if one_scale else self.layout.offsets
        self._group = group
        self._places = {id(p): (start, p.numel()) for p, start in zip(parameters, starts)}
        self.views = {id(p): self._cut(self.flat, p).view(p.shape) for p in parameters}

    def _cut(self, buffer: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        start, numel = self._places[id(parameter)]
        return buffer[start : start + numel]

    def adopt(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The view of a parameter with this value; copies unless `value` is that view."""
        view = self.views[id(parameter)]
        if value.data_ptr() != view.data_ptr() or value.dtype != view.dtype:
            view.copy_(value)
        return view

    def average(self) -> None:
        """The mean over the ranks of the flat buffer, in one bit."""
        if self.feedback is not None:
            compressed_all_reduce(self.flat, self.feedback, self._group)

    def reset_errors(self) -> None:
        """Forget what was kept back."""
        if self.feedback is not None:
            self.feedback.reset()

    def sent_bytes(self) -> int:
        """Bytes this rank sends in one `average`."""
        return self.layout.sent_bytes

    def nbytes(self) -> int:
        """Bytes of the errors."""
        return 0 if self.feedback is None else self.feedback.nbytes()

    def tensors(self) -> list[torch.Tensor]:
        """The flat buffer and the errors."""
        return [self.flat] + ([] if self.feedback is None else [self.feedback.worker, self.feedback.server])

    # - checkpoints

    def ranges(self, parameter: torch.Tensor) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(key, first element, values): this rank's errors of a parameter. Servers' ranges make one whole over the
        ranks.
        """
        feedback = self.feedback
        if feedback is None:
            return
        yield f"{WORKER}{feedback.rank}", 0, self._cut(feedback.worker, parameter)
        first, last, view = self._served(parameter, feedback)
        yield SERVER, first, view[: last - first]

    def _served(self, parameter: torch.Tensor, feedback: ErrorFeedback) -> tuple[int, int, torch.Tensor]:
        """The elements of a parameter in this rank's chunk, and the server's errors there; an empty range if none."""
        start, numel = self._places[id(parameter)]
        low = feedback.rank * self.layout.chunk
        first = min(max(low - start, 0), numel)
        last = max(min(low + self.layout.chunk - start, numel), first)
        at = start + first - low if last > first else 0
        return first, last, feedback.server[at : at + last - first]

    def read(
        self, parameter: torch.Tensor, keys: Sequence[str], read: Callable[[str, int, int], torch.Tensor | None]
    ) -> Callable[[], None]:
        """Read a parameter's errors from a checkpoint that any number of ranks has written; returns what puts them in
        place.

        The same number of ranks: every rank gets its own error back. Another: every rank gets the mean of all, which
        leaves the mean over the workers, all that ever reaches the parameters, as it was. Servers' errors belong to
        elements, not to ranks, and are divided again.
        """
        feedback = self.feedback
        if feedback is None:
            return lambda: None
        _, numel = self._places[id(parameter)]
        workers = [key for key in keys if key.startswith(WORKER)]
        own = f"{WORKER}{feedback.rank}"
        if len(workers) == self.layout.world_size and own in workers:
            workers = [own]
        target = self._cut(feedback.worker, parameter)
        mean = torch.zeros_like(target)
        for key in workers:
            values = read(key, 0, numel)
            if values is not None:
                mean.add_(values.to(target).view(-1), alpha=1.0 / len(workers))
        first, last, view = self._served(parameter, feedback)
        served = read(SERVER, first, last) if SERVER in keys and last > first else None

        def install() -> None:
            target.copy_(mean)
            view.zero_() if served is None else view.copy_(served.view(-1))

        return install


def errors_of(arenas: Sequence[Arena]) -> list[dict[str, Any]]:
    """This rank's errors of all buffers, for `take_errors`."""
    found = [arena.feedback for arena in arenas if arena.feedback is not None]
    return [{"world_size": e.layout.world_size, "rank": e.rank, "worker": e.worker, "server": e.server} for e in found]


def take_errors(arenas: Sequence[Arena], errors: Sequence[dict[str, Any]]) -> None:
    """Take the errors that `errors_of` gave. Those of another rank or another number of ranks are left, with a
    warning.
    """
    feedbacks = [arena.feedback for arena in arenas if arena.feedback is not None]
    fits = len(errors) == len(feedbacks) and all(
        e["worker"].shape == f.worker.shape and (e["world_size"], e["rank"]) == (f.layout.world_size, f.rank)
        for e, f in zip(errors, feedbacks)
    )
    if errors and not fits:
        _log.warning(
            "load_state_dict: the errors are those of another number of ranks, another rank or other parameters; they"
            " start at zero (a checkpoint through state_ranges carries them over)"
        )
    for error, feedback in zip(errors if fits else [], feedbacks):
        feedback.worker.copy_(error["worker"])
        feedback.server.copy_(error["server"])
