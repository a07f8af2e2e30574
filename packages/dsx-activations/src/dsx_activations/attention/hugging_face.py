"""Hugging Face models: their attention is called through transformers' attention interface, under a name of dsx.

Before each forward the model is given the positions of its tokens in the whole sequence, and what its attention mask
and positions say about documents is gathered once for all layers. A model that builds another mask (blocks, images that
see each other, attention sinks, ...) is refused by name.
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from dsx_core.modules import CALL, AroundCall, CallingHook
from torch import nn

from ..errors import ActivationArgumentError
from .combined import gather_documents
from .handle import Described, SequenceParallel, add_hooks
from .whole_inputs import blocks_of, convert_blocks, cut_inputs, same_on_all_ranks, text_model_of

__all__ = ["convert", "model_in"]

NAME = "dsx_sequence"
_HARMLESS = frozenset({
    "cache", "cache_position", "is_causal", "logits_to_keep", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "past_key_value", "past_key_values", "position_bias", "position_embeddings", "position_ids",
    "return_dict", "shift_labels", "sliding_window", "softcap", "use_cache",
})  # fmt: skip
"""Keywords of a call of attention that are used below, or that do not change what attention computes."""

_parallel_of: WeakKeyDictionary[nn.Module, SequenceParallel] = WeakKeyDictionary()


def model_in(model: nn.Module) -> nn.Module | None:
    """The outermost Hugging Face model in a module, if there is one. transformers is not imported for this."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return None
    kind = transformers.PreTrainedModel
    return next((part for part in model.modules() if isinstance(part, kind)), None)


def convert(model: Any, parallel: SequenceParallel) -> None:
    """Let the model call its attention by our name, and tell it of its tokens.

    Raises:
        ActivationArgumentError: the model does not use the attention interface, or is known to mask otherwise.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # lazy import: optional

    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(config, "attention_chunk_size", None):
        raise ActivationArgumentError(
            f"sequence_parallel: {name} attends in chunks of {config.attention_chunk_size} tokens, which sequence"
            " attention does not know; set config.attention_chunk_size to None"
        )
    blocks = None
    if not model.config.is_encoder_decoder and model.main_input_name != "input_ids":
        blocks = blocks_of(model)
    text = text_model_of(model) if blocks is None else None
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    _use_our_name(model if text is None else text, name, parallel)
    if blocks is not None:
        convert_blocks(model, blocks, parallel)
        return
    if text is not None:
        compared, signature = same_on_all_ranks(parallel), inspect.signature(model.forward)
        check = model.register_forward_pre_hook(
            CallingHook(partial(_check_whole, signature, compared, parallel)), with_kwargs=True
        )
        parallel.call_at_the_end(check.remove)
        _tell(text, parallel, whole=True)
        return
    _tell(model, parallel, whole=False)
    result = model.register_forward_hook(CallingHook(partial(_check_result, parallel)))
    parallel.call_at_the_end(result.remove)


def _tell(model: Any, parallel: SequenceParallel, *, whole: bool) -> None:
    """Tell a model of its tokens before each forward: also the one inside of it that has no head, where a program calls
    that one by itself.
    """
    inside = getattr(model, model.base_model_prefix, None)
    running: list[Any] = []
    for part in dict.fromkeys((model, inside)):
        if part is None or not hasattr(part, "config"):
            continue
        call = _Outermost(part, getattr(part, CALL, None), running)
        setattr(part, CALL, call)
        parallel.call_at_the_end(call.remove)
        signature = inspect.signature(part.forward)

        def before(module: nn.Module, args: Any, kwargs: Any, signature: inspect.Signature = signature) -> Any:
            if running and running[0] is not module:
                return None  # the model around it was told
            return _told(module, args, kwargs, signature, parallel, whole)

        add_hooks(part, parallel, before)


class _Outermost(AroundCall):
    """Keeps which of several modules, one inside the other, a program has called."""

    def __init__(self, module: nn.Module, inner: Any, running: list[Any]) -> None:
        super().__init__(module, inner)
        self._running = running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._running.append(self.module)
        try:
            return self.call(*args, **kwargs)
        finally:
            self._running.pop()


def _use_our_name(model: Any, name: str, parallel: SequenceParallel) -> None:
    """Let a model call attention by our name until the conversion ends.

    Raises:
        ActivationArgumentError: it does not use the attention interface for one sequence.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME or model.config.is_encoder_decoder:
        model.set_attn_implementation(before)
        raise ActivationArgumentError(
            f"sequence_parallel: the attention of {name} was not found: the model does not call transformers'"
            " AttentionInterface for one sequence; call dsx_activations.sequence_attention in its attention"
        )
    parallel.call_at_the_end(lambda: model.set_attn_implementation(before))
    parallel.on_pause(lambda paused: model.set_attn_implementation(before if paused else NAME))
    for part in model.modules():
        _parallel_of[part] = parallel


