"""Packs several sequences into one row, without padding; no sequence attends to another.

A packed batch keeps each sequence's own positions (from 0) and an attention mask that is block diagonal: a token
attends only to tokens of its own sequence. So the outputs of a sequence are the same as without packing. The label of a
first token is set to -100, since models that shift labels would predict it from the last token of the previous
sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import DataArgumentError

__all__ = ["PackingCollator", "block_diagonal_mask", "pack_lengths"]

IGNORED = -100
"""Label that losses leave out (the `ignore_index` of torch's cross entropy)."""


def pack_lengths(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Divide sequences among rows of at most `capacity` tokens by best fit, the longest sequence first.

    Returns:
        For each row the numbers of its sequences, in increasing order.

    Raises:
        DataArgumentError: a sequence is longer than a row.
    """
    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1)
    if sizes.size and int(sizes.max()) > capacity:
        raise DataArgumentError(
            f"pack_lengths: got a sequence of {int(sizes.max())} tokens, expected at most the capacity of a row,"
            f" {capacity}"
        )
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # entry n: the rows with room for n more tokens
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        room = next((free for free in range(size, capacity + 1) if by_room[free]), None)
        if room is None:
            rows.append([number])
            by_room[capacity - size].append(len(rows) - 1)
        else:
            row = by_room[room].pop()
            rows[row].append(number)
            by_room[room - size].append(row)
    return [sorted(row) for row in rows]


def block_diagonal_mask(segments: torch.Tensor, *, causal: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Attention mask of packed rows.

    Args:
        segments: [rows, tokens], integers: number of each token's sequence from 1; 0 is padding.
        causal: a token attends only to itself and to earlier tokens.
        dtype: None: boolean, True where attention is allowed (as `scaled_dot_product_attention` takes it); a floating
            type: 0 where it is allowed and the smallest number elsewhere, which is added to scores.

    Returns:
        [rows, 1, tokens, tokens]. A padding token attends to itself, so that no row of scores is empty.
    """
    same = segments[:, :, None] == segments[:, None, :]
    same &= (segments != 0)[:, :, None]
    tokens = segments.shape[1]
    if causal:
        same &= torch.ones(tokens, tokens, dtype=torch.bool, device=segments.device).tril()
    same |= torch.eye(tokens, dtype=torch.bool, device=segments.device)
    allowed = same[:, None]
    if dtype is None:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


class PackingCollator:
    """A `collate_fn` that packs the sequences of a batch into rows.

    A sample is a sequence of token numbers, or a mapping with `input_ids` and optionally `labels`.

    Args:
        row_length: tokens per row.
        causal: mask and labels for a model that predicts the next token.
        pad_token_id: fills the rest of a row.
        mask_dtype: dtype of the mask; see `block_diagonal_mask`. Hugging Face models take a boolean mask.

    Returns of a call:
        `input_ids`, `labels`, `position_ids`, `segment_ids`: [rows, row_length], int64; `attention_mask`: [rows, 1,
        row_length, row_length].

    Raises:
        DataArgumentError: `row_length` is below 1. A call raises it for a sequence longer than a row, and if a sample
            has not as many labels as tokens.
    """

    def __init__(
        self, row_length: int, *, causal: bool = True, pad_token_id: int = 0, mask_dtype: torch.dtype | None = None
    ) -> None:
        if row_length < 1:
            raise DataArgumentError(f"PackingCollator(row_length=...): got {row_length}, expected at least 1")
        self.row_length, self.causal, self.pad_token_id, self.mask_dtype = row_length, causal, pad_token_id, mask_dtype

    def __call__(self, samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Pack one batch."""
        pairs = [self._tokens(sample) for sample in samples]
        rows = pack_lengths([len(tokens) for tokens, _ in pairs], self.row_length)
        shape = (len(rows), self.row_length)
        ids = torch.full(shape, self.pad_token_id, device="cpu")
        labels = torch.full(shape, IGNORED, device="cpu")
        positions, segments = (
            torch.zeros(shape, dtype=torch.int64, device="cpu"),
            torch.zeros(shape, dtype=torch.int64, device="cpu"),
        )
        for row, numbers in enumerate(rows):
            start = 0
            for segment, number in enumerate(numbers, 1):
                tokens, wanted = pairs[number]
                stop = start + len(tokens)
                ids[row, start:stop], labels[row, start:stop] = tokens, wanted
                positions[row, start:stop] = torch.arange(len(tokens), device="cpu")
                segments[row, start:stop] = segment
                if self.causal and len(tokens):
                    labels[row, start] = IGNORED
                start = stop
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions,
            "segment_ids": segments,
            "attention_mask": block_diagonal_mask(segments, causal=self.causal, dtype=self.mask_dtype),
        }

    @staticmethod
    def _tokens(sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = sample["input_ids"] if isinstance(sample, Mapping) else sample
        tokens = torch.as_tensor(np.asarray(ids)).to(torch.int64).reshape(-1)
        labels = sample.get("labels") if isinstance(sample, Mapping) else None
        wanted = tokens if labels is None else torch.as_tensor(np.asarray(labels)).to(torch.int64).reshape(-1)
        if len(wanted) != len(tokens):
            raise DataArgumentError(
                f"PackingCollator: got {len(wanted)} labels for {len(tokens)} tokens, expected as many"
            )
        return tokens, wanted
