"""Hugging Face models that every rank gives whole inputs, because what is cut comes into being inside of them.

- Vision models (ViT, CLIP's and SigLIP's towers, DINOv2, ...): an image becomes tokens in the model. They are cut
  before the first block and brought together behind the last one, so that pooling, heads and losses see all of them.
- Vision-language models (LLaVA, Qwen2-VL, ...): features of images take the places of some tokens of the text. The
  model inside that takes these embeddings is converted, and cuts what it is given. Towers of images run whole on each
  rank.

Their results: of a vision model all tokens, of a vision-language model this rank's. Left out: blocks that are given
tensors beside hidden states (rotary positions of patches), and models with several towers of one result (CLIPModel).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import dsx_comm
import torch
from dsx_core.modules import CallingHook
from torch import nn
from torch.autograd.function import once_differentiable

from ..errors import ActivationArgumentError
from .combined import gather_sequence
from .handle import SequenceParallel, add_hooks

__all__ = ["blocks_of", "convert_blocks", "cut_inputs", "same_on_all_ranks", "text_model_of"]

COMPARED = 16
"""The whole inputs of the first forwards are compared over the ranks: so many."""
_BESIDE = ("attention_mask", "position_ids", "mm_token_type_ids", "token_type_ids", "cache_position")
"""Tensors with one value for each token, in their last dimension."""
_OF_OTHERS = ("cache", "past_key_values", "logits_to_keep", "shift_labels", "num_items_in_batch")
"""Arguments that are passed through a text model, and not used for its tokens."""


# - Vision models


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The blocks of a vision model, one after the other.

    Raises:
        ActivationArgumentError: there is not exactly one list of them.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # lazy import: optional

    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part)]
    found = [one for one in lists if all(isinstance(block, GradientCheckpointingLayer) for block in one)]
    if len(found) != 1:
        raise ActivationArgumentError(
            f"sequence_parallel: {type(model).__name__} has {len(found)} lists of blocks, expected one, before which"
            " its tokens can be cut; convert the part of it that takes hidden states, with tokens that you cut there"
        )
    return found[0]


def convert_blocks(model: Any, blocks: nn.ModuleList, parallel: SequenceParallel) -> None:
    """Cut the tokens of a vision model before its first block, and bring them together behind the last one."""
    name, compared = type(model).__name__, same_on_all_ranks(parallel)
    _check_paths(name, model)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if parallel.is_paused:
            return
        _check_outputs(name, model.config, kwargs)
        for one in (*args, *kwargs.values()):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                compared(name, one)
                break
        parallel.begin()

    def enter(block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if parallel.is_paused:
            return None
        _check_block(name, args, kwargs)
        parallel.begin_whole(args[0].shape[1])
        return (parallel.shard(args[0]), *args[1:]), kwargs

    def check(block: nn.Module, args: Any, kwargs: Any) -> None:
        if not parallel.is_paused:
            _check_block(name, args, kwargs)

    def leave(block: nn.Module, args: Any, output: Any) -> Any:
        if parallel.is_paused:
            return None
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        whole = _Gathered.apply(hidden, parallel)
        return (whole, *rest) if isinstance(output, tuple) else whole

    add_hooks(model, parallel, before)
    handles = [blocks[0].register_forward_pre_hook(CallingHook(enter), with_kwargs=True)]
    handles += [block.register_forward_pre_hook(CallingHook(check), with_kwargs=True) for block in list(blocks)[1:]]
    handles += [blocks[-1].register_forward_hook(CallingHook(leave))]
    for handle in handles:
        parallel.call_at_the_end(handle.remove)


def _check_paths(name: str, model: Any) -> None:
    """Refuse what leaves out layers at random: each rank would decide for itself."""
    if any(type(part).__name__.endswith("DropPath") and getattr(part, "drop_prob", None) for part in model.modules()):
        raise ActivationArgumentError(
            f"sequence_parallel: {name} leaves out layers of a sample at random (drop path), and each rank would draw"
            " for its own tokens; set config.drop_path_rate to 0"
        )
    dropped = [key for key in ("layerdrop", "encoder_layerdrop") if getattr(model.config, key, 0)]
    if dropped:
        raise ActivationArgumentError(
            f"sequence_parallel: {name} leaves out whole layers at random ({dropped[0]}), and each rank would leave out"
            f" others; set config.{dropped[0]} to 0"
        )


def _check_outputs(name: str, config: Any, kwargs: dict[str, Any]) -> None:
    for key in ("output_hidden_states", "output_attentions"):
        asked = kwargs.get(key)
        if getattr(config, key, False) if asked is None else asked:
            raise ActivationArgumentError(
                f"sequence_parallel: {name}: got {key}, expected it to be off: inside the blocks each rank has its own"
                " tokens alone; take the results of the model, or run it inside parallel.paused()"
            )


def _check_block(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what a block is given beside hidden states: nobody knows how it has to be cut."""
    if not args or not isinstance(args[0], torch.Tensor) or args[0].dim() != 3:
        raise ActivationArgumentError(
            f"sequence_parallel: the blocks of {name} are not given hidden states (batch, tokens, width) first; convert"
            " the part of it that takes hidden states, with tokens that you cut there"
        )
    beside = {**{str(n): one for n, one in enumerate(args[1:], 2)}, **kwargs}
    found = [key for key, one in beside.items() if _has_tensor(one)]
    if found:
        raise ActivationArgumentError(
            f"sequence_parallel: the blocks of {name} are given tensors beside hidden states (argument"
            f" {', '.join(found)}), which sequence_parallel does not know how to cut; call"
            " dsx_activations.sequence_attention in its attention"
        )


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor) and value.dim() > 0


