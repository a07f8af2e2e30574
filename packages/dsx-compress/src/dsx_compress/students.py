"""Layer reduction: a student whose layers are initialised from chosen layers of its teacher."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .config import load_config
from .errors import CompressionError, near
from .layers import recursive_getattr

__all__ = ["student_initialization"]


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any) -> nn.Module:
    """Copy teacher layer `teacher_layer[i]` to student layer i, and the modules in `other_module_name`.

    Args:
        student_model: an ordinary model, not sharded. It has as many layers at `module_name_prefix` as `teacher_layer`
            has entries.
        teacher_model: a model with the same names.
        deepspeed_config: the configuration, in any form that `load_config` takes.

    Returns:
        The student.

    Raises:
        CompressionError: one of the models lacks a name, or shapes differ. Nothing has been copied then.
    """
    section = load_config(deepspeed_config).layer_reduction
    if not section.enabled:
        raise CompressionError("student_initialization: layer_reduction.enabled is false; set it to true")
    prefix = section.module_name_prefix
    theirs, ours = _layers(teacher_model, prefix, "teacher"), _layers(student_model, prefix, "student")
    if len(ours) != len(section.teacher_layer):
        raise CompressionError(
            f"layer_reduction: the student has {len(ours)} layers at {prefix!r}, teacher_layer has "
            f"{len(section.teacher_layer)} entries; build the student with that many layers"
        )
    pairs = []
    for place, source in enumerate(section.teacher_layer):
        if source >= len(theirs):
            raise CompressionError(
                f"layer_reduction.teacher_layer: got {source}, but the teacher has {len(theirs)} layers (0 to "
                f"{len(theirs) - 1}) at {prefix!r}"
            )
        pairs.append((f"{prefix}.{source}", theirs[source], f"{prefix}.{place}", ours[place]))
    for name in section.other_module_name:
        pairs.append((name, _module(teacher_model, name, "teacher"), name, _module(student_model, name, "student")))
    copies = [copy for pair in pairs for copy in _tensor_pairs(*pair)]
    with torch.no_grad():
        for target, source in copies:
            target.copy_(source)
    return student_model


def _layers(model: nn.Module, prefix: str, role: str) -> nn.ModuleList | nn.Sequential:
    found = _module(model, prefix, role)
    if not isinstance(found, (nn.ModuleList, nn.Sequential)):
        lists = [name for name, module in model.named_modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
        raise CompressionError(
            f"layer_reduction.module_name_prefix: {prefix!r} is {type(found).__name__} in the {role}, expected a list"
            f" of modules; it has {', '.join(lists[:5]) or 'none'}"
        )
    return found


def _module(model: nn.Module, name: str, role: str) -> Any:
    try:
        return recursive_getattr(model, name)
    except (AttributeError, IndexError):
        names = [known for known, _ in model.named_modules() if known]
        raise CompressionError(f"layer_reduction: the {role} has no module {name!r}{near(name, names)}") from None


def _tensor_pairs(source_name: str, source: Any, target_name: str, target: Any) -> list[tuple[Any, Any]]:
    """Pairs (target, source) of every parameter and buffer of a module, or of one tensor."""
    if isinstance(source, torch.Tensor):
        known, wanted = {"": source}, {"": target}
    else:
        known = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        wanted = {**dict(target.named_parameters()), **dict(target.named_buffers())}
    if set(known) != set(wanted):
        raise CompressionError(
            f"layer_reduction: {source_name} of the teacher and {target_name} of the student have different tensors: "
            f"{sorted(set(known) ^ set(wanted))[:5]}"
        )
    for name, tensor in wanted.items():
        if tensor.shape != known[name].shape:
            raise CompressionError(
                f"layer_reduction: {source_name}.{name} has shape {tuple(known[name].shape)} in the teacher and "
                f"{tuple(tensor.shape)} in the student; only the number of layers may differ"
            )
    return [(tensor, known[name]) for name, tensor in wanted.items()]
