"""The configuration of a transformer layer: `TransformerConfig`, with the names that existing scripts use."""

from __future__ import annotations

import difflib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import HyperparameterError

_FORMS = ("tanh", "none")


@dataclass
class TransformerConfig:
    """Sizes and options of a `TransformerLayer`. -1 means "not given".

    batch_size: accepted, means nothing here (nothing is preallocated), with a warning. hidden_size, heads: required;
    heads divides hidden_size. intermediate_size: 4 * hidden_size when not given. attn_dropout_ratio,
    hidden_dropout_ratio: of the attention probabilities, and of both sublayers' results; 0 when not given.
    num_hidden_layers: layers of the whole model, for `adjust_init_range`. initializer_range: standard deviation of new
    weights (0.02 when not given). layer_norm_eps: added to the variance. local_rank: mixed into the dropout keys, so
    that ranks with equal random states drop different elements; sets no device. seed: mixed into the dropout keys. The
    keys themselves are drawn from torch's default generator, so that `torch.manual_seed` makes a run
        repeatable and `torch.utils.checkpoint` replays the same masks.
    fp16: parameters are made in float16. pre_layer_norm: x + f(norm(x)) instead of norm(x + f(x)).
    normalize_invertible: backward of the layer norms starts from their results, which are kept anyway; their inputs are
    not kept. A norm weight
        of exactly 0 gets no gradient then, and in 16-bit dtypes the rounding of the results enters the gradients.
    gelu_checkpoint: the GELU's result [batch, sequence, intermediate_size] is computed again in backward instead of
    being kept. attn_dropout_checkpoint: the same for the dropped attention probabilities [batch, heads, sequence,
    sequence]. adjust_init_range: weights of the two result maps begin with initializer_range / sqrt(2 *
    num_hidden_layers).
    stochastic_mode: on CUDA, take torch's fused attention even where torch.use_deterministic_algorithms(True) asks for
        sums in a fixed order and that kernel has none. Without that setting of torch's it changes nothing: fused
        attention trains in either case, and its backward may add in any order. On CPU every sum has a fixed order.
    return_tuple (also called huggingface): `forward` returns (hidden_states,).
    training: the mode that the layer is made in.
    gelu_approximate: "tanh", or "none" for the exact form that most BERT models use.
    """

    batch_size: int = -1
    hidden_size: int = -1
    intermediate_size: int = -1
    heads: int = -1
    attn_dropout_ratio: float = -1
    hidden_dropout_ratio: float = -1
    num_hidden_layers: int = -1
    initializer_range: float = -1
    layer_norm_eps: float = 1e-12
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    adjust_init_range: bool = True
    attn_dropout_checkpoint: bool = False
    stochastic_mode: bool = False
    return_tuple: bool = False
    training: bool = True
    huggingface: bool = False
    gelu_approximate: str = "tanh"

    def __post_init__(self) -> None:
        if self.batch_size > 0:
            warnings.warn("TransformerConfig: batch_size means nothing here; leave it out", stacklevel=3)
        for name in ("hidden_size", "heads"):
            if getattr(self, name) < 1:
                raise HyperparameterError(f"{name}: got {getattr(self, name)}, expected a number of at least 1")
        if self.hidden_size % self.heads:
            raise HyperparameterError(
                f"heads: got {self.heads}, expected a divisor of hidden_size = {self.hidden_size}"
            )
        if self.intermediate_size == -1:
            self.intermediate_size = 4 * self.hidden_size
        if self.initializer_range == -1:
            self.initializer_range = 0.02
        self._check_numbers()
        self.return_tuple = self.return_tuple or self.huggingface

    def _check_numbers(self) -> None:
        for name in ("attn_dropout_ratio", "hidden_dropout_ratio"):
            ratio = getattr(self, name)
            if ratio == -1:
                setattr(self, name, 0.0)
            elif not 0.0 <= ratio < 1.0:
                raise HyperparameterError(f"{name}: got {ratio}, expected 0 <= ratio < 1")
        for name in ("intermediate_size", "initializer_range", "layer_norm_eps"):
            if not getattr(self, name) > 0:
                raise HyperparameterError(f"{name}: got {getattr(self, name)}, expected a number above 0")
        if self.adjust_init_range and self.num_hidden_layers < 1:
            raise HyperparameterError(
                f"num_hidden_layers: got {self.num_hidden_layers}, expected the model's number of layers, "
                "or adjust_init_range=False"
            )
        if self.gelu_approximate not in _FORMS:
            raise HyperparameterError(f"gelu_approximate: got {self.gelu_approximate!r}, expected 'tanh' or 'none'")

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> TransformerConfig:
        """From the fields by name. Raises `HyperparameterError` for an unknown one."""
        known = [f.name for f in fields(cls)]
        for key in json_object:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f", expected one of {', '.join(known)}"
                raise HyperparameterError(f"TransformerConfig: unknown field {key!r}{hint}")
        return cls(**json_object)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> TransformerConfig:
        """From a JSON file in UTF-8, UTF-16 or UTF-32."""
        with open(json_file, "rb") as f:
            return cls.from_dict(json.loads(f.read()))
