"""Batches of whole sequences become batches of this rank's parts: labels are shifted first, positions are added."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import dsx_comm
import torch

from ..errors import ActivationArgumentError
from .cutting import place_in, sequence_segments, shard_sequence

__all__ = ["SequenceLoader"]

IGNORED = -100
_SEQUENCES = ("input_ids", "inputs_embeds", "tokens")


class SequenceLoader:
    """Cuts the batches of a loader over the ranks that share sequences. Every batch is a mapping of tensors.

    Of each tensor with as many elements along dimension 1 as the batch has tokens, this rank's part is given. `labels`
    become `shift_labels`: the label of each token's successor, shifted before the cut, so that the last token of a part
    has its target too. `position_ids` are added where there are none.

    Args:
        loader: gives mappings with "input_ids" (or "inputs_embeds" or "tokens") of shape (batch, tokens, ...).
        group: ranks that share sequences; None: all ranks, or this process alone.
        order: "plain" or "zigzag"; as the attention is told.
        own_batches: False: all ranks of the group get the same batches from their loaders (as from an engine's).
            True: each rank has batches of its own, as under DeepSpeed and Accelerate; they are gathered, and all ranks
            work on one after the other.
        whole_inputs: labels alone are cut, for models that cut their tokens inside (vision-language models).
        device: where the parts are put; None: where they are.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        group: Any = None,
        *,
        order: str = "plain",
        own_batches: bool = False,
        device: Any = None,
        whole_inputs: bool = False,
    ) -> None:
        self.loader, self.group, self.order, self.whole_inputs = loader, group, order, whole_inputs
        self.own_batches, self.device = own_batches, device
        self.rank, self.size = place_in(group)

    def __len__(self) -> int:
        """Number of batches that this loader gives."""
        return len(self.loader) * (self.size if self.own_batches else 1)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Collective with `own_batches`; it ends on all ranks where one rank's loader ends."""
        batches = iter(self.loader)
        while True:
            mine = next(batches, None)
            for batch in self._of_all(mine):
                if batch is None:
                    return
                yield self.cut(batch)

    def _of_all(self, mine: Any) -> list[Any]:
        if not self.own_batches or self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dsx_comm.all_gather_object(found, None if mine is None else dict(mine), group=self.group)
        return [None] if None in found else found

    def cut(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch.

        Raises:
            ActivationArgumentError: it is no mapping with tokens, a mask is not cut by tokens, or a sequence has fewer
                tokens than the group has ranks.
        """
        if not isinstance(batch, Mapping):
            raise ActivationArgumentError(
                f"SequenceLoader: got a batch of type {type(batch).__name__}, expected a mapping of names to tensors"
                " with input_ids; let collate_fn make one"
            )
        tokens = next((batch[key] for key in _SEQUENCES if isinstance(batch.get(key), torch.Tensor)), None)
        if tokens is None or tokens.dim() < 2:
            raise ActivationArgumentError(
                f"SequenceLoader: got a batch with {', '.join(map(str, batch)) or 'nothing'}, expected"
                f" {' or '.join(_SEQUENCES)} of shape (batch, tokens)"
            )
        length, found = tokens.shape[1], dict(batch)
        sequence_segments(length, self.size, self.rank, self.order)
        labels = found.pop("labels", None)
        if labels is not None and found.get("shift_labels") is None:
            found["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if self.whole_inputs:
            cut = {key: self._part(key, one, length) for key, one in found.items() if key == "shift_labels"}
            return {**{key: self._moved(one) for key, one in found.items()}, **cut}
        if found.get("position_ids") is None:
            found["position_ids"] = torch.arange(length, device=tokens.device).expand(tokens.shape[0], -1)
        return {key: self._part(key, one, length) for key, one in found.items()}

    def _part(self, key: str, one: Any, length: int) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        if one.dim() > 1 and one.shape[1] == length:
            one = shard_sequence(one, self.group, dim=1, order=self.order)
        elif "mask" in key or key in ("position_ids", "shift_labels"):
            raise ActivationArgumentError(
                f"SequenceLoader: {key}: got shape {tuple(one.shape)}, expected (batch, {length}): one value for each"
                " token, so that it can be cut as the tokens"
            )
        return self._moved(one)

    def _moved(self, one: Any) -> Any:
        return one if self.device is None or not isinstance(one, torch.Tensor) else one.to(self.device)
