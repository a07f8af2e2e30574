"""Messages between the ranks of a pipeline: values of any structure, or the failure of a stage.

What one rank sends to one stage of another, forward or backward, is a channel. Each message begins with a header of
eight whole numbers (the stage, the micro-batch, data or failure, sizes of the following parts), so a receiver always
knows what comes next: it can recognise a message of another step, and a stage that failed sends its error instead of
tensors. Shapes and structure are sent if they differ from the last message of the channel; in an ordinary run that is
once, and small tensors then travel behind the header in one frame (`frames.py`). Receivers take the messages of a
channel in the order they come and keep those that are needed later, so the ranks' orders may differ.

A send never waits. Its tensors are kept until it is done (`reap`, `wait_sent`).

On a device headers are sent over a group for host tensors, and payloads in batches over one device group. Operations of
one communicator run in the order in which they are issued, and a send waits for its receive, so two ranks that
each send before they receive would wait for each other. Therefore the messages have the order of
`schedule.with_communication`, which is free of deadlock even if every send waits (`schedule.check`). A batch has the
tensors of one received message, or those of consecutive sends. A receive is not batched with other messages, because
its header may come from a rank that waits for them. Headers are read on the host before a payload is issued, so a
failure can be sent instead of a payload here too. All channels between two ranks are then one queue, in the order of
the payloads, and payloads do not travel in frames. (Tested with recorded batches; not run on more than one device yet.)
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import dsx_comm
import dsx_comm.object_tree
import torch

from ..errors import PipelineError
from .frames import Frame
from .groups import Groups
from .structure import Structure, TensorSpec, describe_parts, flatten, unflatten

HEADER, BLOB, PAYLOAD = 11, 12, 13  # tags where all channels are one queue
_FIRST_TAG = 16  # of the channels: three tags for each
_MAGIC = 0x9155E
DATA, FAILURE, LOST = 0, 1, 2


@dataclass(frozen=True)
class Key:
    """The content of a message.

    Attributes:
        stage: the stage that receives it.
        backward: True for gradients, False for activations.
        micro_batch: index of the micro-batch.
    """

    stage: int
    backward: bool
    micro_batch: int


@dataclass(frozen=True)
class Spec:
    """Structure of a value and the specs of its tensors."""

    structure: Structure
    tensors: tuple[TensorSpec, ...]

    def fits(self, other: Spec) -> bool:
        """Whether structure, shapes and dtypes are the same; `requires_grad` may differ."""
        return self == other or self._without_gradients() == other._without_gradients()

    def _without_gradients(self) -> Spec:
        return Spec(self.structure, tuple(replace(t, requires_grad=False) for t in self.tensors))

    def __str__(self) -> str:
        return describe_parts(self.structure, [str(t) for t in self.tensors], [])


@dataclass(frozen=True)
class Parcel:
    """A value divided into the parts that are sent."""

    spec: Spec
    tensors: list[torch.Tensor]
    others: list[Any]

    @staticmethod
    def of(value: Any) -> Parcel:
        """Divide a value."""
        structure, tensors, others = flatten(value)
        return Parcel(Spec(structure, tuple(map(TensorSpec.of, tensors))), tensors, others)


@dataclass
class Message:
    """A received message: a value, or a packed failure that was sent instead of it.

    Attributes:
        status: DATA, FAILURE or LOST.
        value: the value, for DATA.
        text: the packed failure (`Failure.pack`), for FAILURE and LOST.
    """

    status: int
    value: Any = None
    text: bytes = b""


@dataclass(frozen=True)
class _Known:
    """The knowledge that both ends of a channel have of its next message: the spec and the other values that need not
    be sent again, and the layout of its frame.
    """

    spec: Spec | None = None
    extra: bytes = b""
    frame: Frame = field(default_factory=Frame)


_NOTHING = _Known()


class PeerLost(PipelineError):
    """Communication with a rank failed.

    Attributes:
        rank: its rank in the pipeline's group.
        cause: the rank that is at fault; another one if ranks waited for one another, or this rank itself if the other
            one has waited for it too long.
    """

    def __init__(self, rank: int, text: str, cause: int | None = None) -> None:
        super().__init__(text)
        self.rank, self.cause = rank, rank if cause is None else cause


class WrongRun(PipelineError):
    """A message belongs to another step than the one this rank is in."""


class Mailbox:
    """All messages of one rank to and from the others.

    Args:
        groups: the pipeline's groups.
        name_of: rank -> its name in errors, such as "stage 1 (rank 1)".
        slicing: (group for activations, group for gradients). The ranks of such a group have equal tensors to send. So
            each of them sends a piece, and the receivers gather the pieces among themselves. None: no such group.
    """

    def __init__(self, groups: Groups, name_of: Callable[[int], str], slicing: tuple[Any, Any] = (None, None)) -> None:
        self.groups, self._name_of, self.slicing = groups, name_of, slicing
        self.run = 0
        self._sent: dict[tuple[int, int, bool], _Known] = {}
        self._received: dict[tuple[int, int, bool], _Known] = {}
        self._arrived: dict[int, dict[Key, Message]] = {}
        self._in_flight: list[tuple[Any, Any]] = []
        self._to_flush: list[tuple[int, torch.Tensor]] = []  # (destination, tensor), until `flush`

    def begin_run(self) -> None:
        """Begin a step. Messages of earlier steps are dropped."""
        self.run += 1
        self._arrived.clear()
        self._to_flush.clear()

    def forget_shapes(self) -> None:
        """Send structure and shapes again with the next messages. Senders and receivers must call it."""
        self._sent.clear()
        self._received.clear()

    def send(self, destination: int, key: Key, parcel: Parcel) -> None:
        """Send a value to a rank of the pipeline. Returns at once."""
        spec, extra = parcel.spec, pickle.dumps(parcel.others) if parcel.others else b""
        channel = (destination, key.stage, key.backward)
        before = self._sent.get(channel, _NOTHING)
        blob_spec = pickle.dumps(spec) if before.spec != spec else b""
        blob_extra = extra if before.spec is None or before.extra != extra else b""
        frame = before.frame
        packs = frame.places is not None and not blob_spec
        tensors = [tensor.detach() for tensor in parcel.tensors]
        numbers = self._numbers(key, DATA, len(blob_spec), len(blob_extra), int(bool(extra)))
        whole = frame.write(numbers, tensors if packs else ())
        self._sent[channel] = self._known(spec, extra, key.backward)
        self._send_tensor(whole, destination, self.groups.host, self._tag(key, HEADER))
        if blob_spec or blob_extra:
            blob = _bytes_tensor(blob_spec + blob_extra)
            self._send_tensor(blob, destination, self.groups.host, self._tag(key, BLOB))
        for tensor in () if packs else tensors:
            if tensor.numel():
                piece = self._piece_to_send(tensor.contiguous(), key.backward)
                if self.groups.batched:
                    self._to_flush.append((destination, piece))
                else:
                    self._send_tensor(piece, destination, self.groups.payload, self._tag(key, PAYLOAD))

    def last_sent(self, destination: int, stage: int, backward: bool) -> tuple[Spec, bytes] | None:
        """(spec, pickled other values) of the last value sent to a stage of a rank; None before the first one."""
        found = self._sent.get((destination, stage, backward))
        return None if found is None or found.spec is None else (found.spec, found.extra)

    def send_failure(self, destination: int, key: Key, status: int, text: bytes) -> None:
        """Send a packed failure instead of a value."""
        frame = self._sent.get((destination, key.stage, key.backward), _NOTHING).frame
        whole = frame.write(self._numbers(key, status, len(text), 0, 0), ())
        self._send_tensor(whole, destination, self.groups.host, self._tag(key, HEADER))
        self._send_tensor(_bytes_tensor(text), destination, self.groups.host, self._tag(key, BLOB))

    def receive(self, source: int, key: Key) -> Message:
        """Wait for the message `key` of a rank. Other messages that arrive before it are kept.

        Raises:
            PeerLost: the process of the other rank has ended, or communication with it failed.
            WrongRun: the other rank is in another step.
        """
        self.flush()
        waiting = self._arrived.setdefault(source, {})
        while key not in waiting:
            found, message = self._receive_next(source, key)
            waiting[found] = message
        self.reap()
        return waiting.pop(key)

    def flush(self) -> None:
        """Issue the payloads of all calls of `send` since the last flush as one batch.

        Raises:
            PeerLost: communication with a rank of the batch failed.
        """
        to_flush, self._to_flush = self._to_flush, []
        if to_flush:
            handles = self._issue(dsx_comm.isend, to_flush)
            self._in_flight += [(handle, (to_flush[0][0], to_flush)) for handle in handles]

    def _issue(self, operation: Any, tensors: list[tuple[int, torch.Tensor]]) -> list[Any]:
        """Begin a batch of sends or receives of (peer, tensor) pairs."""
        group = self.groups.payload
        try:
            return dsx_comm.batch_isend_irecv(
                [dsx_comm.P2POp(operation, tensor, group=group, group_peer=peer) for peer, tensor in tensors]
            )
        except RuntimeError as error:
            raise self._peer_lost(tensors[0][0], error) from error

    def reap(self) -> None:
        """Free the tensors of completed sends."""
        self._in_flight = [pair for pair in self._in_flight if not pair[0].is_completed()]

    def wait_sent(self, lost: set[int]) -> None:
        """Wait until all sends are complete, except those to lost ranks.

        Raises:
            PeerLost: communication with another rank failed.
        """
        in_flight, self._in_flight = self._in_flight, []
        for handle, (destination, _) in in_flight:
            if destination in lost:
                continue
            try:
                handle.wait()
            except RuntimeError as error:
                raise self._peer_lost(destination, error) from error

    # - the queue

    def _receive_next(self, source: int, wanted: Key) -> tuple[Key, Message]:
        """The next message of the channel of `wanted`; of any channel where all are one queue."""
        frame = self._received.get((source, wanted.stage, wanted.backward), _NOTHING).frame
        whole = frame.empty()
        self._receive_tensor(whole, source, self.groups.host, self._tag(wanted, HEADER))
        magic, run, stage, flags, micro_batch, status, first, second = frame.numbers(whole)
        has_others, backward = divmod(flags, 2)
        if magic != _MAGIC:
            raise WrongRun(f"{self._name_of(source)} sent something that is no message of a pipeline: different code?")
        key = Key(stage, bool(backward), micro_batch)
        blob = b""
        if first + second:
            raw = torch.empty(first + second, dtype=torch.uint8, device="cpu")
            self._receive_tensor(raw, source, self.groups.host, self._tag(wanted, BLOB))
            blob = dsx_comm.object_tree.host_bytes(raw)
        if status != DATA:
            message = Message(status, text=blob)
        else:
            value = self._receive_value(source, key, blob[:first], blob[first:], bool(has_others), whole)
            message = Message(DATA, value)
        if run != self.run:
            raise WrongRun(
                f"{self._name_of(source)} is in step {run}, this rank in step {self.run}: every rank of a pipeline "
                "must call train_batch and eval_batch equally often"
            )
        return key, message

    def _receive_value(
        self, source: int, key: Key, blob_spec: bytes, blob_extra: bytes, has_values: bool, whole: torch.Tensor
    ) -> Any:
        channel = (source, key.stage, key.backward)
        known = self._received.get(channel, _NOTHING)
        spec = pickle.loads(blob_spec) if blob_spec else known.spec
        if spec is None:
            raise WrongRun(f"{self._name_of(source)} sent tensors without saying their shapes: different code?")
        extra = blob_extra if blob_extra else (known.extra if has_values else b"")
        self._received[channel] = self._known(spec, extra, key.backward)
        if known.frame.places is not None and not blob_spec:
            tensors = known.frame.read(whole, spec.tensors)
        else:
            tensors = self._receive_apart(source, key, spec)
        for tensor, one in zip(tensors, spec.tensors):
            tensor.requires_grad_(one.requires_grad)
        return unflatten(spec.structure, tensors, pickle.loads(extra) if extra else [])

    def _receive_apart(self, source: int, key: Key, spec: Spec) -> list[torch.Tensor]:
        """The tensors of a message that do not travel in its frame."""
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=self.groups.device) for one in spec.tensors]
        pieces = [(tensor, self._piece_to_send(tensor, key.backward)) for tensor in tensors if tensor.numel()]
        self._receive_payload(source, key, [piece for _, piece in pieces])
        for tensor, piece in pieces:
            if piece is not tensor:
                dsx_comm.all_gather_into_tensor(tensor.view(-1), piece, group=self.slicing[key.backward])
        return tensors

    def _known(self, spec: Spec, extra: bytes, backward: bool) -> _Known:
        """The knowledge of the two ends of a channel behind a message. Ranks that slice a stage send pieces apart."""
        frames = self.groups.frames and self.slicing[backward] is None
        return _Known(spec, extra, Frame.of(spec.tensors) if frames else Frame())

    def _tag(self, key: Key, part: int) -> int:
        """The tag of a part of a message. Channels have tags of their own, unless payloads go in batches, which are in
        the order of all messages.
        """
        if self.groups.batched or not self.groups.frames:
            return part
        return _FIRST_TAG + 3 * (2 * key.stage + int(key.backward)) + part - HEADER

    def _receive_payload(self, source: int, key: Key, pieces: list[torch.Tensor]) -> None:
        """Receive the payload of one message. On a device the current stream waits for it, and the host does not."""
        if not self.groups.batched:
            for piece in pieces:
                self._receive_tensor(piece, source, self.groups.payload, self._tag(key, PAYLOAD))
        elif pieces:
            try:
                for handle in self._issue(dsx_comm.irecv, [(source, piece) for piece in pieces]):
                    handle.wait()
            except RuntimeError as error:
                raise self._peer_lost(source, error) from error

    def _piece_to_send(self, tensor: torch.Tensor, backward: bool) -> torch.Tensor:
        """The elements of a tensor that this rank sends: its piece, or all if they cannot be divided evenly."""
        group = self.slicing[backward]
        size = 1 if group is None else dsx_comm.get_world_size(group)
        if size == 1 or tensor.numel() % size:
            return tensor
        return tensor.view(-1).chunk(size)[dsx_comm.get_rank(group)]

    def _numbers(self, key: Key, status: int, first: int, second: int, has_others: int) -> list[int]:
        """The header of a message."""
        flags = 2 * has_others + int(key.backward)
        return [_MAGIC, self.run, key.stage, flags, key.micro_batch, status, first, second]

    def _send_tensor(self, tensor: torch.Tensor, destination: int, group: Any, tag: int) -> None:
        try:
            handle = dsx_comm.isend(tensor, group=group, tag=tag, group_dst=destination)
        except RuntimeError as error:
            raise self._peer_lost(destination, error) from error
        self._in_flight.append((handle, (destination, tensor)))

    def _receive_tensor(self, tensor: torch.Tensor, source: int, group: Any, tag: int) -> None:
        try:
            dsx_comm.recv(tensor, group=group, tag=tag, group_src=source)
        except RuntimeError as error:
            raise self._peer_lost(source, error) from error

    def _peer_lost(self, rank: int, error: BaseException) -> PeerLost:
        if isinstance(error, PeerLost):
            return error
        missing = error.ranks if isinstance(error, dsx_comm.errors.HangError) else ()
        cause = next((place for place, each in enumerate(self.groups.ranks) if each in missing), rank)
        return PeerLost(
            rank, f"communication with {self._name_of(cause)} failed: {type(error).__name__}: {error}", cause
        )


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
