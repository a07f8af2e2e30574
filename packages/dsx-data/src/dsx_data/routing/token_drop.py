"""Random layerwise token dropping (random-LTD, Yao et al. 2022): some layers see a random subset of the tokens.

Each dropping layer draws `kept` positions for every sample, processes only these tokens, and writes the results back to
their positions; the other tokens skip the layer. Positions are increasing, so causal attention stays causal. Masks and
rotary or position arguments are gathered along. In evaluation mode, and where the sequence is no longer than `kept`,
nothing is dropped.

Every layer draws its own positions from torch's random generator, as dropout does: ranks and micro-batches differ,
and activation checkpointing that restores the generator's state (torch's default) draws the same positions again.

Left out: key-value caches (a dropping layer gets none: they belong to generation), and cross-attention layers whose
other side is dropped too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import DataArgumentError
from .calls import LayerCall, Signature
from .ltd_schedule import RandomLTDScheduler
from .rules import find_layers
from .swap import Behaviour, give_behaviour, take_behaviour
from .tokens import draw_indices, gather_entries, gather_mask, gather_tokens, scatter_tokens

__all__ = ["TokenDrop", "bind_token_drop", "convert_to_random_ltd", "remove_random_ltd", "save_without_random_ltd"]

_PER_TOKEN = ("position_ids", "position_embeddings")
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class TokenDrop:
    """The settings that the dropping layers of one model share.

    Args:
        schedule: gives the number of tokens that are kept.
        mask_name: argument of the layers that holds the attention mask; None: they have none.
        batch_first: hidden states are [batch, tokens, hidden]; else [tokens, batch, hidden].
    """

    def __init__(
        self, schedule: RandomLTDScheduler, *, mask_name: str | None = "attention_mask", batch_first: bool = True
    ) -> None:
        self.schedule, self.mask_name, self.batch_first = schedule, mask_name, batch_first
        self.is_of_engine = False
        """Whether an engine advances the schedule."""

    @staticmethod
    def from_config(config: Any, schedule: RandomLTDScheduler | None = None) -> TokenDrop:
        """Build it from a `random_ltd` section, which is a mapping or an object with attributes.

        Args:
            schedule: the schedule to share; None: made from the section.

        Raises:
            DataArgumentError: a value of the section is missing or wrong.
        """

        def get(key: str, default: Any) -> Any:
            return config.get(key, default) if isinstance(config, dict) else getattr(config, key, default)

        order = get("hidden_state_order", "batch_seq_dim")
        if order not in ("batch_seq_dim", "seq_batch_dim"):
            raise DataArgumentError(f"hidden_state_order: got {order!r}, expected 'batch_seq_dim' or 'seq_batch_dim'")
        return TokenDrop(
            RandomLTDScheduler(config) if schedule is None else schedule,
            mask_name=get("model_mask_name", "attention_mask"),
            batch_first=order == "batch_seq_dim",
        )


class _DropsTokens(Behaviour):
    """Behaviour of a converted layer. While `_token_drop` is None the layer has no schedule, and training raises."""

    _token_drop: TokenDrop | None
    _ltd_number: int
    _ltd_signature: Signature

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        drop = self._token_drop
        if not self.training:
            return super().forward(*args, **kwargs)
        if drop is None:
            raise DataArgumentError(
                "random-LTD: this layer has no schedule; pass config=RandomLTDScheduler(...) to convert_to_random_ltd,"
                " or train it with an engine whose data_efficiency.data_routing.random_ltd is enabled"
            )
        if self._ltd_number not in drop.schedule.layer_ids:
            return super().forward(*args, **kwargs)
        call = LayerCall(self._ltd_signature, args, kwargs)
        hidden, kept, axis = call.hidden, drop.schedule.current_seq, 1 if drop.batch_first else 0
        tokens, batch = hidden.shape[axis], hidden.shape[1 - axis]
        if kept >= tokens:
            return super().forward(*args, **kwargs)
        indices = draw_indices(batch, tokens, kept, hidden.device)
        call.set_hidden(gather_tokens(hidden, indices, drop.batch_first))
        if drop.mask_name is not None:
            call.set(drop.mask_name, gather_mask(call.get(drop.mask_name), indices, tokens))
        for name in _PER_TOKEN:
            call.set(name, gather_entries(call.get(name), indices, tokens))
        for name in _CACHES:
            call.set(name, None)
        result = super().forward(*call.args, **call.kwargs)
        if isinstance(result, tuple):
            return (scatter_tokens(hidden, result[0].to(hidden.dtype), indices, drop.batch_first), *result[1:])
        return scatter_tokens(hidden, result.to(hidden.dtype), indices, drop.batch_first)


def convert_to_random_ltd(model: Any, layer_class: type[nn.Module] | None = None, *, config: Any = None) -> Any:
    """Change the layers of a model in place so that they drop tokens in training. Returns `model`.

    Without an engine, make the schedule and call its `update_seq(steps)` after each optimizer step:

        schedule = RandomLTDScheduler(section)
        convert_to_random_ltd(model, Layer, config=schedule)

    Args:
        model: a module, or an engine of `dsx.initialize` whose configuration switches random-LTD on.
        layer_class: class of the layers; None: `find_layers` finds them in Hugging Face models.
        config: the schedule, a `RandomLTDScheduler`, or a `TokenDrop`; None: that of the engine, which gives it to the
            layers at its next forward pass.

    Raises:
        DataArgumentError: no layers are found, their number is not `total_layer_num`, or `config` is a section: nothing
            would advance its schedule.
    """
    engine_drop = getattr(model, "random_ltd", None)
    module = model.module if engine_drop is not None else model
    layers = find_layers(module, layer_class)
    drop = _given_drop(config)
    if isinstance(engine_drop, TokenDrop):
        if drop not in (None, engine_drop):
            raise DataArgumentError(_SECOND_SCHEDULE)
        drop = engine_drop
    if drop is not None:
        _check_count(layers, drop)
    plain = [(number, layer) for number, layer in enumerate(layers) if not isinstance(layer, _DropsTokens)]
    for number, layer in plain:
        give_behaviour(layer, _DropsTokens, _token_drop=None, _ltd_number=number, _ltd_signature=Signature(layer))
    if drop is not None:
        for layer in layers:
            layer.__dict__["_token_drop"] = drop
    return model


def bind_token_drop(model: nn.Module, drop: TokenDrop) -> int:
    """Give `drop`, of an engine, to the converted layers of a model. Layers of an earlier engine get it too.

    Returns:
        The number of converted layers.

    Raises:
        DataArgumentError: the number of converted layers is not `total_layer_num`, or they have a schedule of the
            caller's own, which the engine would not advance.
    """
    drop.is_of_engine = True
    layers = [module for module in model.modules() if isinstance(module, _DropsTokens)]
    if any(layer._token_drop is not None and not layer._token_drop.is_of_engine for layer in layers):
        raise DataArgumentError(_SECOND_SCHEDULE)
    if any(layer._token_drop is not drop for layer in layers):
        _check_count(layers, drop)
        for layer in layers:
            layer.__dict__["_token_drop"] = drop
    return len(layers)


def remove_random_ltd(model: nn.Module) -> nn.Module:
    """Undo `convert_to_random_ltd` on all layers of `model`. Returns `model`."""
    for layer in model.modules():
        if isinstance(layer, _DropsTokens):
            take_behaviour(layer, _DropsTokens, "_token_drop", "_ltd_number", "_ltd_signature")
    return model


def save_without_random_ltd(model: Any) -> dict[str, torch.Tensor]:
    """The state dict of the plain model, whose names random-LTD does not change.

    Args:
        model: a module, or an engine; an engine gathers its shards (then all ranks must call this).
    """
    gather: Any = getattr(model, "module_state_dict", None)
    found: dict[str, torch.Tensor] = gather() if callable(gather) else model.state_dict()  # type: ignore[assignment]
    return found


_SECOND_SCHEDULE = (
    "random-LTD: the layers have got a schedule of their own, and the engine advances that of its configuration; call"
    " convert_to_random_ltd(engine, LayerClass) without config, or set data_efficiency.data_routing.random_ltd.enabled"
    " to false and advance the schedule yourself"
)


def _given_drop(config: Any) -> TokenDrop | None:
    """The `TokenDrop` that the caller's `config` stands for."""
    if config is None or isinstance(config, TokenDrop):
        return config
    if isinstance(config, RandomLTDScheduler):
        return TokenDrop.from_config(config.config, config)
    raise DataArgumentError(
        f"config: got a {type(config).__name__}, expected a RandomLTDScheduler, because nothing would advance the"
        " schedule of a section and its layers would keep min_value tokens for ever; write schedule ="
        " RandomLTDScheduler(section), convert_to_random_ltd(model, LayerClass, config=schedule), and call"
        " schedule.update_seq(steps) after each optimizer step"
    )


def _check_count(layers: Any, drop: TokenDrop) -> None:
    if len(layers) != drop.schedule.total_layers:
        raise DataArgumentError(
            f"random_ltd.total_layer_num: got {drop.schedule.total_layers}, expected {len(layers)}, the layers of the"
            " model"
        )
