"""Messages between the ranks of a pipeline: values of any structure, or the failure of a stage.

Between two ranks messages form one queue. Each begins with a header of eight whole numbers (the stage, the micro-batch,
data or failure, sizes of the following parts), so a receiver always knows what comes next: it can recognise a message
of another step, and a stage that failed sends its error instead of tensors. Shapes and structure are sent if they
differ from the last message of the same kind; in an ordinary run that is once. Receivers take messages from the queue
in the order they come and keep those that are needed later, so the ranks' orders may differ.

A send never waits. Its tensors are kept until it is done (`reap`, `wait_sent`).

On a device headers are sent over a group for host tensors, and payloads in batches over one device group. Operations of
one communicator run in the order in which they are issued, and a send waits for its receive, so two ranks that
each send before they receive would wait for each other. Therefore the messages have the order of
`schedule.with_communication`, which is free of deadlock even if every send waits (`schedule.check`). A batch has the
tensors of one received message, or those of consecutive sends. A receive is not batched with other messages, because
its header may come from a rank that waits for them. Headers are read on the host before a payload is issued, so a
failure can be sent instead of a payload here too. (Tested with recorded batches; not run on more than one device yet.)
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import dsx_comm
import torch

from ..errors import PipelineError
from .structure import Structure, TensorSpec, describe_parts, flatten, unflatten

HEADER, BLOB, PAYLOAD = 11, 12, 13  # tags
_MAGIC = 0x9155E
DATA, FAILURE, LOST = 0, 1, 2


@dataclass(frozen=True)
class Key:
    """What a message is about: the stage that receives it, forward or backward, the micro-batch."""

    stage: int
    backward: bool
    micro_batch: int


@dataclass(frozen=True)
class Spec:
    """Structure of a value and the specs of its tensors."""

    structure: Structure
    tensors: tuple[TensorSpec, ...]

    def fits(self, other: Spec) -> bool:
        """Whether structure, shapes and dtypes are the same, with or without gradients."""
        return self == other or self._without_gradients() == other._without_gradients()

    def _without_gradients(self) -> Spec:
        return Spec(self.structure, tuple(replace(t, requires_grad=False) for t in self.tensors))

    def __str__(self) -> str:
        return describe_parts(self.structure, [str(t) for t in self.tensors], [])


@dataclass(frozen=True)
class Parcel:
    """A value taken apart, to be sent."""

    spec: Spec
    tensors: list[torch.Tensor]
    others: list[Any]

    @staticmethod
    def of(value: Any) -> Parcel:
        """The parts of a value."""
        structure, tensors, others = flatten(value)
        return Parcel(Spec(structure, tuple(map(TensorSpec.of, tensors))), tensors, others)


@dataclass
class Message:
    """A received message: a value, or the text of the failure that came in its place."""

    status: int
    value: Any = None
    text: bytes = b""


class PeerLost(PipelineError):
    """Communication with a rank failed; `rank` is its rank in the pipeline's group."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


class WrongRun(PipelineError):
    """A message belongs to another step than the one this rank is in."""


class Groups:
    """The process groups of one pipeline: for headers, and for payloads.

    Args:
        group: ranks of the pipeline.
        device: where tensors are.
        batched: send payloads in batches; always so on a device.
    """

    def __init__(self, group: Any, device: torch.device, *, batched: bool = False) -> None:
        self.group, self.device = group, device
        self.ranks = dsx_comm.get_all_ranks_from_group(group)
        self.rank, self.size = dsx_comm.get_rank(group), dsx_comm.get_world_size(group)
        self.batched = batched or device.type != "cpu"
        self.host = self.payload = group
        if device.type != "cpu" and self.size > 1:
            self.host = dsx_comm.new_group(self.ranks, backend="gloo", description="pipeline headers")
            self.payload = dsx_comm.new_group(self.ranks, description="pipeline tensors")