def _arguments(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = signature.bind_partial(*args, **kwargs)
    given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    given.pop("kwargs", None)
    return given


def _check_whole(
    signature: inspect.Signature, compared: Any, parallel: SequenceParallel, model: nn.Module, args: Any, kwargs: Any
) -> None:
    """Check what a model of texts and images is given: whole inputs."""
    if parallel.is_paused:
        return
    given, name = _arguments(signature, args, kwargs), type(model).__name__
    if given.get("labels") is not None and given.get("shift_labels") is None:
        raise _unshifted(name)
    for key in ("input_ids", "inputs_embeds"):
        if given.get(key) is not None:
            compared(name, given[key])


def _check_result(parallel: SequenceParallel, model: nn.Module, args: Any, output: Any) -> None:
    """Refuse one result for all tokens of a sample: it would be one of this rank's tokens alone."""
    if parallel.is_paused or parallel.size == 1 or not hasattr(output, "get"):
        return
    logits, pooled = output.get("logits"), output.get("pooler_output")
    if pooled is not None or (isinstance(logits, torch.Tensor) and logits.dim() < 3):
        what, fix = "logits", "take the model without its head, and compute the loss of each token"
        if pooled is not None:
            what, fix = "pooler_output", "make the model with add_pooling_layer=False"
        raise ActivationArgumentError(
            f"sequence_parallel: {type(model).__name__} gives {what} for all tokens of a sample together, which would"
            f" be computed from this rank's tokens alone; {fix}"
        )


def _told(
    model: nn.Module, args: Any, kwargs: Any, signature: inspect.Signature, parallel: SequenceParallel, whole: bool
) -> tuple[Any, Any] | None:
    """Arguments of a forward with positions of the whole sequence; what attention has to know is kept. `whole`: they
    are those of all tokens, and are cut here.
    """
    if parallel.is_paused:
        return None
    given, name = _arguments(signature, args, kwargs), type(model).__name__
    if all(given.get(key) is None for key in ("input_ids", "inputs_embeds")):
        raise ActivationArgumentError(f"sequence_parallel: {name}: got no input_ids and no inputs_embeds")
    if whole:
        parallel.begin()
        given, documents, length = cut_inputs(name, given, parallel), parallel.documents, parallel.length
    else:
        described = parallel.take_described()
        documents, length = described.documents, described.length
    tokens = next(given[key] for key in ("input_ids", "inputs_embeds") if given.get(key) is not None)
    batch, number = tokens.shape[:2]
    _check_labels(name, given)
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and tuple(mask.shape) != (batch, number):
        raise ActivationArgumentError(
            f"sequence_parallel: {name}: attention_mask: got shape {tuple(mask.shape)}, expected {(batch, number)}:"
            " ones and zeros for this rank's tokens, cut as input_ids"
        )
    if length is None:
        length = parallel.agreed_length(number, tokens.device)
    if documents is None:
        documents = _documents(mask, positions, batch, length, parallel, tokens.device)
    parallel.begin(Described(length, documents))
    if positions is None:
        _check_positions(name, model, signature)
        given["position_ids"] = parallel.positions(length, tokens.device)
    if mask is None:  # a model without a mask would look for packed samples in its part of the positions
        given["attention_mask"] = torch.ones(batch, number, dtype=torch.int64, device=tokens.device)
    return (), given


def _check_labels(name: str, given: dict[str, Any]) -> None:
    if given.get("labels") is not None and given.get("shift_labels") is None and "CausalLM" in name:
        raise _unshifted(name)


def _unshifted(name: str) -> ActivationArgumentError:
    return ActivationArgumentError(
        f"sequence_parallel: {name}: got labels without shift_labels: the model would shift the labels of this rank's"
        " part alone; shift them before the sequence is cut (SequenceLoader does) and pass shift_labels"
    )


def _check_positions(name: str, model: nn.Module, signature: inspect.Signature) -> None:
    if "position_ids" not in signature.parameters:
        raise ActivationArgumentError(
            f"sequence_parallel: {name} takes no position_ids, so it would number the tokens of each part from 0;"
            " convert a model that takes them"
        )
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in model.modules()):
        raise ActivationArgumentError(
            f"sequence_parallel: {name} counts positions from its padding token; pass position_ids, computed for the"
            " whole sequence and cut as input_ids"
        )


