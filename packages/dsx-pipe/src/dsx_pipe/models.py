"""Hugging Face GPT-2, Llama and BERT-style models as pipelines, without rewriting them.

A model is treated as a list of units: everything before the blocks (embeddings), one unit per block, everything after
them (final norm and head). A stage keeps the model's own `forward`; units of other stages are replaced by modules that
return their input, and later stages get the hidden state as `inputs_embeds`. So masks, rotary embeddings and everything
else around the blocks is computed by the model's own code, and parameter names stay the model's.

Between stages this dict is sent: {"hidden": the hidden state, "extra": the other inputs, such as attention_mask}.

Models are recognised by structure, not by class: GPT-2 (`transformer.h`), Llama, Mistral, Qwen2 and others of their
layout (`model.layers`), BERT and RoBERTa (`<base>.encoder.layer`). Caches are switched off.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .chunk import Recomputation
from .errors import PartitionError
from .layers import Unit
from .tensor.sequence import set_borders


class Skipped(nn.Module):
    """Replaces a block of another stage: returns the hidden state unchanged."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(block, "attention_type", None)  # some models choose a mask by it

    def forward(self, hidden_states: Any, *_: Any, **__: Any) -> Any:
        """Return the first argument."""
        return hidden_states


class NoPositions(nn.Module):
    """Replaces position embeddings, which the first stage has added already: gives zero."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return a 0-D zero. Adding it changes neither shapes nor dtypes."""
        return torch.zeros(())


class KeepEmbeds(nn.Module):
    """Replaces BERT's embeddings on later stages, where `inputs_embeds` is the hidden state already."""

    def forward(self, *_: Any, inputs_embeds: Any = None, **__: Any) -> Any:
        """Return the hidden state."""
        return inputs_embeds


@dataclass(frozen=True)
class Rule:
    """Layout of a model family, relative to the base model (`model.base_model`).

    Attributes:
        blocks: path of the list of blocks.
        before: path of each module before the blocks -> function that makes its replacement on other stages.
        after: path of each module after the blocks -> function that makes its replacement on other stages.
        only_first: names of inputs that only the embeddings use.
    """

    blocks: str
    before: dict[str, Callable[[], nn.Module | None]]
    after: dict[str, Callable[[], nn.Module | None]]
    only_first: tuple[str, ...] = ("input_ids", "inputs_embeds", "token_type_ids")


RULES = (
    Rule("h", {"wte": lambda: None, "wpe": NoPositions, "drop": nn.Identity}, {"ln_f": nn.Identity}),
    Rule("layers", {"embed_tokens": lambda: None}, {"norm": nn.Identity}),
    Rule("encoder.layer", {"embeddings": KeepEmbeds}, {"pooler": lambda: None}),
)


class ModelParts:
    """A model divided into units: embeddings, one unit per block, head.

    Attributes:
        units: one module per unit; the first holds the embeddings, the last the final norm and the head.
        loss: (logits, labels) -> cross-entropy of the model's task, a scalar.
    """

    def __init__(self, model: nn.Module, rule: Rule) -> None:
        self.model, self.rule = model, rule
        self.base_name = str(getattr(model, "base_model_prefix", ""))
        base = _submodule_at(model, self.base_name)
        self.blocks = _submodule_at(base, rule.blocks)
        before = [m for m in (_submodule_at(base, path) for path in rule.before) if m is not None]
        after = [m for m in (_submodule_at(base, path) for path in rule.after) if m is not None]
        self.heads = [name for name, _ in model.named_children() if name != self.base_name]
        after += [_submodule_at(model, name) for name in self.heads]
        self.units = [
            Unit("Embeddings", before),
            *(Unit(type(b).__name__, [b]) for b in self.blocks),
            Unit("Head", after),
        ]
        self.loss = (
            _next_token_cross_entropy
            if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
            else _cross_entropy
        )

    def keep(self, units: set[int]) -> nn.Module:
        """A shallow copy of the model with only the units of these indices. Modules and parameters are not copied."""
        model = _outline(self.model)
        base = self._outline_at(model, self.base_name)
        if 0 not in units:
            for path, stand_in in self.rule.before.items():
                self._replace(base, path, stand_in())
        blocks = self._outline_at(base, self.rule.blocks)
        for i, (name, block) in enumerate(list(blocks._modules.items())):
            if i + 1 not in units and block is not None:
                blocks._modules[name] = Skipped(block)
        if len(self.units) - 1 not in units:
            for path, stand_in in self.rule.after.items():
                self._replace(base, path, stand_in())
            for name in self.heads:
                model._modules[name] = None
        return model

    def stage(self, units: set[int], recomputation: Recomputation) -> nn.Module:
        """The stage that runs the units of these indices."""
        first, last = 0 in units, len(self.units) - 1 in units
        model = self.keep(units)
        blocks = _submodule_at(_submodule_at(model, self.base_name), self.rule.blocks)
        set_borders(blocks)
        if recomputation.interval:
            for name, block in list(blocks._modules.items()):
                if block is not None and not isinstance(block, Skipped):
                    blocks._modules[name] = _RecomputedBlock(block, recomputation)
        return ModelStage(model, self.base_name, self.rule.only_first, first, last)

    def _outline_at(self, owner: nn.Module, path: str) -> nn.Module:
        """Replace every module on a path by a shallow copy, and return the last one."""
        for name in path.split(".") if path else ():
            owner._modules[name] = _outline(owner._modules[name])  # type: ignore[arg-type]
            owner = owner._modules[name]  # type: ignore[assignment]
        return owner

    @staticmethod
    def _replace(owner: nn.Module, path: str, module: nn.Module | None) -> None:
        if path in owner._modules and owner._modules[path] is not None:
            owner._modules[path] = module


