"""`TransformerLayer`: a BERT encoder layer from the fused functions, on CPU and CUDA.

    post-LN:  a = norm(x + drop(attention(x)); attn_n*)         y = norm(a + drop(W2 gelu(W1 a)); norm_*)
    pre-LN:   a = x + drop(attention(norm(x; norm_*)))          y = a + drop(W2 gelu(W1 norm(a; attn_n*)))

Bias, dropout and residual are one pass, so are bias and GELU; dropout keeps no masks. What backward keeps, per token,
with hidden size h, intermediate size i and s scores per head and token: see the README. Leaves out: cross attention,
caches of keys and values, head masks, causal masks of its own (pass one).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..errors import HyperparameterError, TensorError
from ..functional.layer_norm import layer_norm
from . import keyed
from .attention import attention
from .config import TransformerConfig
from .feedforward import gelu_linear

ATTENTION, AFTER_ATTENTION, AFTER_FEEDFORWARD = range(3)  # where dropout happens
# How scripts that compare layers call the gradients that `forward(grads=...)` collects.
GRADIENT_NAMES = {
    "attn_qkvw": "V_W",
    "attn_qkvb": "V_B",
    "attn_ow": "O_W",
    "attn_ob": "O_B",
    "attn_nw": "N2_W",
    "attn_nb": "N2_B",
    "inter_w": "int_W",
    "inter_b": "int_B",
    "output_w": "out_W",
    "output_b": "out_B",
    "norm_w": "norm_W",
    "norm_b": "norm_B",
}


class TransformerLayer(nn.Module):
    """Attention and feed-forward with residuals, norms and dropout; parameters under DeepSpeed's names.

    `initial_weights`, `initial_biases`: eight tensors each, of query, key, value, attention result, attention norm,
    intermediate, result and last norm; a bias may be None (zero). To copy from a Hugging Face layer see
    `copy_from_bert`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        initial_weights: Sequence[Tensor] | None = None,
        initial_biases: Sequence[Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        h, i = config.hidden_size, config.intermediate_size
        dtype = torch.float16 if config.fp16 else None

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype))

        self.attn_qkvw, self.attn_qkvb = new(3 * h, h), new(3 * h)
        self.attn_ow, self.attn_ob = new(h, h), new(h)
        self.attn_nw, self.attn_nb = new(h), new(h)
        self.inter_w, self.inter_b = new(i, h), new(i)
        self.output_w, self.output_b = new(h, i), new(h)
        self.norm_w, self.norm_b = new(h), new(h)
        self.salt = keyed.mixed(max(config.seed, -1) + 1, max(config.local_rank, -1) + 1) >> 4
        self._gradient_hooks: dict[str, Any] = {}
        self.reset_parameters()
        if initial_weights is not None or initial_biases is not None:
            self._copy_initial(initial_weights, initial_biases)
        self.train(config.training)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights, zero biases, norms of one; the same on every rank that has the same random state."""
        config = self.config
        spread = config.initializer_range
        narrow = spread / math.sqrt(2.0 * config.num_hidden_layers) if config.adjust_init_range else spread
        for weight, std in (
            (self.attn_qkvw, spread),
            (self.attn_ow, narrow),
            (self.inter_w, spread),
            (self.output_w, narrow),
        ):
            weight.normal_(0.0, std)
        for bias in (self.attn_qkvb, self.attn_ob, self.attn_nb, self.inter_b, self.output_b, self.norm_b):
            bias.zero_()
        for weight in (self.attn_nw, self.norm_w):
            weight.fill_(1.0)

    @torch.no_grad()
    def _copy_initial(self, weights: Sequence[Tensor] | None, biases: Sequence[Tensor | None] | None) -> None:
        targets = (
            (
                weights,
                "initial_weights",
                (self.attn_qkvw, self.attn_ow, self.attn_nw, self.inter_w, self.output_w, self.norm_w),
            ),
            (
                biases,
                "initial_biases",
                (self.attn_qkvb, self.attn_ob, self.attn_nb, self.inter_b, self.output_b, self.norm_b),
            ),
        )
        for given, name, parameters in targets:
            if given is None:
                continue
            if len(given) != 8:
                raise HyperparameterError(f"{name}: got {len(given)} tensors, expected 8")
            for target, tensor in zip((*parameters[0].chunk(3), *parameters[1:]), given):
                _fill(target, tensor, name)

    def extra_repr(self) -> str:
        """Sizes and what is on."""
        c = self.config
        flags = (
            "pre_layer_norm",
            "normalize_invertible",
            "gelu_checkpoint",
            "attn_dropout_checkpoint",
            "stochastic_mode",
        )
        on = ", ".join(f for f in flags if getattr(c, f))
        return f"hidden_size={c.hidden_size}, heads={c.heads}, intermediate_size={c.intermediate_size}" + (
            f", {on}" if on else ""
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *others: object,
        grads: list[list[Any]] | None = None,
        **named: object,
    ) -> Tensor | tuple[Tensor]:
        """[batch, sequence, hidden] -> the same.

        `attention_mask`: [batch, sequence] of bool or integers (not 0 = takes part), or what broadcasts to [batch,
        heads, sequence, sequence]: bool (True = takes part) or float (added; -inf or a large negative number excludes).
        A token that may see nothing gets a zero context where dropout is on. Further arguments of other layers'
        `forward` must be None or False, except what only speaks of caches or output (`use_cache`, `cache_position`,
        `position_ids`). `grads`: a list to which backward appends [gradient, name] of every parameter, for comparing
        layers (names as in `GRADIENT_NAMES`; of the joint query, key and value parameters the value's part). Raises
        `TensorError`.
        """
        self._refuse(others, named)
        if grads is not None:
            self._collect_gradients(grads)
        mask = self._mask(hidden_states, attention_mask)
        drop_key = keyed.new_key() if self._drops() else None
        body = self._pre_norm if self.config.pre_layer_norm else self._post_norm
        result = body(hidden_states, mask, drop_key)
        return (result,) if self.config.return_tuple else result

    def _collect_gradients(self, grads: list[list[Any]]) -> None:
        """Hooks for the next backward; they leave when they have run, or at the next call."""
        for handle in self._gradient_hooks.values():
            handle.remove()
        self._gradient_hooks = {}
        if not torch.is_grad_enabled():
            return

        def collect(name: str, grad: Tensor) -> None:
            self._gradient_hooks.pop(name).remove()
            grads.append([grad.chunk(3)[2] if name in ("attn_qkvw", "attn_qkvb") else grad, GRADIENT_NAMES[name]])

        for name, parameter in self.named_parameters(recurse=False):
            if parameter.requires_grad:
                self._gradient_hooks[name] = parameter.register_hook(partial(collect, name))

    # ---- the two orders ----------------------------------------------------------------------------------------------

    def _post_norm(self, x: Tensor, mask: Tensor | None, drop_key: Tensor | None) -> Tensor:
        context = self._attention(x, mask, drop_key)
        middle = self._norm(
            self._add(context, self.attn_ow, self.attn_ob, x, drop_key, AFTER_ATTENTION), self.attn_nw, self.attn_nb
        )
        result = self._add_residual(self._feedforward(middle), self.output_b, middle, drop_key, AFTER_FEEDFORWARD)
        return self._norm(result, self.norm_w, self.norm_b)

    def _pre_norm(self, x: Tensor, mask: Tensor | None, drop_key: Tensor | None) -> Tensor:
        context = self._attention(self._norm(x, self.norm_w, self.norm_b), mask, drop_key)
        middle = self._add(context, self.attn_ow, self.attn_ob, x, drop_key, AFTER_ATTENTION)
        result = self._feedforward(self._norm(middle, self.attn_nw, self.attn_nb))
        return self._add_residual(result, self.output_b, middle, drop_key, AFTER_FEEDFORWARD)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _drops(self) -> bool:
        return self.training and (self.config.attn_dropout_ratio > 0 or self.config.hidden_dropout_ratio > 0)

    def _site(self, site: int) -> int:
        return self.salt * 4 + site

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(
            x.contiguous(), weight, bias, self.config.layer_norm_eps, from_output=self.config.normalize_invertible
        )

    def _attention(self, x: Tensor, mask: Tensor | None, drop_key: Tensor | None) -> Tensor:
        batch, sequence, hidden = x.shape
        heads = self.config.heads
        together = linear(x, self.attn_qkvw, self.attn_qkvb).view(batch, sequence, 3, heads, hidden // heads)
        query, key, value = together.permute(2, 0, 3, 1, 4).unbind(0)
        context = attention(
            query,
            key,
            value,
            mask,
            p=self.config.attn_dropout_ratio if self.training else 0.0,
            drop_key=drop_key,
            site=self._site(ATTENTION),
            keep_dropped=not self.config.attn_dropout_checkpoint,
            any_order=self.config.stochastic_mode,
        )
        return context.transpose(1, 2).reshape(batch, sequence, hidden)

    def _feedforward(self, x: Tensor) -> Tensor:
        config = self.config
        inner = linear(x, self.inter_w)
        # Under autocast `inner` is not in the weights' dtype; outside of it this converts nothing.
        weight = self.output_w.to(inner.dtype)
        return gelu_linear(
            inner, self.inter_b, weight, tanh=config.gelu_approximate == "tanh", again=config.gelu_checkpoint
        )

    def _add(
        self, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, drop_key: Tensor | None, site: int
    ) -> Tensor:
        return self._add_residual(linear(x, weight), bias, residual, drop_key, site)

    def _add_residual(self, x: Tensor, bias: Tensor, residual: Tensor, drop_key: Tensor | None, site: int) -> Tensor:
        x, residual = x.to(residual.dtype), residual.contiguous()
        p = self.config.hidden_dropout_ratio if self.training else 0.0
        if drop_key is None or p == 0.0:
            return torch.ops.dsx_ops.bias_dropout_residual(x, bias, residual, 0.0, 0, 0)
        return keyed.bias_dropout_residual(x, bias, residual, p, drop_key, self._site(site))

    # ---- arguments ---------------------------------------------------------------------------------------------------

    def _refuse(self, others: Sequence[object], named: dict[str, object]) -> None:
        harmless = ("use_cache", "cache_position", "position_ids")
        for i, value in enumerate(others):
            if value is not None and value is not False:
                raise TensorError(
                    f"forward: got a value for argument {i + 2}, expected None: only hidden_states and attention_mask"
                    " are used"
                )
        for name, value in named.items():
            if value is not None and value is not False and name not in harmless:
                raise TensorError(
                    f"forward: got {name}, expected None: this layer has no cross attention, cache, head mask or"
                    " attention output"
                )

    def _mask(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        if x.dim() != 3 or x.shape[-1] != self.config.hidden_size:
            raise TensorError(
                f"hidden_states: got shape {tuple(x.shape)}, expected [batch, sequence, {self.config.hidden_size}]"
            )
        if mask is None:
            return None
        batch, sequence, _ = x.shape
        if mask.dim() == 2 and tuple(mask.shape) == (batch, sequence):
            if mask.is_floating_point():
                raise TensorError(
                    "attention_mask: got a float mask of two dimensions, expected bool or integers (not 0 = takes"
                    " part), or a float mask of four dimensions, which is added to the scores"
                )
            return mask.bool()[:, None, None, :]
        wanted = (batch, self.config.heads, sequence, sequence)
        fits = mask.dim() <= 4 and all(m in (1, n) for m, n in zip(reversed(mask.shape), reversed(wanted)))
        if not fits or not (mask.is_floating_point() or mask.dtype is torch.bool):
            raise TensorError(
                f"attention_mask: got {mask.dtype} of shape {tuple(mask.shape)}, expected [{batch}, {sequence}] of bool"
                f" or integers, or bool or float that broadcasts to {wanted}"
            )
        return mask.to(x.dtype) if mask.dtype is torch.float64 else mask


def _fill(target: Tensor, tensor: Tensor | None, name: str) -> None:
    if tensor is None:
        target.zero_()
        return
    if tensor.shape != target.shape:
        raise TensorError(f"{name}: got shape {tuple(tensor.shape)}, expected {tuple(target.shape)}")
    target.copy_(tensor)