class Mailbox:
    """All messages of one rank to and from the others.

    Args:
        groups: the pipeline's groups.
        name_of: says what a rank is, for errors ("stage 1 (rank 1)").
        slicing: for activations and for gradients, the group of ranks that all have the same tensors to send, or None.
            Each of them then sends its piece, and the receivers gather the pieces among themselves.
    """

    def __init__(self, groups: Groups, name_of: Callable[[int], str], slicing: tuple[Any, Any] = (None, None)) -> None:
        self.groups, self._name_of, self.slicing = groups, name_of, slicing
        self.run = 0
        self._sent: dict[tuple[int, int, bool], tuple[Spec, bytes]] = {}
        self._known: dict[tuple[int, int, bool], tuple[Spec, bytes]] = {}
        self._arrived: dict[int, dict[Key, Message]] = {}
        self._flying: list[tuple[Any, Any]] = []
        self._leaving: list[tuple[int, torch.Tensor]] = []  # (destination, tensor), until `flush`

    def begin_run(self) -> None:
        """A new step begins; messages of earlier ones are no longer expected."""
        self.run += 1
        self._arrived.clear()
        self._leaving.clear()

    def forget_shapes(self) -> None:
        """Negotiate structure and shapes again with the next messages. Both sides must call it."""
        self._sent.clear()
        self._known.clear()

    def send(self, destination: int, key: Key, parcel: Parcel) -> None:
        """Send a value; returns at once."""
        spec, extra = parcel.spec, pickle.dumps(parcel.others) if parcel.others else b""
        channel = (destination, key.stage, key.backward)
        before = self._sent.get(channel)
        blob_spec = pickle.dumps(spec) if before is None or before[0] != spec else b""
        blob_extra = extra if before is None or before[1] != extra else b""
        self._sent[channel] = (spec, extra)
        self._header(destination, key, DATA, len(blob_spec), len(blob_extra), int(bool(extra)))
        if blob_spec or blob_extra:
            self._post(_bytes_tensor(blob_spec + blob_extra), destination, self.groups.host, BLOB)
        for tensor in parcel.tensors:
            if tensor.numel():
                piece = self._piece(tensor.detach().contiguous(), key.backward)
                if self.groups.batched:
                    self._leaving.append((destination, piece))
                else:
                    self._post(piece, destination, self.groups.payload, PAYLOAD)

    def last_sent(self, destination: int, stage: int, backward: bool) -> tuple[Spec, bytes] | None:
        """Spec and pickled other values of what was last sent to a stage of a rank; None before the first message."""
        return self._sent.get((destination, stage, backward))

    def send_failure(self, destination: int, key: Key, status: int, text: bytes) -> None:
        """Send the news of a failure in place of a value."""
        self._header(destination, key, status, len(text), 0, 0)
        self._post(_bytes_tensor(text), destination, self.groups.host, BLOB)

    def receive(self, source: int, key: Key) -> Message:
        """Wait for a message.

        Raises:
            PeerLost: the other rank is gone, or communication with it failed.
            WrongRun: the other rank is in another step.
        """
        self.flush()
        waiting = self._arrived.setdefault(source, {})
        while key not in waiting:
            found, message = self._next(source)
            waiting[found] = message
        self.reap()
        return waiting.pop(key)

    def flush(self) -> None:
        """Issue the payloads that were given to `send` since the last call as one batch.

        Raises:
            PeerLost: communication with a rank of the batch failed.
        """
        leaving, self._leaving = self._leaving, []
        if leaving:
            handles = self._issue(dsx_comm.isend, leaving)
            self._flying += [(handle, (leaving[0][0], leaving)) for handle in handles]

    def _issue(self, operation: Any, tensors: list[tuple[int, torch.Tensor]]) -> list[Any]:
        """Begin a batch of sends or receives: (peer, tensor) each."""
        group = self.groups.payload
        try:
            return dsx_comm.batch_isend_irecv(
                [dsx_comm.P2POp(operation, tensor, group=group, group_peer=peer) for peer, tensor in tensors]
            )
        except RuntimeError as error:
            raise self._lost(tensors[0][0], error) from error

    def reap(self) -> None:
        """Let go of what has been sent."""
        self._flying = [pair for pair in self._flying if not pair[0].is_completed()]

    def wait_sent(self, lost: set[int]) -> None:
        """Wait until everything is sent; sends to lost ranks are given up."""
        flying, self._flying = self._flying, []
        for handle, (destination, _) in flying:
            if destination in lost:
                continue
            try:
                handle.wait()
            except RuntimeError as error:
                raise self._lost(destination, error) from error

    # - the queue

    def _next(self, source: int) -> tuple[Key, Message]:
        header = torch.zeros(8, dtype=torch.int64)
        self._take(header, source, self.groups.host, HEADER)
        magic, run, stage, way, micro_batch, status, first, second = header.tolist()
        keeps, backward = divmod(way, 2)
        if magic != _MAGIC:
            raise WrongRun(f"{self._name_of(source)} sent something that is no message of a pipeline: different code?")
        key = Key(stage, bool(backward), micro_batch)
        blob = b""
        if first + second:
            raw = torch.empty(first + second, dtype=torch.uint8)
            self._take(raw, source, self.groups.host, BLOB)
            blob = bytes(raw.tolist()) if first + second < 64 else raw.numpy().tobytes()
        if status != DATA:
            message = Message(status, text=blob)
        else:
            message = Message(DATA, self._payload(source, key, blob[:first], blob[first:], bool(keeps)))
        if run != self.run:
            raise WrongRun(
                f"{self._name_of(source)} is in step {run}, this rank in step {self.run}: every rank of a pipeline "
                "must call train_batch and eval_batch equally often"
            )
        return key, message

    def _payload(self, source: int, key: Key, blob_spec: bytes, blob_extra: bytes, has_values: bool) -> Any:
        channel = (source, key.stage, key.backward)
        known = self._known.get(channel)
        if known is None and not blob_spec:
            raise WrongRun(f"{self._name_of(source)} sent tensors without saying their shapes: different code?")
        spec = pickle.loads(blob_spec) if blob_spec else known[0]  # type: ignore[index]
        extra = blob_extra if blob_extra else (known[1] if known and has_values else b"")
        self._known[channel] = (spec, extra)
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=self.groups.device) for one in spec.tensors]
        pieces = [(tensor, self._piece(tensor, key.backward)) for tensor in tensors if tensor.numel()]
        self._take_all(source, [piece for _, piece in pieces])
        for tensor, piece in pieces:
            if piece is not tensor:
                dsx_comm.all_gather_into_tensor(tensor.view(-1), piece, group=self.slicing[key.backward])
        for tensor, one in zip(tensors, spec.tensors):
            tensor.requires_grad_(one.requires_grad)
        return unflatten(spec.structure, tensors, pickle.loads(extra) if extra else [])

    def _take_all(self, source: int, pieces: list[torch.Tensor]) -> None:
        """Receive the payload of one message; on a device the stream waits for it, not the host."""
        if not self.groups.batched:
            for piece in pieces:
                self._take(piece, source, self.groups.payload, PAYLOAD)
        elif pieces:
            try:
                for handle in self._issue(dsx_comm.irecv, [(source, piece) for piece in pieces]):
                    handle.wait()
            except RuntimeError as error:
                raise self._lost(source, error) from error

    def _piece(self, tensor: torch.Tensor, backward: bool) -> torch.Tensor:
        """The elements of a tensor that are sent: this rank's part, or all if they cannot be divided."""
        group = self.slicing[backward]
        size = 1 if group is None else dsx_comm.get_world_size(group)
        if size == 1 or tensor.numel() % size:
            return tensor
        return tensor.view(-1).chunk(size)[dsx_comm.get_rank(group)]

    def _header(self, destination: int, key: Key, status: int, first: int, second: int, keeps: int) -> None:
        way = 2 * keeps + int(key.backward)
        numbers = [_MAGIC, self.run, key.stage, way, key.micro_batch, status, first, second]
        self._post(torch.tensor(numbers, dtype=torch.int64), destination, self.groups.host, HEADER)

    def _post(self, tensor: torch.Tensor, destination: int, group: Any, tag: int) -> None:
        try:
            handle = dsx_comm.isend(tensor, group=group, tag=tag, group_dst=destination)
        except RuntimeError as error:
            raise self._lost(destination, error) from error
        self._flying.append((handle, (destination, tensor)))

    def _take(self, tensor: torch.Tensor, source: int, group: Any, tag: int) -> None:
        try:
            dsx_comm.recv(tensor, group=group, tag=tag, group_src=source)
        except RuntimeError as error:
            raise self._lost(source, error) from error

    def _lost(self, rank: int, error: BaseException) -> PeerLost:
        if isinstance(error, PeerLost):
            return error
        return PeerLost(rank, f"communication with {self._name_of(rank)} failed: {type(error).__name__}: {error}")


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
