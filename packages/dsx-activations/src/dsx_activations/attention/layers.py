"""Layers of which one chunk of the sequence is computed at a time, while those before it wait in host memory.

    y = run_in_host_chunks(project, finish, x, group, chunks=8, causal=True)

First every chunk is projected, and its tokens are exchanged for heads; then the attention of one chunk of queries after
the other is computed over keys that come from host memory, and finished. Each projection and each end is a checkpoint,
whose inputs come from host memory too. `host_chunks` keeps what waits, `swapping` exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..errors import ActivationArgumentError
from .cutting import Segments, even_parts
from .facts import Facts
from .fused import backward_of, forward_of
from .host_chunks import Shelf, in_turn, lane_for, sees
from .pieces import Work, wide
from .recorded import Recorded
from .swapping import Swap
from .ulysses import dealt
from .visible import Visible, check_visible

__all__ = ["run_in_host_chunks"]

Tensors = tuple[torch.Tensor, ...]


def run_in_host_chunks(
    project: Callable[..., Tensors],
    finish: Callable[..., torch.Tensor],
    x: torch.Tensor,
    group: Any = None,
    *,
    chunks: int,
    parameters: Iterable[torch.Tensor] | None = None,
    causal: bool = False,
    window: int | None = None,
    documents: torch.Tensor | None = None,
    scale: float | None = None,
    order: str = "plain",
    length: int | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """`finish(x, attention(*project(x, positions)))` over sequence shards, by chunks. Collective, as is its backward.

    The device holds `x`, the result, and two chunks of everything else. Queries, keys, values, results of attention and
    the inputs of both functions wait for the backward in page-locked host memory (on a CPU: where they are).

    Args:
        project: called with a chunk (batch, some tokens, width) and its positions (1, some tokens) in the whole
            sequence; returns queries (batch, heads, some tokens, features), keys and values (batch, key heads, ...).
        finish: called with the chunk and its attention (batch, heads, some tokens, value features); returns the
            result (batch, some tokens, any width). It treats each token alone.
        x: (batch, tokens, width): this rank's tokens, as `shard_sequence` cuts them.
        group: ranks that share the sequence; None: all ranks, or this process alone.
        chunks: of each rank's tokens; fewer where there are fewer tokens.
        parameters: the tensors, beside `x`, that get gradients. None: the parameters of `project` and `finish`, which
            are then modules.
        causal, window, scale, order, length, kernel: as for `sequence_attention`.
        documents: (batch, length) of the whole sequence, as `gather_documents` gives them.

    Returns:
        (batch, tokens, width of `finish`).

    Raises:
        ActivationArgumentError: arguments do not fit, ranks differ in them, or a function has other parameters.
    """
    name = "run_in_host_chunks"
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ActivationArgumentError(f"{name}: chunks: got {chunks!r}, expected a whole number of at least 1")
    if kernel not in ("auto", "sdpa", "flex", "pieces"):
        raise ActivationArgumentError(f"{name}: kernel: got {kernel!r}, expected auto, sdpa, flex or pieces")
    if x.dim() != 3:
        raise ActivationArgumentError(f"{name}: got x of shape {tuple(x.shape)}, expected (batch, tokens, width)")
    check_visible(name, window, 0.0)
    known = list(parameters) if parameters is not None else _parameters_of(name, project, finish)
    one = x[:, None]  # what the ranks have to agree in, as of one head
    further = {"window": window or 0, "chunks": chunks, "documents": int(documents is not None)}
    facts = Facts.of(name, one, one, one, group, order, length, further)
    if documents is not None and tuple(documents.shape) != (x.shape[0], facts.length):
        raise ActivationArgumentError(
            f"{name}: documents: got shape {tuple(documents.shape)}, expected {(x.shape[0], facts.length)}: those of"
            " the whole sequence, as gather_documents gives them"
        )
    layer = _Layer.of(project, finish, facts, chunks, x.device, Visible(bool(causal), window, documents), scale, kernel)
    trained = [p for p in known if p.requires_grad]
    return _InHostChunks.apply(layer, torch.is_grad_enabled(), x, *trained)  # type: ignore[no-any-return]


def _parameters_of(name: str, *functions: Any) -> list[torch.Tensor]:
    for function in functions:
        if not isinstance(function, nn.Module):
            raise ActivationArgumentError(
                f"{name}: got {type(function).__name__} without parameters=, expected modules, or the list of"
                " parameters that both functions use"
            )
    return list({id(p): p for function in functions for p in function.parameters()}.values())


@dataclass
class _Layer:
    """The functions of a layer, and the split of its tokens.

    Attributes:
        ranges: of each chunk the tokens among this rank's.
        facts: of each chunk the peers and their tokens of it.
        places: of each chunk the positions in the whole sequence of the tokens that heads have, in their order.
        positions: of this rank's tokens, (1, tokens).
    """

    project: Callable[..., Any]
    finish: Callable[..., Any]
    ranges: Segments
    facts: tuple[Facts, ...]
    places: tuple[Segments, ...]
    positions: torch.Tensor
    visible: Visible
    scale: float | None
    kernel: str
    heads: tuple[int, int] = (0, 0)

    @classmethod
    def of(
        cls, project: Any, finish: Any, facts: Facts, chunks: int, device: torch.device, visible: Visible, scale: Any,
        kernel: str,
    ) -> _Layer:  # fmt: skip
        chunks = min(chunks, *(facts.tokens_of(rank) for rank in range(facts.size)), facts.length)
        cut = [_cut(facts.segments[rank], chunks) for rank in range(facts.size)]
        of_chunks, places = [], []
        for number in range(chunks):
            within, across = replace(facts, segments=tuple(one[number] for one in cut)).in_teams(facts.size)
            of_chunks.append(within)
            places.append(across.segments[0])
        positions = torch.cat([torch.arange(*one, device=device) for one in facts.segments[facts.rank]])[None]
        ranges = even_parts(facts.tokens_of(facts.rank), chunks)
        return cls(
            project, finish, ranges, tuple(of_chunks), tuple(places), positions, visible, scale, kernel
        )  # fmt: skip

    def swap(self, chunk: int, kinds: str) -> Swap:
        """The exchange of a chunk's tensors: "q" is one with the heads of queries, "k" one with those of keys."""
        facts = self.facts[chunk]
        dealt_out, numbers = dealt(*self.heads, facts.size), self.heads
        which = ["qk".index(kind) for kind in kinds]
        return Swap(facts, [dealt_out[n] for n in which], [numbers[n] for n in which])

    def index(self, device: torch.device) -> torch.Tensor:
        """For each of this rank's heads of queries its head of keys, among this rank's."""
        facts, (queries, keys) = self.facts[0], self.heads
        of_queries, of_keys = dealt(queries, keys, facts.size)
        return torch.arange(*of_queries[facts.rank], device=device) // (queries // keys) - of_keys[facts.rank][0]


