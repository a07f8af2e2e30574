"""Recomputation that keeps the results of expensive operators: matrix products, convolutions and attention.

The operators between them (norms, activations, dropout, additions) are cheap to compute, but their results are large. A
block that is recomputed this way keeps its inputs and the results of the expensive operators. The recomputation takes
these results, in the order in which they were computed, instead of computing them.

PyTorch has the same (`create_selective_checkpoint_contexts`), and is stricter: every operator of the region is counted,
so that hooks which gather parameters or restore running statistics break it, and a second backward is refused. Here
only the expensive operators have to be the same in both runs.

If a kept result is written to in place, the backward raises. A budget does not choose this way for a block in which
such a write is seen while it is measured, or which returns such a result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["KeepResults", "ReuseResults", "keep_operators", "kept_operators"]

_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


@cache
def kept_operators() -> frozenset[Any]:
    """The expensive operators that this version of PyTorch has."""
    found = (getattr(torch.ops.aten, name, None) for name in _KEPT)
    return frozenset(packet.default for packet in found if packet is not None)


def keep_operators() -> tuple[KeepResults, ReuseResults]:
    """A `context_fn` for `checkpoint`: the contexts of the first run and of each recomputation."""
    first = KeepResults()
    return first, ReuseResults(first)


class KeepResults(TorchDispatchMode):
    """Keeps the results of expensive operators that run inside.

    Attributes:
        results: by operator, in order of the calls: the result, and the versions of its tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[Any, list[tuple[Any, list[int]]]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: compiled code is compiled as without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        out = func(*args, **(kwargs or {}))
        if func in kept_operators():
            kept = _detached(out)
            self.results.setdefault(func, []).append((kept, _versions(kept)))
        return out

    def tensors(self) -> list[torch.Tensor]:
        """All kept tensors."""
        found = (leaf for results in self.results.values() for kept, _ in results for leaf in tree_leaves(kept))
        return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


class ReuseResults(TorchDispatchMode):
    """Gives the results that a first run has kept."""

    def __init__(self, first: KeepResults) -> None:
        super().__init__()
        self._first = first
        self._used: dict[Any, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See `KeepResults`."""
        return True

    def __enter__(self) -> ReuseResults:
        self._used.clear()  # every recomputation starts from the beginning
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the kept result, or run the operator."""
        results = self._first.results.get(func, ())
        number = self._used.get(func, 0)
        if number >= len(results):
            return func(*args, **(kwargs or {}))
        self._used[func] = number + 1
        kept, versions = results[number]
        if _versions(kept) != versions:
            raise RuntimeError(
                f"the result of {func} is kept for the recomputation of a block, and was written in place since; write"
                " it out of place (no inplace=True behind a matrix product), or give"
                " apply_memory_budget(operators=False)"
            )
        return _detached(kept)


def _detached(out: Any) -> Any:
    """New tensors over the same memory, whose version counters see later writes to it. Below autograd, where this runs,
    the result of an ordinary `detach` would not see them.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), out)


def _versions(kept: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(kept) if isinstance(leaf, torch.Tensor)]
