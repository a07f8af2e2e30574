"""Conflicts between sections: each rule is a pure function from a validated configuration to problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dsx_comm.onebit import rules as one_bit
from dsx_core import Finding
from dsx_data import config as data_sections
from pydantic import BaseModel

from ..errors import Problem
from ..precision import name_of
from .notes import CLIPPING

__all__ = ["conflicts", "notices"]

_MODES = ("fp16", "bf16", "amp", "torch_autocast")


def conflicts(root: Any, world_size: int, where: Callable[[str], str]) -> Iterator[Problem]:
    """Yield every conflict.

    Args:
        root: the validated model.
        world_size: number of data-parallel ranks.
        where: place in the file of a dotted path.
    """
    for rule in (
        _one_precision_mode,
        _amp_level,
        _low_master,
        _param_dtype,
        _offload_stage,
        _reduction,
        _sparse_gradients,
        _one_bit,
        _data_efficiency,
        _one_quantisation,
        _sections,
    ):
        yield from rule(root, where)


def notices(root: Any) -> list[str]:
    """Return a sentence for every key that has no effect, or another effect, because of another key."""
    return [*_predivide_notice(root), *_clipping_notice(root)]


def _clipping_notice(root: Any) -> list[str]:
    section = root.optimizer
    if section is None or one_bit.find_optimizer(section.type) is None or root.max_norm is None:
        return []
    return [f"{CLIPPING}: {one_bit.clipping_note(section.type, root.max_norm)}"]


def _predivide_notice(root: Any) -> list[str]:
    if root.prescale_gradients and root.gradient_predivide_factor != 1.0:
        return [
            f"gradient_predivide_factor {root.gradient_predivide_factor:g} has no effect beside prescale_gradients,"
            " which divides by the number of ranks before the sum"
        ]
    return []


def _one_precision_mode(root: Any, where: Any) -> Iterator[Problem]:
    on = [name for name in _MODES if getattr(root, name).enabled]
    if on in (["fp16", "torch_autocast"], ["bf16", "torch_autocast"]) and name_of(root.torch_autocast.dtype) == on[0]:
        return  # autocast with parameters of the same type: operations that need fp32 still run in fp32
    if len(on) > 1:
        both = " and ".join(on)
        yield Problem(
            "conflict", f"{on[1]}.enabled", f"{both} cannot be combined",
            got=", ".join(f"{name}.enabled true" for name in on),
            expected=f"one of {', '.join(on)}", where=where(f"{on[1]}.enabled"),
            fix=f'switch all but one off, for example "{on[0]}": {{"enabled": false}}',
        )  # fmt: skip


def _amp_level(root: Any, where: Any) -> Iterator[Problem]:
    if root.amp.enabled and root.amp.opt_level in ("O2", "O3"):
        yield Problem(
            "conflict", "amp.opt_level", "this level is not autocast", got=f'"{root.amp.opt_level}"',
            expected='"O1" (torch.amp autocast) or "O0" (fp32)', where=where("amp.opt_level"),
            fix='use "fp16": {"enabled": true}, which keeps fp32 master weights as O2 does',
        )  # fmt: skip


def _low_master(root: Any, where: Any) -> Iterator[Problem]:
    stage = root.zero_optimization.stage
    for section, key in (("fp16", "fp16_master_weights_and_grads"), ("bf16", "bf16_master_weights_and_grads")):
        block = getattr(root, section)
        if getattr(block, key) and not block.enabled:
            yield Problem("conflict", f"{section}.{key}", f"this needs {section}.enabled", got="true",
                          where=where(f"{section}.{key}"),
                          fix=f"set {section}.enabled to true or remove the key")  # fmt: skip
        elif getattr(block, key) and stage == 0:
            yield Problem("conflict", f"{section}.{key}", "low-precision masters need ZeRO",
                          got="zero_optimization.stage 0", expected="zero_optimization.stage 1, 2 or 3",
                          where=where(f"{section}.{key}"), fix="choose a stage or remove the key")  # fmt: skip
    if root.bf16.bf16_optimizer_states and not root.bf16.bf16_master_weights_and_grads:
        yield Problem("conflict", "bf16.bf16_optimizer_states", "bf16 states need bf16 masters", got="true",
                      where=where("bf16.bf16_optimizer_states"),
                      expected="bf16.bf16_master_weights_and_grads true as well",
                      fix="set both or neither")  # fmt: skip


def _param_dtype(root: Any, where: Any) -> Iterator[Problem]:
    asked = root.data_types.param_dtype
    mode = "fp16" if root.fp16.enabled else "bf16" if root.bf16.enabled else "fp32"
    if asked is not None and asked != mode:
        yield Problem("conflict", "data_types.param_dtype", "the precision mode chooses another type", got=f'"{asked}"',
                      expected=f'"{mode}"', where=where("data_types.param_dtype"),
                      fix=f'switch "{asked}" on instead' if asked != "fp32" else f'switch "{mode}" off')  # fmt: skip


def _offload_stage(root: Any, where: Any) -> Iterator[Problem]:
    zero = root.zero_optimization
    for key, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        block = getattr(zero, key, None)
        device = getattr(block, "device", "none")
        device = getattr(device, "value", device)
        if block is None or device == "none":
            continue
        if zero.stage not in stages:
            yield Problem(
                "conflict", f"zero_optimization.{key}", f"{key} to {device} does not work with this stage",
                got=f"zero_optimization.stage {zero.stage}", where=where(f"zero_optimization.{key}"),
                expected=f"stage {' or '.join(map(str, stages))}",
                fix=f"remove {key}, which has nothing to offload at stage {zero.stage}, or set"
                f" zero_optimization.stage to {' or '.join(map(str, stages))}",
            )  # fmt: skip


def _reduction(root: Any, where: Any) -> Iterator[Problem]:
    stage = root.zero_optimization.stage
    if root.gradient_allreduce_op == "sum" and stage == 3:
        yield Problem("conflict", "gradient_allreduce_op", "stage 3 averages gradients", got='"sum"', expected='"mean"',
                      where=where("gradient_allreduce_op"), fix="use another stage or scale the loss")  # fmt: skip


def _sparse_gradients(root: Any, where: Any) -> Iterator[Problem]:
    stage = root.zero_optimization.stage
    if root.sparse_gradients and stage:
        yield Problem("conflict", "sparse_gradients", f"stage {stage} divides dense gradients among the ranks",
                      got="true", expected="zero_optimization.stage 0, or false", where=where("sparse_gradients"),
                      fix="use stage 0, or build embeddings with sparse=False and remove the key")  # fmt: skip


def _sections(root: Any, where: Any, prefix: str = "") -> Iterator[Problem]:
    """Yield the problems that sections find themselves, by `findings` of their models, with keys inside the section."""
    for name in type(root).model_fields:
        value, path = getattr(root, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            findings = getattr(value, "findings", tuple)
            yield from (_problem(found, where, f"{path}.") for found in findings())
            yield from _sections(value, where, f"{path}.")


def _problem(found: Finding, where: Any, prefix: str = "") -> Problem:
    path = f"{prefix}{found.key}"
    return Problem(
        found.kind, path, found.reason, got=found.got, expected=found.expected, where=where(path), fix=found.fix
    )


def _one_quantisation(root: Any, where: Any) -> Iterator[Problem]:
    moq, compression = root.quantize_training, root.compression_training
    if moq.enabled and compression.methods():
        yield Problem("conflict", "quantize_training.enabled", "compression_training is the newer form of the same",
                      got=f"true, and {', '.join(compression.methods())} in compression_training",
                      expected="one of the two blocks", where=where("quantize_training.enabled"),
                      fix="write the quantisation as compression_training.weight_quantization")  # fmt: skip
    if moq.eigenvalue.enabled and not moq.enabled:
        yield Problem("conflict", "quantize_training.eigenvalue.enabled", "the block around it is off", got="true",
                      expected="quantize_training.enabled true", where=where("quantize_training.eigenvalue.enabled"),
                      fix="switch quantize_training on, or use the top-level eigenvalue block")  # fmt: skip


def _data_efficiency(root: Any, where: Any) -> Iterator[Problem]:
    for found in data_sections.findings(root.data_efficiency, root.curriculum_learning, root.progressive_layer_drop):
        yield _problem(found, where)


def _one_bit(root: Any, where: Any) -> Iterator[Problem]:
    section = root.optimizer
    if section is None or one_bit.find_optimizer(section.type) is None:
        return
    stage, op = root.zero_optimization.stage, root.gradient_allreduce_op
    for found in one_bit.conflicts(section.type, zero_stage=stage, gradient_allreduce_op=op):
        yield _problem(found, where)
