"""The messages of a rehearsal: one process is one rank of a pipeline (`dsx_comm.rehearse`), and the others are not
there.

Ranks of a pipeline are not alike, so a rank needs what its neighbours really send. The idea: they are rehearsed one
after the other. What a rank sends is written down as letters, word by word, and handed to the rank that receives it
when that one is rehearsed. A rank that is rehearsed before its neighbour gets letters that are guessed: a gradient
looks like the activation that it belongs to, and an activation like the first one that this rank has sent. Guesses are
checked afterwards: when the neighbour has sent something else, the rank is rehearsed again with the true letters.

Words (headers, structures) have their contents; tensors have their sizes alone, since their shapes are words. The
wire's format is that of `messages.py`: guesses are written by its own code.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import PipelineError
from ..schedule import Kind, Schedule
from .messages import BLOB, HEADER, PAYLOAD, Key, Mailbox, Parcel

__all__ = ["Letter", "RehearsedMail"]


@dataclass(frozen=True)
class Letter:
    """A tensor on its way: its tag, its size in bytes, and these bytes where they are words; None for data."""

    tag: int
    size: int
    words: bytes | None = None

    @staticmethod
    def of(tensor: torch.Tensor, tag: int) -> Letter:
        """What is kept of a tensor that is sent."""
        words = tensor.numpy().tobytes() if tag in (HEADER, BLOB) else None
        return Letter(tag, _nbytes(tensor), words)


class RehearsedMail:
    """Letters from and to one rank of a pipeline.

    Args:
        known: by global rank, the letters that it sends to this rank, in their order; what a rank that is not named
            sends is guessed.

    Attributes:
        sent: by global rank, the letters that this rank has sent to it.
        given: by global rank, the letters that this rank was given for those of that one.
    """

    def __init__(self, known: Mapping[int, Sequence[Letter]]) -> None:
        self._known = {rank: deque(letters) for rank, letters in known.items()}
        self.sent: dict[int, list[Letter]] = {}
        self.given: dict[int, list[Letter]] = {}
        self._pipe: Any = None
        self._guessed: dict[int, Iterator[Letter]] = {}

    def begin(self, pipe: Any) -> None:
        """The messages that follow are those of this `Pipeline`."""
        self._pipe = pipe

    def note(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """This rank sends a tensor to a global rank."""
        if self._belongs(tag):
            self.sent.setdefault(destination, []).append(Letter.of(tensor, tag))

    def take(self, tensor: torch.Tensor, source: int, tag: int) -> bool:
        """Fill a tensor with what a global rank sends next. Returns whether its contents are words.

        Raises:
            PipelineError: that rank sends something else, or nothing more.
        """
        if not self._belongs(tag):
            return False
        if source not in self._known and source not in self._guessed:
            self._guessed[source] = self._guess(source)
        waiting = self._known.get(source)
        letter = next(self._guessed[source]) if waiting is None else waiting.popleft() if waiting else None
        if letter is None or (letter.tag, letter.size) != (tag, _nbytes(tensor)):
            sends = "nothing more" if letter is None else f"{letter.size} bytes of kind {letter.tag}"
            raise PipelineError(
                f"a rehearsed pipeline: rank {source} sends {sends}, and this rank waits for {_nbytes(tensor)} bytes of"
                f" kind {tag}"
            )
        self.given.setdefault(source, []).append(letter)
        if letter.words is None:
            return False
        tensor.copy_(torch.frombuffer(bytearray(letter.words), dtype=tensor.dtype).view(tensor.shape))
        return True

    def _belongs(self, tag: int) -> bool:
        return self._pipe is not None and tag in (HEADER, BLOB, PAYLOAD)

    # - guesses

    def _guess(self, source: int) -> Iterator[Letter]:
        """Letters of a rank that was not rehearsed yet, step after step."""
        pipe = self._pipe
        box, here = _Outbox(pipe.mailbox), pipe.groups.ranks.index(source)
        while True:
            box.begin_run()
            for key in keys_between(pipe.schedule, here, pipe.rank):
                box.send(pipe.rank, key, self._parcel(key, here))
                yield from box.take()

    def _parcel(self, key: Key, source: int) -> Parcel:
        """What a rank may send about a micro-batch."""
        mailbox, schedule = self._pipe.mailbox, self._pipe.schedule
        if key.backward:
            places = [(source, key.stage + 1)]
        else:
            places = [(schedule.stage_ranks[stage], stage) for stage in range(1, schedule.stages)]
        sent = next((found for rank, stage in places if (found := mailbox.last_sent(rank, stage, False))), None)
        if sent is None:
            return Parcel.of([])  # a stage of this rank has failed and sends nothing that has a shape
        spec, extra = sent
        if key.backward:
            return Parcel.of([_like(one.shape, one.dtype) for one in spec.tensors if one.requires_grad])
        return Parcel(spec, [_like(one.shape, one.dtype) for one in spec.tensors], pickle.loads(extra) if extra else [])


def keys_between(schedule: Schedule, source: int, destination: int) -> Iterator[Key]:
    """What one rank of a schedule sends to another in a step, in its order."""
    for action in schedule.actions[source]:
        if not action.kind.computes or action.kind is Kind.WEIGHT:
            continue
        backward = action.kind is not Kind.FORWARD
        stage = action.stage - 1 if backward else action.stage + 1
        if 0 <= stage < schedule.stages and schedule.stage_ranks[stage] == destination:
            yield Key(stage, backward, action.micro_batch)


class _Outbox(Mailbox):
    """Writes what another rank's mailbox would send, and keeps it."""

    def __init__(self, like: Mailbox) -> None:
        super().__init__(like.groups, str, like.slicing)
        self._written: list[Letter] = []

    def take(self) -> list[Letter]:
        """What was written since the last call."""
        written, self._written = self._written, []
        return written

    def _post(self, tensor: torch.Tensor, destination: int, group: Any, tag: int) -> None:
        self._written.append(Letter.of(tensor, tag))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _like(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
