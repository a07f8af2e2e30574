"""The handle of a converted model: what its tokens are, and the attention that its layers call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import dsx_comm
import torch
from dsx_core.modules import CallingHook
from torch import nn

from ..errors import ActivationArgumentError
from .combined import gather_documents, sequence_attention
from .cutting import place_in, sequence_segments, shard_sequence
from .loss import token_mean

__all__ = ["Described", "SequenceParallel", "add_hooks"]


@dataclass(frozen=True)
class Described:
    """A description of one forward's tokens.

    Attributes:
        length: of the whole sequence; None: each call asks the other ranks.
        documents: the document number of each token of the whole sequence.
    """

    length: int | None = None
    documents: torch.Tensor | None = None


class SequenceParallel:
    """The handle that `sequence_parallel` returns: it splits tensors, is told of the next tokens, ends the conversion.

    Attributes:
        group, order: as given.
        rank, size: this process' place in the group.
        mean_group: the ranks over which gradients are averaged: `group`, and in an engine the data-parallel ranks too.
        stages: the ranks that hold the other parts of the model, if it is one stage of a pipeline; else None. Attention
            may then be in any of the parts, and `check_attention` has to be called.
    """

    def __init__(self, model: nn.Module, group: Any, order: str, length: int | None, options: dict[str, Any]) -> None:
        self.group, self.order = group, order
        self.rank, self.size = place_in(group)
        self._name, self._fixed, self._options = type(model).__name__, length, options
        self.mean_group: Any = group
        self.stages: Any = None
        self._next: Described | None = None
        self._now = Described(length)
        self._calls, self._checked = 0, False
        self._ends: list[Callable[[], None]] = []
        self._switches: list[Callable[[bool], None]] = []
        self.is_paused = False

    def __repr__(self) -> str:
        return f"SequenceParallel({self._name}, rank {self.rank} of {self.size}, order={self.order!r})"

    # - for the training loop

    def shard(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's part of a tensor that all ranks of the group have whole; see `shard_sequence`."""
        return shard_sequence(tensor, self.group, dim=dim, order=self.order)

    def positions(self, length: int, device: Any = None) -> torch.Tensor:
        """(1, tokens): the places of this rank's tokens in a sequence of `length` tokens."""
        segments = sequence_segments(length, self.size, self.rank, self.order)
        return torch.cat([torch.arange(*one, device=device) for one in segments])[None]

    def token_mean(self, total: torch.Tensor, tokens: torch.Tensor | int) -> torch.Tensor:
        """`dsx_activations.token_mean` over all ranks whose gradients are averaged."""
        return token_mean(total, tokens, self.mean_group)

    def describe(self, *, length: int | None = None, documents: torch.Tensor | None = None) -> None:
        """Say what the tokens of the next forward are. Collective with `documents`.

        Args:
            length: tokens of the whole sequence; None: what `sequence_parallel` was told.
            documents: (batch, tokens) of this rank's tokens, see `sequence_attention`.

        Raises:
            ActivationArgumentError: the model is a stage of a pipeline, whose next forward may be of any micro-batch.
        """
        if self.stages is not None:
            raise ActivationArgumentError(
                f"sequence_parallel: describe(): {self._name} is a stage of a pipeline, which runs several"
                " micro-batches in turn; give sequence_parallel.length in the configuration, and for documents let them"
                " travel with the activations and call dsx_activations.sequence_attention(documents=...) in the layer"
            )
        length = self._fixed if length is None else length
        if documents is not None:
            length = self.agreed_length(documents.shape[1], documents.device) if length is None else length
            documents = gather_documents(documents, self.group, order=self.order, length=length)
        self._next = Described(length, documents)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the model's attention is its own again: every rank gives it whole sequences (generation)."""
        if self.is_paused:
            yield
            return
        self.pause(True)
        try:
            yield
        finally:
            self.pause(False)

    def remove(self) -> None:
        """End the conversion. Calling it again does nothing."""
        while self._ends:
            self._ends.pop()()

    # - for the two kinds of models

    def on_pause(self, function: Callable[[bool], None]) -> None:
        """Call a function with True where a pause begins, and with False where it ends."""
        self._switches.append(function)

    def pause(self, paused: bool) -> None:
        """Begin or end a pause; see `paused`."""
        if paused == self.is_paused:
            return
        self.is_paused = paused
        for switch in self._switches:
            switch(paused)

    def take_described(self) -> Described:
        """Take the description of the next forward."""
        found, self._next = self._next or Described(self._fixed), None
        return found

    def call_at_the_end(self, function: Callable[[], None]) -> None:
        """Call a function in `remove`."""
        self._ends.append(function)

    def agreed_length(self, tokens: int, device: Any) -> int:
        """Tokens of the whole sequence, from what every rank has. Collective; on a device the host waits.

        Raises:
            ActivationArgumentError: the numbers of tokens are not those of one sequence that was cut in this order.
        """
        if self._fixed is not None or self.size == 1:
            length = tokens if self._fixed is None else self._fixed
            counts = None
        else:
            found = torch.empty(self.size, dtype=torch.int64, device=device)
            mine = torch.tensor([tokens], device=device)
            dsx_comm.all_gather_into_tensor(found, mine, group=self.group)
            counts = found.tolist()
            length = sum(counts)
        expected = [
            sum(b - f for f, b in sequence_segments(length, self.size, rank, self.order)) for rank in range(self.size)
        ]
        got = [tokens if rank == self.rank else n for rank, n in enumerate(expected)] if counts is None else counts
        if got != expected:
            raise ActivationArgumentError(
                f"sequence_parallel: {self._name}: the ranks have {got} tokens, expected {expected}: the parts of one"
                f" sequence of {length} tokens in {self.order} order; cut every tensor with parallel.shard, or pad"
            )
        return length

    def begin(self, described: Described | None = None) -> None:
        """A forward of the model begins."""
        self._now = self.take_described() if described is None else described

    def begin_whole(self, length: int) -> None:
        """All tokens of the forward that goes on are there, and are about to be cut.

        Raises:
            ActivationArgumentError: another length was said, or the sequence is shorter than the group.
        """
        sequence_segments(length, self.size, self.rank, self.order)
        if self._now.length not in (None, length):
            raise ActivationArgumentError(
                f"sequence_parallel: {self._name}: got {length} tokens, expected the length that was given,"
                f" {self._now.length}"
            )
        self._now = replace(self._now, length=length)

    @property
    def length(self) -> int:
        """Tokens of the whole sequence of this forward; 0 before they are known."""
        return self._now.length or 0

    @property
    def documents(self) -> torch.Tensor | None:
        """Document numbers of this forward's whole sequence, if there are any."""
        return self._now.documents

    def end(self, output: Any) -> None:
        """A forward of the model has ended: its backward recomputes with what it was told of its tokens."""
        if self.stages is None:
            self.check_attention()
        described = self._now

        def again(grad: torch.Tensor) -> None:
            self._now = described

        for tensor in _tensors(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(again)

    def check_attention(self) -> None:
        """Raise unless a forward so far has called attention. Later calls do nothing. Collective over `stages`.

        Raises:
            ActivationArgumentError: there was no call; on all ranks of `stages`.
        """
        if self._checked:
            return
        calls = [self._calls] if self.stages is None else dsx_comm.together(self.stages).gather(self._calls)
        if not any(calls):
            where = self._name if self.stages is None else f"the {len(calls)} stages of {self._name}"
            raise ActivationArgumentError(
                f"sequence_parallel: no attention was found in {where}: its forward called neither"
                " F.scaled_dot_product_attention nor nn.MultiheadAttention nor transformers' attention interface, so"
                " its tokens would not see those of other ranks; call dsx_activations.sequence_attention in its"
                " attention"
            )
        self._checked = True

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
        """`sequence_attention` over the tokens of this forward."""
        self._calls += 1
        if k.shape[2] != q.shape[2]:
            raise ActivationArgumentError(
                f"sequence_parallel: {self._name}: got {q.shape[2]} queries and {k.shape[2]} keys, expected those of"
                " the same tokens: keys of earlier calls (a cache) and of other sequences are not cut over ranks;"
                " generate with whole sequences inside parallel.paused()"
            )
        if self._now.length is None:  # the first attention of a forward asks the other ranks
            self._now = replace(self._now, length=self.agreed_length(q.shape[2], q.device))
        now = self._now
        return sequence_attention(
            q, k, v, self.group, order=self.order, length=now.length, documents=now.documents, **self._options, **given
        )


def add_hooks(model: nn.Module, parallel: SequenceParallel, before: Callable[..., Any]) -> None:
    """Call `before(module, args, kwargs)` before each forward of the model, and `parallel.end` behind it."""

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if not parallel.is_paused:
            parallel.end(output)

    for handle in (
        model.register_forward_pre_hook(CallingHook(before), prepend=True, with_kwargs=True),
        model.register_forward_hook(CallingHook(after)),
    ):
        parallel.call_at_the_end(handle.remove)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for one in output.values():
            yield from _tensors(one)
    elif isinstance(output, (tuple, list)):
        for one in output:
            yield from _tensors(one)
