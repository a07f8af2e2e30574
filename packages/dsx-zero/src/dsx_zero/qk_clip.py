"""QK-clip: after a step, the query and key weights of attention heads with too large logits are made smaller.

    model, optimizer = dsx_zero.shard(model, dsx_ops.Muon, stage=3)
    QKClip(optimizer, threshold=100.0, heads=16)  # then train as ever

With Muon the logits of some heads can grow without a bound. Where the largest logit S of a head since the last step was
above the threshold t, its logits are multiplied by g = t / S, by way of the weights that make them (Kimi K2's
"MuonClip": Kimi Team, 2025, arXiv:2507.20534, section 2.1; Su, 2025, kexue.fm/archives/11126):

    heads with keys of their own      queries g^alpha, keys g^(1 - alpha); published: alpha = 1/2
    latent attention (MLA)            the same without position; with position queries g, and the shared key 1
    keys shared by some heads (GQA)   as the first, with the smallest g of the heads that share a key, as Megatron-LM
                                      does ("qk_clip"): the paper says nothing of them

*What is observed.* The largest logit is that of all micro-batches since the last update and of all data-parallel ranks,
whose maxima are joined in one all-reduce per group of ranks. There are three ways: attention by
`torch.nn.functional.scaled_dot_product_attention` is watched (the logits are computed a second time, `largest_logits`);
a module may set `self.max_logits` in its forward, which is free where it has the scores; or the program calls
`observe`. Forwards of modules in eval mode do not count, nor do logits that are not finite.

*Where it happens.* As a hook behind the inner optimizer's step, on the slices of the fp32 masters that a rank owns,
before they are published: nothing is gathered, and the bits do not depend on stage or ranks. The host does not wait.

*Pipelines.* Each stage clips the attention that it has; `stages` are the ranks of the other stages.

Left out: modules in compiled code are not seen, and a step without their logits raises (`observe` there); weights of
which the rows are no heads (GPT-2's `Conv1D`, Megatron's interleaved `linear_qkv`); models that normalise queries and
keys, whose logits do not depend on the size of the weights.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import dsx_comm
import torch
from dsx_core.errors import first_few
from dsx_core.modules import ModuleHook
from torch import nn
from torch.overrides import TorchFunctionMode

from .attention_rows import (
    AttentionLayer,
    HeadRows,
    columns_of,
    found_layers,
    is_compiled,
    layers_on_stages,
    trains,
)
from .errors import ZeroOptimizerError
from .optimizer import ZeroOptimizer

__all__ = ["QKClip", "largest_logits"]

_AT_ONCE = 1 << 24
"""Most logits that `largest_logits` has in memory."""


@torch.no_grad()
def largest_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """The largest logit of each head: the maximum of `scale * q . k` over batch and pairs that attention looks at.

    Args:
        query: (..., heads, queries, size).
        key: (..., key heads, keys, size); heads share keys where there are fewer.
        mask: as of `scaled_dot_product_attention`; pairs that it shuts out do not count, and what it adds to others
            is not a part of the logit.
        causal: queries look at no later keys.
        scale: None: 1 / sqrt(size).

    Returns:
        (heads,), fp32, on the same device; minus infinity where there is no pair.
    """
    heads, queries, keys = query.shape[-3], query.shape[-2], key.shape[-2]
    if key.shape[-3] != heads:
        key = key.repeat_interleave(heads // key.shape[-3], dim=-3)
    largest = torch.full((heads,), -math.inf, dtype=torch.float32, device=query.device)
    if not query.numel() or not key.numel():
        return largest
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    rows = max(1, _AT_ONCE // max(1, keys * query.shape[:-2].numel()))
    for start in range(0, queries, rows):
        part = slice(start, min(start + rows, queries))
        logits = (query[..., part, :] @ key.mT).float() * factor
        if causal:
            seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril(diagonal=start)
            logits = logits.masked_fill(~seen, -math.inf)
        if mask is not None:
            of_part = mask if mask.shape[-2] == 1 else mask[..., part, :]
            shut = ~of_part if of_part.dtype == torch.bool else of_part <= torch.finfo(of_part.dtype).min / 2
            logits = logits.masked_fill(shut, -math.inf)
        largest = torch.maximum(largest, logits.amax((-2, -1)).reshape(-1, heads).amax(0))
    return largest


class QKClip:
    """Clips the logits of a sharded model's attention: see the module's text.

    Args:
        optimizer: what `dsx_zero.shard` returned; any stage. It keeps this object as `optimizer.qk_clip`.
        threshold: logits above it are clipped.
        alpha: the queries' part of the clipping, from 0 to 1.
        heads: query heads of a layer, on this rank where tensor parallelism divides them; None: the modules say it
            (`num_heads` or `heads`, or `num_attention_heads` of their `config`).
        layers: names of the attention modules; None: every module with the projections of one.
        stages: where the optimizer has one stage of a pipeline, the group of the ranks with all of its stages. The call
            is then collective over them. A stage may have no attention.

    Raises:
        ZeroOptimizerError: a setting is out of its range; there is no such layer; a layer's heads are not known, or do
            not divide its rows; its weights do not train; the optimizer has a clip, or averages by itself, or keeps the
            low bits of its weights, or applies updates late.
    """

    def __init__(
        self,
        optimizer: ZeroOptimizer,
        *,
        threshold: float = 100.0,
        alpha: float = 0.5,
        heads: int | None = None,
        layers: Iterable[str] | None = None,
        stages: Any = None,
    ) -> None:
        if not (isinstance(threshold, (int, float)) and 0 < threshold < math.inf):
            raise ZeroOptimizerError(f"threshold: got {threshold!r}, expected a number above 0, such as 100")
        if not (isinstance(alpha, (int, float)) and 0 <= alpha <= 1):
            raise ZeroOptimizerError(f"alpha: got {alpha!r}, expected a number from 0 to 1; 0.5 is the published one")
        _check_optimizer(optimizer)
        self.threshold, self.alpha = float(threshold), float(alpha)
        self._optimizer = weakref.ref(optimizer)
        find = partial(found_layers, optimizer, self.alpha, heads)
        found = list(find(layers)) if stages is None else layers_on_stages(find, optimizer, layers, stages)
        self._layers = {layer.name: layer for layer in found}
        self._names = {id(layer.module): name for name, layer in self._layers.items()}
        self._largest: dict[str, torch.Tensor] = {}
        self._on: dict[torch.device, dict[str, HeadRows]] = {}
        me = weakref.ref(self)
        self._hooks = [optimizer.register_step_post_hook(partial(_call, me, QKClip._clip))]
        for layer in self._layers.values():
            watching = _Watching(me, layer.name)
            self._hooks.append(layer.module.register_forward_pre_hook(_EagerHook(watching.enter)))
            self._hooks.append(layer.module.register_forward_hook(_EagerHook(watching.leave), always_call=True))
        optimizer.qk_clip = self
        optimizer.control.on_release.append(partial(_call, me, QKClip.close))

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the attention modules."""
        return tuple(self._layers)

    def close(self) -> None:
        """Stop clipping, and watch the modules no more."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        if (optimizer := self._optimizer()) is not None and optimizer.qk_clip is self:
            optimizer.qk_clip = None

    def observe(self, layer: str | nn.Module, logits: torch.Tensor) -> None:
        """Hand in the largest logits of this rank's micro-batch; those of further ones are joined with them.

        Args:
            layer: an attention module, or its name.
            logits: (heads,): for each head the largest scaled logit over batch and positions. Minus infinity for heads
                that this rank did not compute.

        Raises:
            ZeroOptimizerError: this is no layer that is clipped, or the shape is another one.
        """
        name = layer if isinstance(layer, str) else self._names.get(id(layer), type(layer).__name__)
        known = self._layers.get(name)
        if known is None:
            raise ZeroOptimizerError(f"QKClip.observe: got {name!r}, expected one of {first_few(self._layers)}")
        if not isinstance(logits, torch.Tensor) or logits.shape != (known.heads,):
            got = f"shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise ZeroOptimizerError(
                f"QKClip.observe: got {got} for {name}, expected a tensor of {known.heads} logits, one per query head:"
                " scores.detach().amax((0, 2, 3)) for scores (batch, heads, queries, keys)"
            )
        found = logits.detach().float()
        found = torch.where(found.isfinite(), found, -math.inf)
        before = self._largest.get(name)
        self._largest[name] = found if before is None else torch.maximum(before, found.to(before.device))

    def largest(self) -> dict[str, torch.Tensor]:
        """The largest logits of this rank since the last update, (heads,) in fp32 by layer: for a log."""
        return {name: value.clone() for name, value in self._largest.items()}

    # Behind the step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _clip(self, *_: Any) -> None:
        """Multiply the rows of this rank's masters (collective)."""
        optimizer = self._optimizer()
        if optimizer is None or not self._layers:  # a stage without attention
            return
        unseen = [name for name in self._layers if name not in self._largest]
        if compiled := [name for name in unseen if is_compiled(optimizer.runtime.model, name)]:
            raise ZeroOptimizerError(
                f"QKClip: no logits were observed since the last update, of {first_few(compiled)}, which are compiled:"
                " attention in compiled code is not seen. Call optimizer.qk_clip.observe(module, logits) outside of it,"
                " leave these modules out of layers, or do not compile them"
            )
        if not self._largest:
            raise ZeroOptimizerError(
                f"QKClip: no logits were observed since the last update, of {first_few(self._layers)}. Compiled modules"
                " and attention by other kernels than scaled_dot_product_attention are not seen: set self.max_logits in"
                " the module's forward, or call optimizer.qk_clip.observe(module, logits), or close() the clip"
            )
        factors = self._factors(optimizer)
        self._largest.clear()
        for layer in self._layers.values():
            masters = [(rows, optimizer.layout.masters_of(rows.name)) for rows in layer.rows]
            if any(not trains(optimizer, rows.name) for rows, _ in masters):
                continue  # it was frozen since
            for rows, held in masters:
                for master in held:
                    device = master.tensor.device
                    if device not in factors:
                        factors[device] = {name: g.to(device) for name, g in next(iter(factors.values())).items()}
                    there = self._rows_on(device, rows)
                    by_row = factors[device][layer.name].index_select(0, there.heads).pow(there.exponents)
                    columns = columns_of(optimizer, rows.name)
                    _multiply(master.tensor.view(-1), by_row, master.slice.start, columns)

    def _factors(self, optimizer: ZeroOptimizer) -> dict[torch.device, dict[str, torch.Tensor]]:
        """g of every head, by device and layer, from the largest logits of all ranks."""
        by_ranks: dict[Any, list[AttentionLayer]] = {}
        for layer in self._layers.values():
            by_ranks.setdefault(optimizer.layout.group_of(layer.rows[0].name).ranks, []).append(layer)
        device = next(iter(self._largest.values())).device
        found: dict[str, torch.Tensor] = {}
        for ranks, layers in by_ranks.items():
            parts = [self._largest.get(layer.name) for layer in layers]
            message = torch.cat([
                torch.full((layer.heads,), -math.inf, dtype=torch.float32, device=device)
                if part is None else part.to(device)
                for layer, part in zip(layers, parts)
            ])  # fmt: skip
            if ranks.size > 1 or ranks.copies is not None:
                dsx_comm.all_reduce(message, op=dsx_comm.ReduceOp.MAX, group=ranks.holders)
            for layer, largest in zip(layers, message.split([layer.heads for layer in layers])):
                shared = largest.view(-1, layer.shared).amax(1).repeat_interleave(layer.shared)
                above = shared > self.threshold
                found[layer.name] = torch.where(above, self.threshold / shared, 1.0)
        return {device: found}

    def _rows_on(self, device: torch.device, rows: HeadRows) -> HeadRows:
        known = self._on.setdefault(device, {})
        if rows.name not in known:
            known[rows.name] = HeadRows(rows.name, rows.heads.to(device), rows.exponents.to(device))
        return known[rows.name]


