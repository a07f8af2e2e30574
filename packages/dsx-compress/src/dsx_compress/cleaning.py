"""`redundancy_clean` turns a compressed model into a smaller ordinary one with the same outputs.

Quantised values and masks become the stored weights, in the order weights, sparse, rows, heads, channels. Then the
rows, heads and channels that were pruned in modules with `related_modules` are removed. Removal is exact if a zero
stays a zero until it reaches the related module: through ReLU, GELU, SiLU, tanh, dropout, pooling and a batch norm that
is itself related, but not through sigmoid or a layer norm. `example` checks it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .apply import ACTIVATION, Placed, quantize_input, techniques_of
from .config import load_config
from .errors import CompressionError
from .quantizers import require_finite
from .scheduler import value_before
from .shrinking import shrink, shrink_plan
from .techniques import ActivationQuantizer, Technique

__all__ = ["finish_schedule", "redundancy_clean"]

logger = logging.getLogger("dsx_compress")


def redundancy_clean(
    model: nn.Module,
    deepspeed_config: Any,
    mpu: Any = None,
    *,
    example: Any = None,
    tolerance: float = 1e-3,
    keep_activation_quantizers: bool = True,
) -> nn.Module:
    """Make compression permanent, in place.

    First every technique goes to the end of its schedule. Activation quantisers, which are small modules of this
    package, stay, because outputs depend on them. Without any, or with `keep_activation_quantizers=False`, nothing of
    this package remains in the model.

    Args:
        model: prepared by `init_compression` and trained; not sharded (at ZeRO stage 3 gather it first).
        deepspeed_config: the configuration of `init_compression`.
        mpu: has no effect; accepted because scripts pass it. Every rank cleans its own slices.
        example: arguments of the model, as a tuple or a dictionary. The outputs before and after are compared in
            evaluation mode; if they differ, nothing is removed (techniques are at the end of their schedule then).
        tolerance: largest allowed difference of outputs, relative to the largest output; used with `example`.
        keep_activation_quantizers: whether activation quantisers stay in the model.

    Returns:
        The model.

    Raises:
        CompressionError: the model has no techniques, or the outputs would change.
        CompressionDataError: a weight has NaN or infinity.
    """
    config = load_config(deepspeed_config)
    if next(techniques_of(model), None) is None:
        if config.layer_reduction.enabled and not config.methods():
            return model  # a student with fewer layers is an ordinary model already
        raise CompressionError("redundancy_clean: the model has no techniques; call init_compression first")
    plan = shrink_plan(model, config)  # raises before anything changes
    finish_schedule(model)
    plan = shrink_plan(model, config)  # now with the final masks
    before = None if example is None else _outputs(model, example)
    target = model if example is None else copy.deepcopy(model)
    bake(target, keep_activation_quantizers=keep_activation_quantizers or example is not None)
    shrink(target, plan)
    if before is not None:
        _compare(before, _outputs(target, example), tolerance)
        bake(model, keep_activation_quantizers=keep_activation_quantizers)
        shrink(model, plan)
    return model


def finish_schedule(model: nn.Module) -> None:
    """Set every technique to the end of its schedule: target bits, no mixture, masks computed.

    Raises:
        CompressionDataError: a weight has NaN or infinity; nothing is changed then.
    """
    placed = list(techniques_of(model))
    for place in placed:
        if place.tensor:
            require_finite(value_before(place), f"{place.name}.{place.tensor}")
    early = [place.name for place in placed if place.technique.finish(_weight_of(place))]
    if early:
        logger.warning(
            "clean-up before the end of the schedule: %d tensors (%s ...) go to fewer bits than they were trained with"
            " [DSX158] docs: dsx explain DSX158",
            len(early), early[0],
        )  # fmt: skip


def _weight_of(place: Placed) -> torch.Tensor:
    return value_before(place) if place.tensor else torch.empty(0)


def bake(model: nn.Module, *, keep_activation_quantizers: bool) -> None:
    """Store the values that layers use in their parameters, and remove the techniques. Tied weights stay tied."""
    tied: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
    for module in list(model.modules()):
        for tensor, chain in list(dict(getattr(module, "parametrizations", {})).items()):
            if not any(isinstance(technique, Technique) for technique in chain):
                continue
            original = getattr(chain, "original", None)
            with torch.no_grad():
                value = getattr(module, tensor).detach().clone()
            _unparametrize(module, tensor)
            _store(module, tensor, value, original, tied)
        if isinstance(module._modules.get(ACTIVATION), ActivationQuantizer) and not keep_activation_quantizers:
            _drop_activation_quantizer(module)


def _unparametrize(module: nn.Module, tensor: str) -> None:
    """Remove a tensor's parametrisation from one module.

    `torch.nn.utils.parametrize.remove_parametrizations` deletes the property from the module's class, which copies made
    by `copy.deepcopy` share. So the module gets its own class instead (test_clean_leaves_copies_alone).
    """
    chains: Any = module.parametrizations
    del chains[tensor]
    module.__class__ = module.__class__.__bases__[0]
    if not len(chains):
        delattr(module, "parametrizations")
        return
    parametrize._inject_new_class(module)
    for other in chains:
        parametrize._inject_property(module, other)


def _store(module: nn.Module, tensor: str, value: torch.Tensor, original: Any, tied: dict[int, Any]) -> None:
    known = tied.get(id(original))
    if known is not None and torch.equal(known[0], value):
        parameter = known[1]
    else:
        parameter = nn.Parameter(value, requires_grad=True if original is None else original.requires_grad)
        if original is not None:
            tied[id(original)] = (value, parameter)
    module.register_parameter(tensor, parameter)


def _drop_activation_quantizer(module: nn.Module) -> None:
    del module._modules[ACTIVATION]
    for handle, hook in list(module._forward_pre_hooks.items()):
        if hook is quantize_input:
            del module._forward_pre_hooks[handle]


def _outputs(model: nn.Module, example: Any) -> list[torch.Tensor]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            out = model(**example) if isinstance(example, Mapping) else model(*_as_tuple(example))
    finally:
        for module, training in modes.items():
            module.training = training
    return _tensors(out)


def _as_tuple(example: Any) -> tuple[Any, ...]:
    return tuple(example) if isinstance(example, (tuple, list)) else (example,)


def _tensors(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    values = out.values() if isinstance(out, Mapping) else out if isinstance(out, (tuple, list)) else ()
    return [tensor for value in values for tensor in _tensors(value)]


def _compare(before: list[torch.Tensor], after: list[torch.Tensor], tolerance: float) -> None:
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        if old.shape != new.shape:
            raise CompressionError(
                f"redundancy_clean: output {place} would have shape {tuple(new.shape)}, it had {tuple(old.shape)}"
            )
        size = float(old.abs().max()) if old.numel() else 0.0
        found = float((old - new).abs().max()) if old.numel() else 0.0
        if not found <= tolerance * max(size, 1e-30):
            raise CompressionError(
                f"redundancy_clean: output {place} would change by {found:.3g} (largest output {size:.3g}); something "
                "between a pruned module and its related modules does not keep zeros (a sigmoid, a layer norm, a batch "
                "norm that is not in related_modules); leave out related_modules, and only zeros are stored"
            )
