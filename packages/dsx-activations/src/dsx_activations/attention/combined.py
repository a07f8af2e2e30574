"""One call for attention over sequence shards: heads for tokens as far as there are key heads, and a ring for the rest.

The ranks of the group are teams of neighbours. In a team tokens are exchanged for heads (Ulysses); keys and values of
the same heads go around the teams (ring). A team of all ranks is Ulysses alone, teams of one rank are the ring alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import dsx_comm
import torch
from torch.nn import functional as F

from ..errors import ActivationArgumentError
from .cutting import Segments, place_in, sequence_segments
from .facts import Facts
from .fused import flex_mask
from .host_chunks import attend_from_host, lane_for
from .pieces import Work
from .ring import attend_around
from .ulysses import attend_by_heads
from .visible import Dropout, Visible, check_visible

__all__ = ["KERNELS", "gather_documents", "gather_sequence", "sequence_attention"]

KERNELS = ("auto", "sdpa", "flex", "pieces")


def sequence_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any = None,
    *,
    causal: bool = False,
    window: int | None = None,
    documents: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    order: str = "plain",
    length: int | None = None,
    team: int | None = None,
    overlap: int = 1,
    kernel: str | Callable[..., torch.Tensor] = "auto",
    host_chunks: int | None = None,
) -> torch.Tensor:
    """Attention of this rank's tokens over the whole sequence. Collective, as is its backward.

    Args:
        q: (batch, heads, tokens, features): this rank's tokens, as `shard_sequence` cuts them.
        k: (batch, key heads, tokens, features); the heads of queries are a multiple (GQA, MQA).
        v: (batch, key heads, tokens, value features).
        group: ranks that share the sequence; None: all ranks, or this process alone.
        causal: a token sees itself and the tokens before it.
        window: a token sees the tokens that are less than `window` away; None: no limit.
        documents: (batch, tokens) of whole numbers for this rank's tokens, or (batch, length) as `gather_documents`
            gives it: a token sees the tokens of its own number. A negative number is padding: it sees nothing, nothing
            sees it, and its result is zero.
        dropout_p: share of attention weights that become zero. Which ones is a function of `seed` and of sample, head
            and positions only: the same on any number of ranks.
        seed: of dropout; None: a number that the group's first rank draws from torch's generator of the CPU.
        scale: factor of the scores; None: 1 / sqrt(features).
        softcap: scores become `softcap * tanh(score / softcap)`, as in Gemma 2.
        order: "plain" or "zigzag"; "zigzag" balances the work of a causal mask in a ring.
        length: tokens of the whole sequence; None: as many on every rank, which every call compares by a small
            message. Give it in a training loop: on a device the host waits for that message.
        team: ranks that exchange tokens for heads, a divisor of the group's size; the others form rings. None: the
            largest one that also divides the number of key heads. 1: a ring alone.
        overlap: heads travel in as many messages, each while the attention of the one before is computed.
        kernel: computes the attention of whole sequences, where no ring is needed: "sdpa", "flex" (FlexAttention),
            "pieces" (matrix products, exact, in memory linear in the length), or a function
            `f(q, k, v, is_causal=..., scale=...)`, which is also given `window=` and `documents=` where there are any.
            "auto": "sdpa", with masks, dropout or a soft cap "pieces". In a ring "auto" and "sdpa" are torch's flash
            attention where it gives logarithms (the CPU; CUDA with 16-bit numbers) and no masks are there, otherwise
            pieces; "flex" is itself. A function needs `team` to be the group's size.
        host_chunks: queries, keys, values and results wait for the backward in page-locked host memory, in as many
            chunks of the sequence, of which the backward has two on the device at a time. `team` is then the group's
            size, and the kernel one of the ring. On a CPU, whose memory is the host's, nothing is moved. None: they
            stay on the device.

    Returns:
        (batch, heads, tokens, value features), in q's dtype.

    Raises:
        ActivationArgumentError: arguments do not fit, or the ranks differ in them.
    """
    name = "sequence_attention"
    check_visible(name, window, dropout_p)
    if not callable(kernel) and kernel not in KERNELS:
        raise ActivationArgumentError(f"{name}: kernel: got {kernel!r}, expected {', '.join(KERNELS)} or a function")
    further = {
        "window": window or 0, "dropout": math.ceil(dropout_p * 2**31), "documents": int(documents is not None),
        "seed": -1 if seed is None or not dropout_p else int(seed) % 2**63,
    }  # fmt: skip
    facts = Facts.of(name, q, k, v, group, order, length, further)
    if softcap is not None and not softcap > 0:
        raise ActivationArgumentError(f"{name}: softcap: got {softcap!r}, expected a number above 0, or None")
    if host_chunks is not None:
        _check_chunks(name, host_chunks, team, facts.size, kernel)
        team = facts.size
    number = _team(name, team, facts.size, k.shape[1])
    if isinstance(overlap, bool) or not isinstance(overlap, int) or overlap < 1:
        raise ActivationArgumentError(f"{name}: overlap: got {overlap!r}, expected a whole number of at least 1")
    whole = None if documents is None else _whole_documents(name, documents, q, facts, order)
    visible = Visible(bool(causal), window, whole)
    seed = _shared_seed(seed, facts, q.device) if dropout_p else 0
    factor: float = q.shape[-1] ** -0.5 if scale is None else float(scale)
    within, across = facts.in_teams(number)
    if callable(kernel) and across.size > 1:
        raise ActivationArgumentError(
            f"{name}: got a function as kernel with teams of {number} of the group's {facts.size} ranks, expected"
            f" team={facts.size}: keys of other teams come in blocks, which the function could not put together; give"
            ' team, or kernel="auto", "flex" or "pieces"'
        )
    each = q.shape[1] // k.shape[1]

    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: tuple[int, int], key: int) -> torch.Tensor:
        fitting = _fitting(k, v, heads, key, each)
        dropout = Dropout(dropout_p, seed, heads[0]) if dropout_p else None
        lane = None if host_chunks is None else lane_for(q.device)
        if host_chunks is not None and lane is not None:
            work = Work(visible, factor, dropout, softcap, str(kernel))
            return attend_from_host(q, *fitting, work, host_chunks, lane)
        alone = across.size == 1 and dropout is None and softcap is None
        if alone and (kernel not in ("auto", "pieces") or (kernel == "auto" and visible.plain)):
            return _by_kernel(kernel, q, *_repeated(fitting, q.shape[1]), visible, factor)
        return attend_around(q, *fitting, across, Work(visible, factor, dropout, softcap, str(kernel)))

    if (dropout_p or softcap is not None) and kernel not in ("auto", "pieces"):
        raise ActivationArgumentError(
            f'{name}: got kernel={kernel!r} with dropout_p={dropout_p} and softcap={softcap}, expected "pieces" or'
            ' "auto": the choice of other kernels depends on how the sequence is cut, and they have no soft cap'
        )
    return attend_by_heads(q, k, v, within, local, overlap)


def _check_chunks(name: str, chunks: Any, team: int | None, size: int, kernel: Any) -> None:
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ActivationArgumentError(f"{name}: host_chunks: got {chunks!r}, expected a whole number >= 1, or None")
    if team not in (None, size) or callable(kernel):
        raise ActivationArgumentError(
            f"{name}: host_chunks: got team={team} and {'a function as kernel' if callable(kernel) else kernel},"
            f" expected team={size} (the group's size: keys in host memory do not go around a ring) and"
            ' kernel="auto", "flex" or "pieces": a function could not put chunks together'
        )


def gather_documents(
    documents: torch.Tensor, group: Any = None, *, order: str = "plain", length: int | None = None
) -> torch.Tensor:
    """The document numbers of the whole sequence, for all layers of a forward. Collective.

    Args:
        documents: (batch, tokens) of whole numbers for this rank's tokens.
        group, order, length: as for `sequence_attention`.

    Returns:
        (batch, length).
    """
    size = place_in(group)[1]
    whole = documents.shape[1] * size if length is None else length
    return gather_sequence(documents, group, order=order, length=whole)


def gather_sequence(part: torch.Tensor, group: Any = None, *, order: str, length: int) -> torch.Tensor:
    """(batch, tokens, ...) of this rank's tokens -> (batch, length, ...) of all. Collective, without gradients."""
    rank, size = place_in(group)
    segments = tuple(sequence_segments(length, size, one, order) for one in range(size))
    return _gathered(part, segments, rank, length, group)