class _EagerHook(ModuleHook):
    """Calls `function` with the module, but not in compiled code, where attention cannot be watched."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._function(module)


class _Watching:
    """Hooks around the forward of one layer."""

    def __init__(self, clip: weakref.ref[QKClip], layer: str) -> None:
        self._clip, self._layer = clip, layer
        self._modes: list[_SeesAttention] = []

    def enter(self, module: nn.Module) -> None:
        mode = _SeesAttention(partial(self._observe, module))
        mode.__enter__()
        self._modes.append(mode)

    def leave(self, module: nn.Module) -> None:
        if self._modes:
            self._modes.pop().__exit__(None, None, None)
        logits = vars(module).pop("max_logits", None)
        if logits is not None:
            self._observe(module, lambda: logits)

    def _observe(self, module: nn.Module, logits: Any) -> None:
        clip = self._clip()
        if clip is not None and module.training:
            clip.observe(self._layer, logits())


class _SeesAttention(TorchFunctionMode):
    """Gives the largest logits of each call of `scaled_dot_product_attention` to `observe`."""

    def __init__(self, observe: Any) -> None:
        super().__init__()
        self._observe = observe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            self._observe(partial(_of_call, *args, **kwargs))
        return func(*args, **kwargs)


def _of_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`largest_logits` with the arguments of `scaled_dot_product_attention`."""
    return largest_logits(query, key, attn_mask, causal=is_causal, scale=scale)


