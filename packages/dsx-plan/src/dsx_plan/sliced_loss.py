"""The output layer and its loss on slices of the vocabulary, as torchtitan, Megatron-LM and DeepSpeed's
`vocab_parallel_lm_head` compute them.

An engine that slices a model by rules brings the logits of all ranks together, because a model's own loss takes them
whole. A job whose loss is `dsx_pipe.tensor.vocab_parallel_cross_entropy` keeps its slice. In a plan the output layer
keeps its slice once the engine is built, and cross-entropy of sliced logits becomes that function, whoever calls it.
"""

from __future__ import annotations

from typing import Any

import dsx_comm.parallel_groups
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .errors import PlanError

__all__ = ["SlicedLoss"]


class SlicedLoss(TorchFunctionMode):
    """Inside the block cross-entropy of sliced logits is that over the ranks of a slice.

    Args:
        ranks: that share the vocabulary.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self._words: int | None = None

    def keep_slices(self, model: nn.Module) -> None:
        """Let the output layers of a model give this rank's slice of the logits. A stage without one has none."""
        from dsx_pipe.tensor import ColumnParallelLinear  # lazy import: only slices need the package

        for name, layer in model.named_modules():
            if isinstance(layer, ColumnParallelLinear) and name.rpartition(".")[2] == "lm_head":
                layer.gather_output, self._words = False, layer.out_features

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not F.cross_entropy:
            return func(*args, **kwargs)
        if self._words is None:
            raise PlanError("sliced_loss: got a model without an output layer lm_head in slices; leave it out")
        from dsx_pipe.tensor import vocab_parallel_cross_entropy  # lazy import: only slices need the package

        given = dict(zip(("input", "target"), args)) | kwargs
        logits, labels = given["input"], given["target"]
        options: dict[str, Any] = {key: given[key] for key in ("ignore_index", "reduction") if key in given}
        group = dsx_comm.parallel_groups.get_tensor_model_parallel_group()
        options["vocab_size"] = self._words
        loss = vocab_parallel_cross_entropy(self._slices(logits, labels), labels, group, **options)
        loss.data.zero_()  # the logarithm of a sum without values is infinite, which a pipeline would refuse
        return loss

    def _slices(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[N, slice]: transformers views logits as rows of the whole vocabulary, of which there are fewer."""
        rows = labels.numel()
        return logits.reshape(rows, -1) if logits.shape[0] * self._ranks == rows else logits
