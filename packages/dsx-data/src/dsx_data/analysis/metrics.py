"""Metrics of difficulty: functions from a batch to one number per sample, or to a sum over all samples.

A batch is what the analyzer's collate function makes: a tensor [samples, tokens], a mapping with `input_ids` (and
perhaps `attention_mask`), or a list of sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import DataArgumentError

__all__ = ["SequenceLength", "VocabularyCounts", "VocabularyRarity"]


class SequenceLength:
    """Tokens of each sample.

    Args:
        pad_token_id: the token that does not count. None: the `attention_mask` of a batch says which tokens count;
            without one all do.
    """

    def __init__(self, pad_token_id: int | None = None) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, batch: Any) -> torch.Tensor:
        """The metric of each sample of a batch: [samples], int64."""
        sizes, tokens = _flat(batch, self.pad_token_id)
        del tokens
        return torch.from_numpy(sizes)


class VocabularyCounts:
    """Number of occurrences of each token in the dataset; a metric of type `accumulate_value_over_samples`.

    Args:
        vocabulary_size: number of different tokens.
        pad_token_id: a token that is not counted.

    Raises:
        DataArgumentError: the size is below 1. A call raises it for a token outside of the vocabulary.
    """

    def __init__(self, vocabulary_size: int, pad_token_id: int | None = None) -> None:
        if vocabulary_size < 1:
            raise DataArgumentError(f"VocabularyCounts: got a vocabulary of {vocabulary_size}, expected at least 1")
        self.vocabulary_size, self.pad_token_id = vocabulary_size, pad_token_id

    def __call__(self, batch: Any) -> torch.Tensor:
        """The number of occurrences of each token in a batch: [vocabulary_size], int64."""
        _, tokens = _flat(batch, self.pad_token_id)
        _check_tokens(tokens, self.vocabulary_size)
        return torch.from_numpy(np.bincount(tokens, minlength=self.vocabulary_size))


class VocabularyRarity:
    """Rarity of the tokens of each sample: the sum of -ln(frequency) over them, rounded.

    Args:
        counts: how often each token occurs in the dataset, [vocabulary_size]; what `VocabularyCounts` gives.
        pad_token_id: a token that is not counted.
        resolution: the sum, in nat, is multiplied by this before rounding.

    Raises:
        DataArgumentError: the counts are empty. A call raises it for a token outside of the vocabulary.
    """

    def __init__(self, counts: Any, pad_token_id: int | None = None, *, resolution: int = 1) -> None:
        numbers = np.asarray(counts, np.float64).reshape(-1)
        if not numbers.size or numbers.sum() <= 0:
            raise DataArgumentError("VocabularyRarity(counts=...): got no counts, expected those of the dataset")
        self.pad_token_id, self.resolution = pad_token_id, resolution
        # A token that never occurred in the counted data is as rare as one that occurred once.
        self._information = -np.log(np.maximum(numbers, 1.0) / numbers.sum())

    def __call__(self, batch: Any) -> torch.Tensor:
        """The metric of each sample of a batch: [samples], int64."""
        sizes, tokens = _flat(batch, self.pad_token_id)
        _check_tokens(tokens, self._information.size)
        ends = np.cumsum(sizes)
        sums = np.concatenate([[0.0], np.cumsum(self._information[tokens])])
        rarity = (sums[ends] - sums[ends - sizes]) * self.resolution
        return torch.from_numpy(np.rint(rarity).astype(np.int64))


def _flat(batch: Any, pad: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The number of tokens of each sample, and the tokens of all samples one after the other, without padding."""
    mask = None
    if isinstance(batch, Mapping):
        mask = batch.get("attention_mask") if pad is None else None
        if "input_ids" not in batch:
            raise DataArgumentError(f"got a batch with {sorted(map(str, batch))}, expected input_ids among them")
        batch = batch["input_ids"]
    if isinstance(batch, (list, tuple)) and not (len(batch) == 1 and getattr(batch[0], "ndim", 1) == 2):
        rows = [_array(row["input_ids"] if isinstance(row, Mapping) else row).reshape(-1) for row in batch]
        if pad is not None:
            rows = [row[row != pad] for row in rows]
        sizes = np.array([row.size for row in rows], np.int64)
        return sizes, np.concatenate(rows) if rows else np.zeros(0, np.int64)
    table = _array(batch[0] if isinstance(batch, (list, tuple)) else batch)
    if table.ndim != 2:
        raise DataArgumentError(f"got tokens of {table.ndim} dimensions, expected [samples, tokens]")
    counted = np.ones(table.shape, bool) if mask is None else _array(mask).astype(bool)
    if pad is not None:
        counted = table != pad
    return counted.sum(1).astype(np.int64), table[counted]


def _array(tokens: Any) -> np.ndarray:
    return tokens.cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)


def _check_tokens(tokens: np.ndarray, vocabulary_size: int) -> None:
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary_size:
        raise DataArgumentError(
            f"got tokens from {int(tokens.min())} to {int(tokens.max())}, expected 0 to {vocabulary_size - 1}: the"
            " vocabulary size is too small, or the padding token must be named"
        )