def _call(clip: weakref.ref[QKClip], method: Any, *arguments: Any) -> None:
    if (found := clip()) is not None:
        method(found, *(arguments if method is QKClip._clip else ()))


def _multiply(values: torch.Tensor, factors: torch.Tensor, start: int, columns: int) -> None:
    """Multiply elements of a matrix, from `start` on in row-major order, by the factors of their rows."""
    row, head = start // columns, min(-start % columns, values.numel())
    if head:
        values[:head].mul_(factors[row])
        row += 1
    whole = (values.numel() - head) // columns
    middle, tail = values[head : head + whole * columns], values[head + whole * columns :]
    middle.view(whole, columns).mul_(factors[row : row + whole, None])
    if tail.numel():
        tail.mul_(factors[row + whole])


def _check_optimizer(optimizer: ZeroOptimizer) -> None:
    inner = optimizer.inner
    refused = {
        "it has one already; close() that": optimizer.qk_clip is not None,
        "it averages weights by itself (1-bit optimizers)": optimizer.runtime.averaging is not None,
        "it keeps low bits beside its weights (split_master)": any(
            group.get("split_master") for group in inner.param_groups
        ),
        "updates are applied late (late_update_after)": optimizer.update.applies_late,
    }
    for why, there in refused.items():
        if there:
            raise ZeroOptimizerError(f"QKClip: {type(inner).__name__} cannot be given a clip: {why}")