class _Gathered(torch.autograd.Function):
    """This rank's tokens -> all tokens. All ranks go on with them, and the gradient of a token is the sum of theirs, as
    it has to be where gradients of parameters are averaged over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, parallel: SequenceParallel) -> torch.Tensor:
        ctx.parallel = parallel
        return gather_sequence(part, parallel.group, order=parallel.order, length=parallel.length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        parallel, total = ctx.parallel, grad.clone(memory_format=torch.contiguous_format)
        if parallel.size > 1:
            dsx_comm.all_reduce(total, group=parallel.group)
        return parallel.shard(total), None


# - Vision-language models


def text_model_of(model: Any) -> Any | None:
    """The model inside a vision-language model that takes embeddings of texts and images, or None: `model` is no such
    model.

    Raises:
        ActivationArgumentError: it has a configuration for texts, and no one model inside that goes on with each token.
    """
    from transformers import PreTrainedModel  # lazy import: optional

    config = model.config.get_text_config()
    if config is model.config or model.config.is_encoder_decoder:
        return None
    inside = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is config]
    outermost = [one for one in inside if not any(one is not other and one in other.modules() for other in inside)]
    takes = [one for one in outermost if "inputs_embeds" in inspect.signature(one.forward).parameters]
    if len(takes) != 1 or not (model.can_generate() or getattr(model, "language_model", None) is takes[0]):
        raise ActivationArgumentError(
            f"sequence_parallel: {type(model).__name__} has a part for texts that is not found as a model that takes"
            " inputs_embeds, or gives one result for all tokens; convert the part that takes hidden states, with tokens"
            " that you cut there"
        )
    return takes[0]


def cut_inputs(name: str, given: dict[str, Any], parallel: SequenceParallel) -> dict[str, Any]:
    """This rank's part of what a model of texts and images is given: embeddings, masks and positions of all tokens.

    Raises:
        ActivationArgumentError: a tensor with a value for each token that is not known here.
    """
    tokens = next(given[key] for key in ("inputs_embeds", "input_ids") if given.get(key) is not None)
    length, found = tokens.shape[1], dict(given)
    parallel.begin_whole(length)
    for key, one in given.items():
        if key in ("inputs_embeds", "input_ids") and one is not None:
            found[key] = parallel.shard(one)
        elif isinstance(one, torch.Tensor) and key in _BESIDE:
            if one.shape[-1] != length:
                raise ActivationArgumentError(
                    f"sequence_parallel: {name}: {key}: got shape {tuple(one.shape)}, expected {length} values in the"
                    " last dimension, one for each token of the whole sequence"
                )
            found[key] = parallel.shard(one, dim=one.dim() - 1)
        elif _has_tensor(one) and key not in _OF_OTHERS:
            raise ActivationArgumentError(
                f"sequence_parallel: {name} is given {key}, which sequence_parallel does not know how to cut; call"
                " dsx_activations.sequence_attention in its attention"
            )
    return found


def same_on_all_ranks(parallel: SequenceParallel) -> Callable[[str, torch.Tensor], None]:
    """A check that a tensor is the same on all ranks, for the first forwards. Collective; it costs a small message and,
    on a device, a wait of the host.
    """
    left = COMPARED

    def check(name: str, whole: torch.Tensor) -> None:
        nonlocal left
        if parallel.size == 1 or not left:
            return
        left -= 1
        flat = whole.detach().reshape(-1).to(torch.float64).nan_to_num()
        weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
        mine = torch.stack([weights.new_full((), whole.shape[1] if whole.dim() > 1 else 0), (flat * weights).sum()])
        found = mine.new_empty(parallel.size * 2)
        dsx_comm.all_gather_into_tensor(found, mine, group=parallel.group)
        rows = found.view(-1, 2).tolist()
        other = [rank for rank, row in enumerate(rows) if row != rows[parallel.rank]]
        if other:
            raise ActivationArgumentError(
                f"sequence_parallel: {name}: rank {parallel.rank} and rank {other[0]} of the group have other inputs"
                f" (shape {tuple(whole.shape)} here), expected whole inputs, the same on all ranks: this model cuts its"
                " tokens inside; cut labels alone (SequenceLoader(whole_inputs=True)), and give all ranks of the group"
                " the same samples"
            )

    return check