def _documents(
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    batch: int,
    length: int,
    parallel: SequenceParallel,
    device: torch.device,
) -> torch.Tensor | None:
    """Document numbers of the whole sequence: from a mask of padding, or from positions that begin anew."""
    if positions is not None and positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]  # those of texts, before the three of images (Qwen2-VL)
    if mask is not None:
        found = mask.to(torch.int64) - 1
    elif positions is not None and positions.dim() == 2:
        found = positions.expand(batch, -1)
    else:
        return None
    whole = gather_documents(found.contiguous(), parallel.group, order=parallel.order, length=length)
    if mask is None:
        whole = (whole.diff(prepend=whole[:, :1] - 1) != 1).cumsum(1)
    # on a device the host does not look at it: a mask is then applied that hides nothing
    if device.type == "cpu" and not bool(whole.any()):
        return None
    return whole


def _mask(*args: Any, **given: Any) -> None:
    """Return no mask for a kernel, because `sequence_attention` has its own."""
    if given.get("allow_is_causal_skip") or given.get("allow_is_bidirectional_skip"):
        return
    kind = type(given.get("config")).__name__
    raise ActivationArgumentError(
        f"sequence_parallel: a model of {kind} builds an attention mask of its own, beside causal, window, packed and"
        " padded ones, which sequence attention does not know; call dsx_activations.sequence_attention in its attention"
    )


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: returns (batch, tokens, heads, features)."""
    parallel, name = _parallel_of.get(module), type(module).__name__
    if parallel is None:
        raise ActivationArgumentError(
            f'sequence_parallel: {name} is told to use "{NAME}" and belongs to no converted model (a copy of one, or'
            " one whose conversion has ended); call sequence_parallel for the model, or set_attn_implementation"
        )
    unknown = [key for key, one in kwargs.items() if key not in _HARMLESS and one is not None]
    if kwargs.get("position_bias") is not None:
        unknown.append("position_bias")
    if kwargs.get("output_attentions"):
        unknown.append("output_attentions")
    if unknown or attention_mask is not None:
        what = ", ".join(unknown) or f"a mask of shape {tuple(attention_mask.shape)}"  # type: ignore[union-attr]
        raise ActivationArgumentError(
            f"sequence_parallel: {name} gives its attention {what}, which sequence attention does not know"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = parallel.attend(
        query, key, value, causal=bool(causal), dropout_p=dropout, scale=scaling, softcap=kwargs.get("softcap"),
        window=kwargs.get("sliding_window"),
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None
