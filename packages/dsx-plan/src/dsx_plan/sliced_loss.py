"""The output layer and its loss on slices of the vocabulary, as torchtitan, Megatron-LM and DeepSpeed's
`vocab_parallel_lm_head` compute them.

An engine that slices a model by rules brings the logits of all ranks together, because a model's own loss takes them
whole. A job whose loss is `dsx_pipe.tensor.vocab_parallel_cross_entropy` keeps its slice. In a plan the output layer
keeps its slice by a rule, and cross-entropy of sliced logits becomes that function, whoever calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dsx_comm.parallel_groups
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["SlicedLoss", "with_sliced_head"]

_HEAD = {"patterns": [r"(^|\.)lm_head"], "partition_type": "column"}


def with_sliced_head(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section `tensor_parallel` with a rule by which each rank keeps its slice of the logits."""
    own = section.get("partition_config")
    rules: dict[str, Any] = {"use_default_specs": True} if own is None else dict(own)
    return {**section, "partition_config": {**rules, "layer_specs": [_HEAD, *rules.get("layer_specs", ())]}}


class SlicedLoss(TorchFunctionMode):
    """Inside the block cross-entropy of sliced logits is that over the ranks of a slice.

    Args:
        ranks: that share the vocabulary.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not F.cross_entropy:
            return func(*args, **kwargs)
        from dsx_pipe.tensor import vocab_parallel_cross_entropy  # lazy import: only slices need the package

        given = dict(zip(("input", "target"), args)) | kwargs
        logits, labels = given["input"], given["target"]
        options = {key: given[key] for key in ("ignore_index", "reduction") if key in given}
        group = dsx_comm.parallel_groups.get_tensor_model_parallel_group()
        return vocab_parallel_cross_entropy(self._slices(logits, labels), labels, group, **options)

    def _slices(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[N, slice]: transformers views logits as rows of the whole vocabulary, of which there are fewer."""
        rows = labels.numel()
        return logits.reshape(rows, -1) if logits.shape[0] * self._ranks == rows else logits