def _gathered(
    documents: torch.Tensor, segments: tuple[Segments, ...], rank: int, length: int, group: Any
) -> torch.Tensor:
    if len(segments) == 1:
        return documents
    batch, tokens, *rest = documents.shape
    most = max(sum(b - f for f, b in of_rank) for of_rank in segments)
    mine = documents.new_zeros(batch, most, *rest)
    mine[:, :tokens] = documents
    found = mine.new_empty(len(segments), batch, most, *rest)
    dsx_comm.all_gather_into_tensor(found, mine, group=group)
    whole = documents.new_empty(batch, length, *rest)
    for of_rank, part in zip(segments, found):
        begin = 0
        for first, behind in of_rank:
            whole[:, first:behind] = part[:, begin : begin + behind - first]
            begin += behind - first
    return whole


def _team(name: str, team: int | None, size: int, key_heads: int) -> int:
    if team is None:
        return math.gcd(size, key_heads)
    if isinstance(team, bool) or not isinstance(team, int) or team < 1 or size % team:
        raise ActivationArgumentError(f"{name}: team: got {team!r}, expected a divisor of the group's {size} ranks")
    return team


def _whole_documents(name: str, documents: torch.Tensor, q: torch.Tensor, facts: Facts, order: str) -> torch.Tensor:
    shape, tokens = tuple(documents.shape), q.shape[2]
    allowed = {(q.shape[0], tokens), (q.shape[0], facts.length)}
    if shape not in allowed or documents.is_floating_point() or documents.dtype == torch.bool:
        raise ActivationArgumentError(
            f"{name}: documents: got shape {shape} of {documents.dtype}, expected {(q.shape[0], tokens)} of whole"
            f" numbers: those of this rank's tokens, or all {facts.length}; cut them with shard_sequence as the tokens"
        )
    if shape[1] == facts.length:
        return documents.to(q.device)
    return _gathered(documents.to(q.device), facts.segments, facts.rank, facts.length, facts.group)


