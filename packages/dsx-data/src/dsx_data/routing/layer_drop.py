"""Progressive layer dropping (Zhang and He 2020): layers are skipped at random.

Deep layers are skipped more often than early ones, and all layers more often as training goes on.

    theta(t) = (1 - theta_bar) * exp(-gamma * t) + theta_bar          t: optimizer steps so far
    p_i      = 1 - (i / L) * (1 - theta(t))                           keep probability of layer i of L, from 0

So the first layer always runs. These are the numbers of the paper's algorithm and of the published BERT code.

A layer that is kept divides its change of the hidden states by p_i: its result is h + (layer(h) - h) / p_i. So the
expected activations are those of evaluation, where every layer runs.

Whether a layer is kept is a function of (seed, step, layer) alone. So all ranks skip the same layers and no collective
is left waiting, micro-batches of one optimizer step agree, and a recomputation during backward decides as the forward
did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import DataArgumentError
from ..randomness import uniform
from .calls import LayerCall, Signature
from .rules import find_layers
from .swap import Behaviour, give_behaviour, take_behaviour

__all__ = ["LayerDrop", "ProgressiveLayerDrop", "convert_to_layer_drop", "find_layer_drop", "remove_layer_drop"]


class ProgressiveLayerDrop:
    """The schedule theta(t). Layers that were converted with it follow it.

    Args:
        theta: limit of theta(t), 0 to 1; 1 drops nothing.
        gamma: rate at which theta(t) falls to its limit, per step; 0 or more.
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        if not 0.0 <= theta <= 1.0 or gamma < 0.0:
            raise DataArgumentError(
                f"ProgressiveLayerDrop: got theta {theta} and gamma {gamma}, expected 0 <= theta <= 1 and gamma >= 0"
            )
        self.theta, self.gamma = theta, gamma
        self.current_theta = 1.0
        self._followers: list[LayerDrop] = []

    def theta_at(self, global_step: int) -> float:
        """theta after `global_step` optimizer steps."""
        return (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta

    def get_theta(self) -> float:
        """theta of the next step."""
        return self.current_theta

    def get_state(self) -> dict[str, Any]:
        """The keyword arguments that a model with layer dropping of its own takes."""
        return {"progressive_layer_drop": True, "pld_theta": self.current_theta}

    def update_state(self, global_step: int) -> None:
        """Set theta for the step after `global_step` steps."""
        self.current_theta = self.theta_at(global_step)
        for drop in self._followers:
            drop.decide(global_step)


class LayerDrop:
    """Decides which layers of one model are kept at the current step. All converted layers share this object.

    Args:
        schedule: theta(t).
        layers: number of layers.
        seed: decides, with step and layer, which layers are kept; it must be the same on all ranks.
        rescale: divide the change of a kept layer by its keep probability.
    """

    def __init__(self, schedule: ProgressiveLayerDrop, layers: int, *, seed: int = 1234, rescale: bool = True) -> None:
        self.schedule, self.layers, self.seed, self.rescale = schedule, layers, seed, rescale
        self.step = 0
        self.use_schedule(schedule)

    def keep_probability(self, layer: int) -> float:
        """The keep probability of layer `layer` (0 is the first) at the current step."""
        return self._probabilities[layer]

    def keeps(self, layer: int) -> bool:
        """Whether layer `layer` runs at the current step."""
        return self._kept[layer]

    def update_state(self, global_step: int) -> None:
        """Set the state for the step after `global_step` optimizer steps. Call it after each optimizer step, here or on
        the schedule.
        """
        self.schedule.update_state(global_step)

    def decide(self, global_step: int) -> None:
        """Choose the layers that run after `global_step` steps; the schedule calls it when its step changes."""
        self.step = global_step
        theta = self.schedule.get_theta()
        # This is decided once per step: a compiler can trace a forward that only looks the result up.
        self._probabilities = [1.0 - layer / self.layers * (1.0 - theta) for layer in range(self.layers)]
        self._kept = [uniform(self.seed, global_step, layer) < p for layer, p in enumerate(self._probabilities)]

    def use_schedule(self, schedule: ProgressiveLayerDrop) -> None:
        """Use another schedule from the current step on."""
        if self in self.schedule._followers:
            self.schedule._followers.remove(self)
        self.schedule = schedule
        schedule._followers.append(self)
        self.update_state(self.step)

    def state_dict(self) -> dict[str, Any]:
        """The seed and the step."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.seed = int(state["seed"])
        self.update_state(int(state["step"]))


class _DropsLayers(Behaviour):
    """Behaviour of a converted layer."""

    _layer_drop: LayerDrop
    _drop_number: int
    _drop_signature: Signature
    _drop_outputs: int | None
    """Length of the tuple that the layer returns; 0: it returns a tensor; None: not known yet."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        drop = self._layer_drop
        if not self.training:
            return super().forward(*args, **kwargs)
        hidden = LayerCall(self._drop_signature, args, kwargs).hidden
        if not drop.keeps(self._drop_number):
            if self._drop_outputs is None:  # whether the layer returns a tuple is known only after it has run once
                with torch.no_grad():
                    self._note_outputs(super().forward(*args, **kwargs))
            # A view, because hooks on inputs and outputs must not get the same tensor for both.
            same = hidden.view_as(hidden)
            return (same, *(None for _ in range(self._drop_outputs - 1))) if self._drop_outputs else same
        result = super().forward(*args, **kwargs)
        self._note_outputs(result)
        p = drop.keep_probability(self._drop_number)
        if not drop.rescale or p >= 1.0:
            return result
        if isinstance(result, tuple):
            return (torch.lerp(hidden.to(result[0].dtype), result[0], 1.0 / p), *result[1:])
        return torch.lerp(hidden.to(result.dtype), result, 1.0 / p)

    def _note_outputs(self, result: Any) -> None:
        self.__dict__["_drop_outputs"] = len(result) if isinstance(result, tuple) else 0


def convert_to_layer_drop(
    model: nn.Module,
    layers: Sequence[nn.Module] | type[nn.Module] | None = None,
    *,
    schedule: ProgressiveLayerDrop,
    seed: int = 1234,
    rescale: bool = True,
) -> LayerDrop:
    """Change the layers of a model in place so that they can be skipped.

    Args:
        layers: the layers in order, or their class; None: `find_layers` finds them in Hugging Face models. A layer maps
            hidden states to hidden states of the same shape (or to a tuple that begins with them), and contains its
            residual connection.
        schedule, seed, rescale: see `LayerDrop`.

    Returns:
        The object that the layers share. Call its `update_state(steps)`, or that of `schedule`, after each optimizer
        step; an engine of `dsx.initialize` does that itself.

    Raises:
        DataArgumentError: no layers were given or found.
    """
    if isinstance(layers, type) or layers is None:
        found: Sequence[nn.Module] = find_layers(model, layers)
    else:
        found = list(layers)
    if not found:
        raise DataArgumentError("convert_to_layer_drop: got no layers, expected at least one")
    drop = LayerDrop(schedule, len(found), seed=seed, rescale=rescale)
    for number, layer in enumerate(found):
        give_behaviour(
            layer, _DropsLayers, _layer_drop=drop, _drop_number=number, _drop_signature=Signature(layer),
            _drop_outputs=None,
        )  # fmt: skip
    return drop


def find_layer_drop(model: nn.Module) -> LayerDrop | None:
    """The `LayerDrop` that the converted layers of a model share; None if no layer is converted."""
    return next((layer._layer_drop for layer in model.modules() if isinstance(layer, _DropsLayers)), None)


def remove_layer_drop(model: nn.Module) -> nn.Module:
    """Undo `convert_to_layer_drop` on all layers of `model`. Returns `model`."""
    for layer in model.modules():
        if isinstance(layer, _DropsLayers):
            take_behaviour(layer, _DropsLayers, "_layer_drop", "_drop_number", "_drop_signature", "_drop_outputs")
    return model
