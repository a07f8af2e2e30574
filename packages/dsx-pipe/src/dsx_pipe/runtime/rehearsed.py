"""The messages of a rehearsal: one process is one rank of a pipeline (`dsx_comm.rehearse`), and the others are not
there.

Ranks of a pipeline differ, so a rank needs what its neighbours really send. The idea: the ranks are rehearsed one after
the other. Every tensor that a rank sends is recorded as a `Letter`. The letters are given to the receiving rank when
that rank is rehearsed. A rank that is rehearsed before its neighbour gets guessed letters: a gradient has the shape of
its activation, and an activation has the shape of the first one that this rank has sent. Guesses are checked later: if
the neighbour has sent something else, the rank is rehearsed again with the real letters.

A letter of a header or a structure has its contents. A letter of a payload has only its size in bytes; the structure
that was sent before it says its shape. The message format is that of `messages.py`, whose code also writes the guesses.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dsx_comm
import dsx_comm.object_tree
import torch

from ..errors import PipelineError
from ..schedule import Kind, Schedule
from .messages import BLOB, HEADER, PAYLOAD, Key, Mailbox, Parcel

__all__ = ["Letter", "RehearsedMail"]


@dataclass(frozen=True)
class Letter:
    """A tensor that is sent.

    Attributes:
        tag: kind of the message (HEADER, BLOB or PAYLOAD of `messages.py`).
        size: size of the tensor in bytes.
        words: the bytes of a header or a structure; None for a payload.
    """

    tag: int
    size: int
    words: bytes | None = None

    @staticmethod
    def of(tensor: torch.Tensor, tag: int) -> Letter:
        """The letter of a tensor that is sent."""
        words = dsx_comm.object_tree.host_bytes(tensor.contiguous()) if tag in (HEADER, BLOB) else None
        return Letter(tag, _nbytes(tensor), words)


class RehearsedMail:
    """Letters from and to one rank of a pipeline.

    Args:
        known: global rank -> the letters that it sends to this rank, in order. Letters of other ranks are guessed.

    Attributes:
        sent: global rank -> the letters that this rank has sent to it.
        given: global rank -> the letters, known or guessed, that this rank has received from it.
    """

    def __init__(self, known: Mapping[int, Sequence[Letter]]) -> None:
        self._known = {rank: deque(letters) for rank, letters in known.items()}
        self.sent: dict[int, list[Letter]] = {}
        self.given: dict[int, list[Letter]] = {}
        self._pipe: Any = None
        self._guessed: dict[int, Iterator[Letter]] = {}

    def begin(self, pipe: Any) -> None:
        """Start with the messages of this `Pipeline`; earlier messages are not recorded."""
        self._pipe = pipe

    def note(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """Record that this rank sends a tensor to a global rank."""
        if self._is_pipeline_message(tag):
            self.sent.setdefault(destination, []).append(Letter.of(tensor, tag))

    def take(self, tensor: torch.Tensor, source: int, tag: int) -> bool:
        """Receive the next tensor from a global rank.

        Returns:
            True if the contents of `tensor` were filled in; False if only the size is known, or the message is not one
            of the pipeline.

        Raises:
            PipelineError: that rank sends something else next, or nothing more.
        """
        if not self._is_pipeline_message(tag):
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

    def _is_pipeline_message(self, tag: int) -> bool:
        return self._pipe is not None and tag in (HEADER, BLOB, PAYLOAD)

    # - guesses

    def _guess(self, source: int) -> Iterator[Letter]:
        """Guess the letters of a rank that was not rehearsed yet, step after step."""
        pipe = self._pipe
        box, here = _Outbox(pipe.mailbox), pipe.groups.ranks.index(source)
        while True:
            box.begin_run()
            for key in keys_between(pipe.schedule, here, pipe.rank):
                box.send(pipe.rank, key, self._guess_parcel(key, here))
                yield from box.take()

    def _guess_parcel(self, key: Key, source: int) -> Parcel:
        """Guess the value of one message."""
        mailbox, schedule = self._pipe.mailbox, self._pipe.schedule
        if key.backward:
            places = [(source, key.stage + 1)]
        else:
            places = [(schedule.stage_ranks[stage], stage) for stage in range(1, schedule.stages)]
        sent = next((found for rank, stage in places if (found := mailbox.last_sent(rank, stage, False))), None)
        if sent is None:
            return Parcel.of([])  # a stage of this rank has failed, so no shape is known
        spec, extra = sent
        if key.backward:
            return Parcel.of([_on_meta(one.shape, one.dtype) for one in spec.tensors if one.requires_grad])
        return Parcel(
            spec, [_on_meta(one.shape, one.dtype) for one in spec.tensors], pickle.loads(extra) if extra else []
        )


def keys_between(schedule: Schedule, source: int, destination: int) -> Iterator[Key]:
    """Keys of the messages that one rank of a schedule sends to another in a step, in the order of sending."""
    for action in schedule.actions[source]:
        if not action.kind.computes or action.kind is Kind.WEIGHT:
            continue
        backward = action.kind is not Kind.FORWARD
        stage = action.stage - 1 if backward else action.stage + 1
        if 0 <= stage < schedule.stages and schedule.stage_ranks[stage] == destination:
            yield Key(stage, backward, action.micro_batch)


class _Outbox(Mailbox):
    """Stands for the mailbox of another rank: keeps the letters that it would send."""

    def __init__(self, like: Mailbox) -> None:
        super().__init__(like.groups, str, like.slicing)
        self._written: list[Letter] = []

    def take(self) -> list[Letter]:
        """The letters that were written since the last call."""
        written, self._written = self._written, []
        return written

    def _send_tensor(self, tensor: torch.Tensor, destination: int, group: Any, tag: int) -> None:
        self._written.append(Letter.of(tensor, tag))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _on_meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
