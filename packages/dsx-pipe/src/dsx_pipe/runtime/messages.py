"""Messages between the ranks of a pipeline: values of any structure, or the news that a stage failed.

Between two ranks messages form one queue. Each begins with a header of eight whole numbers (who, which micro-batch,
data or failure, sizes of what follows), so a receiver always knows what comes next: it can tell a message of another
step, and a stage that failed sends its error in place of tensors. Shapes and structure are sent when they differ from
the last message of the same kind; in an ordinary run that is once. Receivers take messages from the queue in the order
they come and keep those that are wanted later, so the ranks' orders need not agree.

A send never waits. Its tensors are kept until it is done (`reap`, `wait_sent`).

On CUDA headers travel over a group for host tensors, payloads over two device groups, one per direction: on one nccl
communicator two ranks that send to each other first wait for each other. (The CUDA path has not been run with more
than one device.)
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

_HEADER, _BLOB, _PAYLOAD = 11, 12, 13  # tags
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

    @staticmethod
    def of(value: Any) -> Spec:
        """The spec of a value."""
        structure, tensors, _ = flatten(value)
        return Spec(structure, tuple(TensorSpec.of(t) for t in tensors))

    def without_gradients(self) -> Spec:
        """The same structure, shapes and dtypes, whoever carries a gradient."""
        return Spec(self.structure, tuple(replace(t, requires_grad=False) for t in self.tensors))

    def __str__(self) -> str:
        return describe_parts(self.structure, [str(t) for t in self.tensors], [])


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
    """The process groups of one pipeline: headers, and payloads from lower to higher ranks and back."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.ranks = dsx_comm.get_all_ranks_from_group(group)
        self.rank, self.size = dsx_comm.get_rank(group), dsx_comm.get_world_size(group)
        self.host = self.down = self.up = group
        if device.type != "cpu" and self.size > 1:
            self.host = dsx_comm.new_group(self.ranks, backend="gloo", description="pipeline headers")
            self.down = dsx_comm.new_group(self.ranks, description="pipeline down")
            self.up = dsx_comm.new_group(self.ranks, description="pipeline up")

    def payload(self, source: int, destination: int) -> Any:
        """The group for tensors from one rank to another."""
        return self.down if source < destination else self.up


class Mailbox:
    """All messages of one rank to and from the others.

    Args:
        groups: the pipeline's groups.
        name_of: says what a rank is, for errors ("stage 1 (rank 1)").
        slicing: for activations and for gradients, the group of ranks that all have the same tensors to send, or None.
            Each of them then sends its piece, and the receivers gather the pieces among themselves.
    """

    def __init__(self, groups: Groups, name_of: Callable[[int], str], slicing: tuple[Any, Any] = (None, None)) -> None:
        self.groups, self._name_of, self._slicing = groups, name_of, slicing
        self.run = 0
        self._sent: dict[tuple[int, int, bool], tuple[Spec, bytes]] = {}
        self._known: dict[tuple[int, int, bool], tuple[Spec, bytes]] = {}
        self._arrived: dict[int, dict[Key, Message]] = {}
        self._flying: list[tuple[Any, Any]] = []

    def begin_run(self) -> None:
        """A new step begins; messages of earlier ones are no longer expected."""
        self.run += 1
        self._arrived.clear()

    def forget_shapes(self) -> None:
        """Negotiate structure and shapes again with the next messages. Both sides must call it."""
        self._sent.clear()
        self._known.clear()

    def send(self, destination: int, key: Key, value: Any) -> None:
        """Send a value; returns at once."""
        structure, tensors, others = flatten(value)
        spec = Spec(structure, tuple(map(TensorSpec.of, tensors)))
        extra = pickle.dumps(others) if others else b""
        channel = (destination, key.stage, key.backward)
        before = self._sent.get(channel)
        blob_spec = pickle.dumps(spec) if before is None or before[0] != spec else b""
        blob_extra = extra if before is None or before[1] != extra else b""
        self._sent[channel] = (spec, extra)
        self._header(destination, key, DATA, len(blob_spec), len(blob_extra), int(bool(extra)))
        if blob_spec or blob_extra:
            self._post(_bytes_tensor(blob_spec + blob_extra), destination, self.groups.host, _BLOB)
        group = self.groups.payload(self.groups.rank, destination)
        for tensor in tensors:
            if tensor.numel():
                self._post(self._piece(tensor.detach().contiguous(), key.backward), destination, group, _PAYLOAD)

    def send_failure(self, destination: int, key: Key, status: int, text: bytes) -> None:
        """Send the news of a failure in place of a value."""
        self._header(destination, key, status, len(text), 0, 0)
        self._post(_bytes_tensor(text), destination, self.groups.host, _BLOB)

    def receive(self, source: int, key: Key) -> Message:
        """Wait for a message.

        Raises:
            PeerLost: the other rank is gone, or communication with it failed.
            WrongRun: the other rank is in another step.
        """
        waiting = self._arrived.setdefault(source, {})
        while key not in waiting:
            found, message = self._next(source)
            waiting[found] = message
        self.reap()
        return waiting.pop(key)

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
        self._take(header, source, self.groups.host, _HEADER)
        magic, run, stage, way, micro_batch, status, first, second = header.tolist()
        keeps, backward = divmod(way, 2)
        if magic != _MAGIC:
            raise WrongRun(f"{self._name_of(source)} sent something that is no message of a pipeline: different code?")
        key = Key(stage, bool(backward), micro_batch)
        blob = b""
        if first + second:
            raw = torch.empty(first + second, dtype=torch.uint8)
            self._take(raw, source, self.groups.host, _BLOB)
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
        group = self.groups.payload(source, self.groups.rank)
        tensors = []
        for one in spec.tensors:
            tensor = torch.empty(one.shape, dtype=one.dtype, device=self.groups.device)
            if tensor.numel():
                piece = self._piece(tensor, key.backward)
                self._take(piece, source, group, _PAYLOAD)
                if piece is not tensor:
                    dsx_comm.all_gather_into_tensor(tensor.view(-1), piece, group=self._slicing[key.backward])
            tensors.append(tensor.requires_grad_(one.requires_grad))
        return unflatten(spec.structure, tensors, pickle.loads(extra) if extra else [])

    def _piece(self, tensor: torch.Tensor, backward: bool) -> torch.Tensor:
        """What of a tensor travels: this rank's part of its elements, or all where they cannot be divided."""
        group = self._slicing[backward]
        size = 1 if group is None else dsx_comm.get_world_size(group)
        if size == 1 or tensor.numel() % size:
            return tensor
        return tensor.view(-1).chunk(size)[dsx_comm.get_rank(group)]

    def _header(self, destination: int, key: Key, status: int, first: int, second: int, keeps: int) -> None:
        way = 2 * keeps + int(key.backward)
        numbers = [_MAGIC, self.run, key.stage, way, key.micro_batch, status, first, second]
        self._post(torch.tensor(numbers, dtype=torch.int64), destination, self.groups.host, _HEADER)

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