def _cut(segments: Segments, chunks: int) -> list[Segments]:
    """The places of a rank's tokens in chunks."""
    found: list[Segments] = []
    for low, high in even_parts(sum(b - f for f, b in segments), chunks):
        part, begin = [], 0
        for first, behind in segments:
            a, b = max(low, begin), min(high, begin + behind - first)
            if b > a:
                part.append((first + a - begin, first + b - begin))
            begin += behind - first
        found.append(tuple(part))
    return found


class _InHostChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: _Layer, training: bool, x: torch.Tensor, *known: torch.Tensor) -> torch.Tensor:
        run = _Run(layer, training, x, known)
        y = run.forward(x)
        ctx.run = run
        ctx.save_for_backward(*(() if run.moves else (x,)))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _ = ctx.saved_tensors  # of a CPU: raises if x was changed in place
        of_x, of_known = ctx.run.backward(grad)
        return None, None, of_x, *of_known


class _Run:
    """One forward of a layer and its backward."""

    def __init__(self, layer: _Layer, training: bool, x: torch.Tensor, known: Sequence[torch.Tensor]) -> None:
        self._layer, self._training, self._known = layer, training, known
        lane = lane_for(x.device)
        self.moves = lane is not None
        self._inputs, self._queries, self._keys, self._results, self._sums = (Shelf(lane) for _ in range(5))
        self._lane, self._shape = lane, x.shape
        self._projected: list[Recorded] = []
        self._finished: list[Recorded] = []
        self._work, self._features = Work(layer.visible, 1.0), 0
        self._at_hand: dict[Shelf, Tensors] = {}

    def _call(self, function: Any, inputs: Any, into: list[Recorded]) -> Tensors:
        if not self._training:
            out = function(*(t for t, _ in inputs))
            return out if isinstance(out, (tuple, list)) else (out,)  # type: ignore[return-value]
        into.append(Recorded(function, inputs, self._known))
        return into[-1].results

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's result."""
        layer, y = self._layer, None
        parts = [x[:, slice(*one)] for one in layer.ranges]
        self._project(parts)
        for chunk, found in enumerate(in_turn([((self._queries, c),) for c in range(len(parts))])):
            out, logs = self._attended(chunk, found[0])
            (mine,) = layer.swap(chunk, "q").exchange("tokens", (out,))
            self._results.put(chunk, mine, logs)
            again = [self._again(self._inputs, chunk), self._again(self._results, chunk)]
            (part,) = self._call(layer.finish, list(zip((parts[chunk], mine), again)), self._finished)
            if part.dim() != 3 or part.shape[:2] != parts[chunk].shape[:2]:
                raise ActivationArgumentError(
                    f"run_in_host_chunks: finish gave shape {tuple(part.shape)}, expected"
                    f" {(*parts[chunk].shape[:2], 'any')}"
                )
            y = part.new_empty(*self._shape[:2], part.shape[2]) if y is None else y
            y[:, slice(*layer.ranges[chunk])] = part
        for shelf in (self._inputs, self._queries, self._keys, self._results):
            shelf.let_go()
        return y  # type: ignore[return-value]

    def _again(self, shelf: Shelf, chunk: int) -> Callable[[], torch.Tensor]:
        """Gives the first tensor of a chunk, which the step that recomputes it has at hand."""
        return lambda: (self._at_hand.get(shelf) or shelf.take(chunk))[0]

    def _project(self, parts: Sequence[torch.Tensor]) -> None:
        """Queries, keys and values of every chunk. A chunk's travel while the next one is projected."""
        layer, pending = self._layer, None
        for chunk, part in enumerate(parts):
            self._inputs.put(chunk, part)
            inputs = [(part, self._again(self._inputs, chunk)), (layer.positions[:, slice(*layer.ranges[chunk])], None)]
            q, k, v = self._call(layer.project, inputs, self._projected)
            if not chunk:
                self._learn(q, k, v)
            if pending is not None:
                self._shelve(chunk - 1, *pending)
            swap = layer.swap(chunk, "qkk")
            pending = swap, swap.send("heads", (q, k, v))
        self._shelve(len(parts) - 1, *pending)  # type: ignore[misc]

    def _shelve(self, chunk: int, swap: Swap, message: Any) -> None:
        q, k, v = swap.joined("heads", message)
        self._queries.put(chunk, q)
        self._keys.put(chunk, k, v)

    def _learn(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Learn the numbers and sizes of heads from the first chunk, and check them."""
        layer, batch = self._layer, self._shape[0]
        number = layer.ranges[0][1] - layer.ranges[0][0]
        if any(t.dim() != 4 or t.shape[0] != batch or t.shape[2] != number for t in (q, k, v)) or (
            q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1] or k.shape[3] != q.shape[3]
        ):
            raise ActivationArgumentError(
                f"run_in_host_chunks: project gave shapes {', '.join(str(tuple(t.shape)) for t in (q, k, v))}, expected"
                f" ({batch}, heads, {number}, features) of queries, and of keys and values with one number of heads"
                " that divides it"
            )
        layer.heads = q.shape[1], k.shape[1]
        scale = q.shape[3] ** -0.5 if layer.scale is None else float(layer.scale)
        self._work = Work(layer.visible, scale, None, None, layer.kernel)
        self._index, self._features = layer.index(q.device), v.shape[3]

    def _seen(self, chunk: int) -> list[int]:
        places = self._layer.places
        return [n for n in range(len(places)) if sees(self._work, places[chunk], places[n])]

    def _attended(self, chunk: int, found: Tensors) -> Tensors:
        """The attention of a chunk of queries, in their dtype, and the logarithms of its sums."""
        (q,), seen, places = found, self._seen(chunk), self._layer.places
        if not q.shape[1]:
            return q.new_empty(*q.shape[:3], self._features), q.new_empty(0)
        with torch.autocast(q.device.type, enabled=False):
            sums = forward_of(q, q.shape[1], self._features, places[chunk], self._work)
            for n, ((k, v),) in zip(seen, in_turn([((self._keys, n),) for n in seen])):
                sums.add(k[:, self._index], v[:, self._index], places[n])
            out, logs = sums.result()
        return out.to(q.dtype), logs

    def backward(self, grad: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The gradients of x and of the parameters."""
        layer = self._layer
        of_x = grad.new_zeros(self._shape)
        of_known: list[torch.Tensor | None] = [None] * len(self._known)
        of_queries = Shelf(self._lane)
        numbers = range(len(layer.ranges))
        steps: list[Any] = [((self._inputs, c), (self._results, c), (self._queries, c)) for c in numbers]
        for chunk, ((x,), (mine, logs), (q,)) in enumerate(in_turn(steps)):
            part = slice(*layer.ranges[chunk])
            self._at_hand = {self._inputs: (x,), self._results: (mine,)}
            (of_part, of_mine), some = self._finished[chunk].gradients([grad[:, part]])
            self._finished[chunk] = None  # type: ignore[call-overload]
            of_known = _added(of_known, some)
            if of_part is not None:
                of_x[:, part] = of_part
            of_mine = torch.zeros_like(mine) if of_mine is None else of_mine
            given, out = layer.swap(chunk, "qq").exchange("heads", (of_mine, mine))
            of_queries.put(chunk, self._attended_back(chunk, q, out, logs, given))
        for n in numbers:
            if not self._sums.take(n):  # keys that no query sees
                self._sums.put(n, *(torch.zeros_like(t, dtype=wide(t.dtype)) for t in self._keys.take(n)))
        steps = [((of_queries, c), (self._sums, c), (self._inputs, c)) for c in numbers]
        for chunk, ((of_q,), of_keys, (x,)) in enumerate(in_turn(steps)):
            part = slice(*layer.ranges[chunk])
            grads = layer.swap(chunk, "qkk").exchange("tokens", (of_q, *(t.to(of_q.dtype) for t in of_keys)))
            self._at_hand = {self._inputs: (x,)}
            (of_part,), some = self._projected[chunk].gradients(grads)
            self._projected[chunk] = None  # type: ignore[call-overload]
            of_known = _added(of_known, some)
            if of_part is not None:
                of_x[:, part] += of_part
        self._at_hand = {}
        return of_x, of_known

    def _attended_back(
        self, chunk: int, q: torch.Tensor, out: torch.Tensor, logs: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of a chunk of queries; those of keys and values are added up on their shelf."""
        if not q.shape[1]:
            return q
        seen, places = self._seen(chunk), self._layer.places
        steps: list[Any] = [((self._keys, n), (self._sums, n)) for n in seen]
        with torch.autocast(q.device.type, enabled=False):
            sums = backward_of(q, q.shape[1], out.shape[3], (out, logs), given, places[chunk], self._work)
            for n, ((k, v), before) in zip(seen, in_turn(steps)):
                added = [
                    torch.zeros_like(t, dtype=wide(t.dtype)).index_add_(1, self._index, one.to(wide(t.dtype)))
                    for t, one in zip((k, v), sums.add(k[:, self._index], v[:, self._index], places[n]))
                ]
                self._sums.put(n, *(a + b for a, b in zip(before, added)) if before else added)
        self._sums.let_go()
        return sums.grad_q().to(q.dtype)


def _added(total: list[torch.Tensor | None], some: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(total, some)]
