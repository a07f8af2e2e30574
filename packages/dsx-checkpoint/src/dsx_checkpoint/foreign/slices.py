"""Joins slices of tensors that several model-parallel ranks hold, by the rules of DeepSpeed's universal checkpoints
(`universal_checkpoint_info` in the caller's state).

| list of patterns | slices become |
|---|---|
| `tp_replicated_parameter_patterns` | the first one; they are equal |
| `parameter_to_average_patterns` | their mean |
| `parameter_with_row_parallelism_patterns` | one after the other in dimension 1 |
| `parameter_with_2_sub_params_cat_dim_0` | each cut in two; the first halves in dimension 0, then the second ones |
| `vocabulary_parameter_patterns` | dimension 0, without the rows beyond `original_vocab_size` |
| no pattern fits | dimension 0 |

Patterns match from the beginning of a name (`re.match`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError, shown
from .source import Tensor

__all__ = ["SliceRules"]


@dataclass(frozen=True)
class SliceRules:
    """The rules to join the slices of a parameter. `known`: the checkpoint has such rules."""

    known: bool = False
    replicated: tuple[str, ...] = ()
    average: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    original_rows: int | None = None

    @staticmethod
    def of(info: Any) -> SliceRules:
        """The rules in `universal_checkpoint_info`; with None no rules are known."""
        if not isinstance(info, Mapping):
            return SliceRules()

        def patterns(key: str) -> tuple[str, ...]:
            return tuple(str(pattern) for pattern in info.get(key) or ())

        sub_params = info.get("parameter_with_sub_params")
        if sub_params:
            raise CheckpointError(
                "universal_checkpoint_info.parameter_with_sub_params: got such parameters, which are not read; convert "
                "the checkpoint with DeepSpeed's ds_to_universal and import the result"
            )
        rows = info.get("original_vocab_size")
        return SliceRules(
            known=True,
            replicated=patterns("tp_replicated_parameter_patterns"),
            average=patterns("parameter_to_average_patterns"),
            rows=patterns("parameter_with_row_parallelism_patterns"),
            halves=patterns("parameter_with_2_sub_params_cat_dim_0"),
            vocabulary=patterns("vocabulary_parameter_patterns"),
            original_rows=rows if isinstance(rows, int) else None,
        )

    def merge(self, parts: Sequence[Mapping[str, Tensor]], *, buffers: bool = False) -> dict[str, Tensor]:
        """Join the tensors of the model-parallel ranks. A tensor that only one rank holds is complete (pipelines).

        Args:
            buffers: the tensors are buffers, which are not sliced; those of the first rank are used.

        Raises:
            CheckpointError: several ranks hold a parameter, and nothing says how their slices go together.
        """
        held: dict[str, list[Tensor]] = {}
        for part in parts:
            for name, tensor in part.items():
                held.setdefault(name, []).append(tensor)
        found: dict[str, Tensor] = {}
        for name, slices in held.items():
            if len(slices) > 1 and not buffers and not self.known:
                raise CheckpointError(
                    f"{shown(name)} is on {len(slices)} model-parallel ranks, and the checkpoint has no "
                    "universal_checkpoint_info that says how their slices go together"
                )
            found[name] = slices[0] if len(slices) == 1 or buffers else self._whole(name, slices)
        return found

    def _whole(self, name: str, slices: list[Tensor]) -> Tensor:
        first = slices[0]
        shape = list(first.shape)
        if _fits(self.replicated, name) or not shape:
            return first
        if _fits(self.average, name):
            return Tensor(first.shape, first.dtype, lambda: torch.stack([s.fetch() for s in slices]).mean(0))
        dim = 1 if _fits(self.rows, name) and len(shape) > 1 else 0
        if _fits(self.rows, name) and len(shape) == 1:
            return first  # the bias of a layer that is cut by rows is on every rank
        shape[dim] = sum(s.shape[dim] for s in slices)
        limit = self.original_rows if _fits(self.vocabulary, name) else None
        if limit is not None:
            shape[0] = min(shape[0], limit)
        halves = _fits(self.halves, name)

        def fetch() -> torch.Tensor:
            values = [s.fetch() for s in slices]
            if halves:
                pairs = [value.chunk(2, dim=0) for value in values]
                return torch.cat([half for side in zip(*pairs) for half in side])
            return torch.cat(values, dim=dim)[: shape[0]]

        return Tensor(tuple(shape), first.dtype, fetch)


def _fits(patterns: Sequence[str], name: str) -> bool:
    return any(re.match(pattern, name) for pattern in patterns)