def _shared_seed(seed: int | None, facts: Facts, device: torch.device) -> Any:
    """The seed of a call. Where it is drawn, a recomputation draws the same one: it restores the generator."""
    if seed is not None:
        return int(seed) % 2**63
    drawn = int(torch.randint(2**62, (), device="cpu"))
    if facts.size == 1:
        return drawn
    shared = torch.full((1,), drawn, dtype=torch.int64, device=device)
    dsx_comm.broadcast(shared, group=facts.group, group_src=0)
    return shared[0]


def _fitting(
    k: torch.Tensor, v: torch.Tensor, heads: tuple[int, int], key: int, each: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of which each belongs to as many heads of queries, one after the other."""
    number = heads[1] - heads[0]
    of_each = [head // each - key for head in range(*heads)]
    if k.shape[1] and number % k.shape[1] == 0 and of_each == [n * k.shape[1] // number for n in range(number)]:
        return k, v
    index = torch.arange(*heads, device=k.device) // each - key  # made on the device: the host does not wait
    return k[:, index], v[:, index]


def _repeated(fitting: tuple[torch.Tensor, torch.Tensor], heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = fitting
    times = heads // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def _by_kernel(
    kernel: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible, scale: float
) -> torch.Tensor:
    if kernel == "flex":
        return _flex(q, k, v, visible, scale)
    if not callable(kernel):
        if visible.plain:
            return F.scaled_dot_product_attention(q, k, v, is_causal=visible.causal, scale=scale)
        seen = visible.mask(q.shape[2], q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        return out if visible.documents is None else out.masked_fill(visible.documents[:, None, :, None] < 0, 0.0)
    further = {"window": visible.window, "documents": visible.documents}
    given = {key: value for key, value in further.items() if value is not None}
    found: Any = kernel(q, k, v, is_causal=visible.causal, scale=scale, **given)
    return found


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible, scale: float) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention  # lazy import: imports dynamo

    whole = 0, q.shape[2]
    out: Any = flex_attention(q, k, v, block_mask=flex_mask(visible, whole, whole, q.device), scale=scale)
    return out