class _RecomputedBlock(nn.Module):
    """A block whose activations are recomputed in the backward."""

    def __init__(self, block: nn.Module, recomputation: Recomputation) -> None:
        super().__init__()
        self.block, self._recomputation = block, recomputation
        self.attention_type = getattr(block, "attention_type", None)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The block's output."""
        if not torch.is_grad_enabled() or not hidden_states.requires_grad:
            return self.block(hidden_states, *args, **kwargs)
        return self._recomputation.function(lambda hidden: self.block(hidden, *args, **kwargs), hidden_states)


class ModelStage(nn.Module):
    """One stage of a Hugging Face model.

    The first stage takes input ids [batch, tokens], or a dict of the model's inputs. The last stage returns the logits.
    """

    def __init__(self, model: nn.Module, base_name: str, only_first: tuple[str, ...], first: bool, last: bool) -> None:
        super().__init__()
        self.model = model
        self._base_name, self._only_first, self._first, self._last = base_name, only_first, first, last

    def forward(self, value: Any) -> Any:
        """Run this stage's units."""
        if self._first:
            inputs = dict(value) if isinstance(value, dict) else {"input_ids": value}
            extra = {k: v for k, v in inputs.items() if k not in self._only_first and v is not None}
        else:
            extra = value["extra"]
            inputs = {"inputs_embeds": value["hidden"], **extra}
        if self._last:
            out = self.model(**inputs, **self._output_flags(self.model))
            return out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state
        base = _submodule_at(self.model, self._base_name)
        return {"hidden": base(**inputs, **self._output_flags(base)).last_hidden_state, "extra": extra}

    @staticmethod
    def _output_flags(model: nn.Module) -> dict[str, Any]:
        decoder = hasattr(getattr(model, "config", None), "use_cache") and not hasattr(model, "encoder")
        return {"use_cache": False, "return_dict": True} if decoder else {"return_dict": True}


def parts_of_model(model: nn.Module) -> ModelParts:
    """Divide a Hugging Face model into units.

    Raises:
        PartitionError: the layout is unknown, or the model has no head. The message lists the known layouts.
    """
    prefix = str(getattr(model, "base_model_prefix", ""))
    base = _submodule_at(model, prefix)
    for rule in RULES:
        if isinstance(_submodule_at(base, rule.blocks), nn.ModuleList) and all(
            _submodule_at(base, p) is not None for p in rule.before
        ):
            if base is model:
                raise PartitionError(
                    f"{type(model).__name__} has no head; split the model with a head, or pass its layers"
                )
            return ModelParts(model, rule)
    raise PartitionError(
        f"{type(model).__name__}: its layers were not found. Known are GPT-2 (<base>.h), Llama-style (<base>.layers"
        " with embed_tokens) and BERT-style (<base>.encoder.layer) models of Hugging Face, and nn.Sequential; for"
        " others pass a list of layers"
    )


def _submodule_at(module: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        module = getattr(module, name, None)
    return module


def _outline(module: nn.Module) -> nn.Module:
    """A shallow copy whose submodules can be replaced without changing the original. Hooks are the original's: those
    that are added to one outline are called by all of them (attention over cut sequences needs it).
    """
    found = copy.copy(module)
    found.__dict__["_modules"] = dict(module._modules)
    return found


def _next_token_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each position's logits with the label of the next position; labels of -100 do not count."""
    return _cross_entropy(logits[..., :-1, :], labels[..., 1:])


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy; labels of -100 do not count."""
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1))
