"""Kernels that differ from the operators of a program: fused ones, and products in FP8.

A compiler (`torch.compile`) and libraries of kernels make one kernel of neighbouring operators that are no matrix
products. `Fusion` plans such a run as one kernel that reads what the run did not make itself and writes what outlives
it. Products in FP8 (torchao, Transformer Engine) multiply at the rate of FP8 and cast their factors before.

Left out: what a compiler computes again in backward to keep less in between, so that fused blocks are planned with the
memory of those that are not; operators that a compiler cannot fuse (sorting, indexing) end a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .ledger import Ledger
from .trace import COMPUTE, OPERATOR, Trace

__all__ = ["Fusion", "Kernels", "dtype_in", "is_causal"]

UNFUSED = frozenset({
    "embedding", "index_select", "gather", "index", "sort", "topk", "index_put_", "index_add_", "scatter", "scatter_",
    "scatter_add_", "cumsum", "bincount", "embedding_dense_backward", "_foreach_norm",
})  # fmt: skip
"""Operators that stay kernels of their own."""
_EIGHT_BIT = frozenset({"mm", "addmm"})
"""Products that have a weight as one factor: those of attention scores and of experts in groups have other operators.
"""


@dataclass(frozen=True)
class Kernels:
    """The kernels that a plan is for.

    Attributes:
        fused: neighbouring operators that are no products become one.
        fp8: products with weights multiply FP8, but those of the output layer.
        vocabulary: sizes by which the output layer is known.
        copies_gradients: torch's fused kernels update the parameters on a device, and are given scaled copies of the
            gradients, because the job clips or unscales them. Those that dsx compiles scale what they read.
    """

    fused: bool = False
    fp8: bool = False
    vocabulary: frozenset[int] = frozenset()
    copies_gradients: bool = False

    def in_fp8(self, name: str, factors: Iterable[torch.Tensor]) -> bool:
        """Whether a product multiplies FP8: of 16-bit factors whose sizes are multiples of 16, as the hardware asks."""
        if not self.fp8 or name not in _EIGHT_BIT:
            return False
        found = [factor for factor in factors if factor.dim() == 2]
        sizes = {size for factor in found for size in factor.shape}
        whole = all(size % 16 == 0 for size in sizes) and not sizes & self.vocabulary
        return whole and all(factor.element_size() == 2 for factor in found)

    def for_model(self, model: Any) -> Kernels:
        """The kernels with the sizes of a model's output layer, whole or in slices."""
        words = getattr(getattr(model, "config", None), "vocab_size", None)
        if not isinstance(words, int):
            return self
        return replace(self, vocabulary=frozenset(words // n for n in range(1, 65) if words % n == 0))

    def casts(self, factors: int) -> int:
        """Bytes of a product in FP8 beside those of its 16-bit factors. They are written and read in 8 bits; where
        operators are fused the cast is part of the kernel that made them, and the product only reads 8 bits.
        """
        return -factors // 2 if self.fused else factors


class Fusion:
    """Puts neighbouring operators into one entry of a trace."""

    def __init__(self, trace: Trace, ledger: Ledger) -> None:
        self._trace, self._ledger = trace, ledger
        self._reads: dict[tuple[int, int], int] = {}
        self._made: dict[tuple[int, int], int] = {}
        self._flops, self._rate, self._open = 0, 0, False

    def take(
        self, args: Iterable[torch.Tensor], results: Iterable[torch.Tensor], flops: int, rate: int
    ) -> None:  # fmt: skip
        """Add an operator to the run."""
        for tensor in args:
            key = self._ledger.key_of(tensor)
            if key is not None and key not in self._made:
                self._reads[key] = max(self._reads.get(key, 0), tensor.nbytes)
        for tensor in results:
            key = self._ledger.key_of(tensor)
            if key is not None:
                self._made[key] = max(self._made.get(key, 0), tensor.nbytes)
        self._flops, self._rate, self._open = self._flops + flops, rate, True

    def end(self) -> None:
        """The run ends: what it made and nobody keeps was never written."""
        if not self._open:
            return
        nbytes = sum(self._reads.values())
        nbytes += sum(size for key, size in self._made.items() if self._ledger.holds(key))
        self._trace.add(COMPUTE, OPERATOR, self._flops, nbytes, self._rate)
        self._reads.clear()
        self._made.clear()
        self._flops, self._open = 0, False


def is_causal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator of attention was told that no query sees a later key."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))
    return False


def dtype_in(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """The first floating-point type among tensors."""
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
