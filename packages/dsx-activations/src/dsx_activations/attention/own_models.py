"""Attention of models that call torch's: `F.scaled_dot_product_attention` and `nn.MultiheadAttention`.

Each module of the model puts a mode around its call, in which these two functions are replaced. A module that is
recomputed in backward does so again, outside of the model's own forward.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from dsx_core.modules import CALL, AroundCall
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import ActivationArgumentError
from .handle import SequenceParallel, add_hooks

__all__ = ["convert"]


def convert(model: nn.Module, parallel: SequenceParallel) -> None:
    """Replace the attention that a model calls."""
    mode = _Attention(parallel)
    for module in model.modules():
        call = _ReplacedAttention(module, getattr(module, CALL, None), mode)
        setattr(module, CALL, call)
        parallel.call_at_the_end(call.remove)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not parallel.is_paused:
            parallel.begin()

    add_hooks(model, parallel, before)


class _ReplacedAttention(AroundCall):
    """A module's call with the mode around it."""

    def __init__(self, module: nn.Module, inner: Any, mode: _Attention) -> None:
        super().__init__(module, inner)
        self._mode = mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = self._mode
        if mode.parallel.is_paused:
            return self.call(*args, **kwargs)
        mode.entered.append(_recomputed_by())
        try:
            if mode.is_on:
                return self.call(*args, **kwargs)
            with mode:
                return self.call(*args, **kwargs)
        finally:
            mode.entered.pop()


class _Attention(TorchFunctionMode):
    def __init__(self, parallel: SequenceParallel) -> None:
        super().__init__()
        self.parallel, self.is_on = parallel, False
        self.entered: list[Any] = []  # of each module's call that is going on: what recomputes it

    def __enter__(self) -> _Attention:
        self.is_on = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.is_on = False
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _REPLACED and self.entered and _recomputed_by() != self.entered[-1]:
            raise ActivationArgumentError(
                f"sequence_parallel: {func.__name__} is called in a function that is checkpointed by itself, without a"
                " module's call in it: its recomputation would attend to this rank's tokens alone; checkpoint a module"
                " (or a function that calls one), or call dsx_activations.sequence_attention in the function"
            )
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product(self.parallel, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return _multi_head(self.parallel, *args, **kwargs)
        return func(*args, **kwargs)


_REPLACED = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


def _recomputed_by() -> Any:
    """The checkpoint that will run the present code again in backward: the innermost one, by its hooks for saved
    tensors; False in one that re-enters autograd, which runs without a graph.
    """
    top = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(False)
    pack = None if hooks is None else hooks[0]
    of_checkpoint = getattr(pack, "__module__", "") == "torch.utils.checkpoint"
    return torch.is_grad_enabled() and (pack if of_checkpoint else True)


def _refuse(what: str, fix: str) -> ActivationArgumentError:
    return ActivationArgumentError(f"sequence_parallel: {what} cannot be cut over ranks; {fix}")


_MASKS = "say causal=True, a window, or documents (packed samples, padding) with parallel.describe(documents=...)"


def _scaled_dot_product(
    parallel: SequenceParallel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if attn_mask is not None:
        raise _refuse(f"a mask of shape {tuple(attn_mask.shape)} in F.scaled_dot_product_attention", _MASKS)
    if query.dim() != 4:
        raise _refuse(
            f"queries of shape {tuple(query.shape)}", "expected (batch, heads, tokens, features) in every call"
        )
    if not enable_gqa and key.shape[1] != query.shape[1]:
        raise _refuse(f"{query.shape[1]} heads of queries with {key.shape[1]} of keys", "pass enable_gqa=True")
    return parallel.attend(query, key, value, causal=is_causal, dropout_p=dropout_p, scale=scale)


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def _multi_head(parallel: SequenceParallel, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """`F.multi_head_attention_forward` over tokens that are cut: (tokens, batch, width), as `nn.MultiheadAttention`
    calls it.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    name = "nn.MultiheadAttention"
    for key in ("bias_k", "bias_v", "static_k", "static_v"):
        if given[key] is not None:
            raise _refuse(f"{key} of {name}", "leave it out")
    if given["add_zero_attn"]:
        raise _refuse(f"add_zero_attn of {name}", "leave it out")
    if given["need_weights"]:
        raise _refuse(f"the attention weights of {name}", "call it with need_weights=False")
    if given["key_padding_mask"] is not None or (given["attn_mask"] is not None and not given["is_causal"]):
        raise _refuse(f"a mask of {name}", _MASKS)
    query, key, value = given["query"], given["key"], given["value"]
    if query.dim() != 3:
        raise _refuse(f"queries of shape {tuple(query.shape)} in {name}", "expected a batch of sequences")
    q, k, v = _projected(query, key, value, given)

    def heads(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(-1, (given["num_heads"], -1)).permute(1, 2, 0, 3)

    dropout = given["dropout_p"] if given["training"] else 0.0
    out = parallel.attend(*map(heads, (q, k, v)), causal=given["is_causal"], dropout_p=dropout)
    joined = out.permute(2, 0, 1, 3).flatten(2)
    return F.linear(joined, given["out_proj_weight"], given["out_proj_bias"]), None


def _projected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any]) -> list[torch.Tensor]:
    bias = given["in_proj_bias"]
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    if given["use_separate_proj_weight"]:
        weights = [given[f"{one}_proj_weight"] for one in "qkv"]
    else:
        weights = given["in_proj_weight"].chunk(3)
    return [F.linear(x, weight, one) for x, weight, one in zip((q, k, v), weights, biases)]
