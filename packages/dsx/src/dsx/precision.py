"""The data types of a run: one frozen record, which is chosen from the configuration, logged once and saved in
checkpoints.

Numbers have six roles in training: the parameters that the model computes with, the computation itself, the buffer in
which gradients accumulate, the bytes sent in a reduction, the master copy that the optimizer updates, and the
optimizer's states. Their types are independent, but most combinations make one of the types useless; these are refused
here, before anything is allocated.

Data types are named ``fp32``, ``bf16`` and ``fp16``; ``dtype("bf16")`` turns a name into torch's object, and only that
function imports torch. The loss scale is in ``loss_scaler``; this record only says whether it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import PrecisionError

__all__ = ["Precision", "dtype", "name_of", "precision_problems", "resolve_precision"]

NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ALIASES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_ROLES = ("params", "compute", "grad_accum", "reduce", "master", "optimizer_state")


def dtype(name: str) -> Any:
    """Return the ``torch.dtype`` of ``fp32``, ``bf16``, ``fp16`` (torch's own names are accepted too).

    Raises:
        PrecisionError: for any other name.
    """
    import torch  # lazy import: a configuration is read and explained without torch

    return getattr(torch, NAMES[name_of(name)])


def name_of(value: Any) -> str:
    """Return the short name of a data type given by short name, torch name or ``torch.dtype``.

    Raises:
        PrecisionError: if it is not one of the three.
    """
    text = str(value).removeprefix("torch.").lower()
    short = _ALIASES.get(text, text)
    if short not in NAMES:
        raise PrecisionError(f"got the data type {value!r}, expected one of {', '.join(NAMES)}")
    return short


@dataclass(frozen=True)
class Precision:
    """The data types of one run; every field is a short name.

    Attributes:
        params: parameters of the module, as the model computes with them.
        compute: matrix products; differs from ``params`` only under autocast.
        grad_accum: buffer in which gradients of several micro-batches are summed.
        reduce: the data that ranks send when gradients are averaged.
        master: the values that the optimizer updates.
        optimizer_state: moments and other states of the optimizer.
        buffers: floating-point buffers of the module; None: each keeps the dtype it was made with.
        autocast: whether forward runs under ``torch.autocast``.
        safe_modules: classes whose gradients may be sent in the compute type under autocast; None: no such classes.
        cast_inputs: whether floating-point inputs of the model are cast to ``params``.
        check_overflow: whether a step with gradients that are not finite is skipped.
    """

    params: str = "fp32"
    compute: str = "fp32"
    grad_accum: str = "fp32"
    reduce: str = "fp32"
    master: str = "fp32"
    optimizer_state: str = "fp32"
    buffers: str | None = None
    autocast: bool = False
    safe_modules: tuple[str, ...] | None = None
    cast_inputs: bool = False
    check_overflow: bool = False

    def __post_init__(self) -> None:
        for role in _ROLES:
            object.__setattr__(self, role, name_of(getattr(self, role)))
        if self.buffers is not None:
            object.__setattr__(self, "buffers", name_of(self.buffers))
        problems = precision_problems(self)
        if problems:
            raise PrecisionError("; ".join(problems))

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients are computed in fp16 and would vanish without a loss scale."""
        return self.compute == "fp16"

    def dtype(self, role: str) -> Any:
        """Return the ``torch.dtype`` of one role: ``params``, ``compute``, ``grad_accum``, ``reduce``, ``master`` or
        ``optimizer_state``.
        """
        if role not in _ROLES:
            raise PrecisionError(f"got the role {role!r}, expected one of {', '.join(_ROLES)}")
        return dtype(getattr(self, role))

    @property
    def buffer_dtype(self) -> Any:
        """The ``torch.dtype`` that buffers are cast to; None: they are not."""
        return None if self.buffers is None else dtype(self.buffers)

    def describe(self) -> str:
        """Return one line for the log."""
        autocast = " (torch.autocast)" if self.autocast else ""
        buffers = "" if self.buffers is None else f"buffers {self.buffers}, "
        scale = "loss scale" if self.needs_loss_scale else "no loss scale"
        return (
            f"precision: parameters {self.params}, {buffers}compute {self.compute}{autocast}, gradient accumulation"
            f" {self.grad_accum}, reduction {self.reduce}, master {self.master}, optimizer states"
            f" {self.optimizer_state}, {scale}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        record = asdict(self)
        record["safe_modules"] = None if self.safe_modules is None else list(self.safe_modules)
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Precision:
        """Build the record from ``to_json``'s result.

        Raises:
            PrecisionError: for unknown fields or illegal combinations.
        """
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(record) - known)
        if unknown:
            raise PrecisionError(f"unknown fields {', '.join(unknown)}; expected {', '.join(sorted(known))}")
        values = dict(record)
        if values.get("safe_modules") is not None:
            values["safe_modules"] = tuple(values["safe_modules"])
        return cls(**values)


def precision_problems(record: Precision) -> list[str]:
    """Return the problems of a combination, one sentence each; empty if it can train."""
    low = {"fp16", "bf16"}
    found = []
    if record.params != record.compute and not record.autocast:
        found.append(
            f"parameters in {record.params} compute in {record.compute} only under autocast; use torch_autocast"
        )
    if record.autocast and record.params not in ("fp32", record.compute):
        found.append(
            f"autocast to {record.compute} over parameters in {record.params}; use fp32 parameters, or one type for"
            " both"
        )
    for role in ("grad_accum", "reduce", "master"):
        other = getattr(record, role)
        if other in low and record.compute in low and other != record.compute:
            found.append(
                f"{role} in {other} does not fit computation in {record.compute}: one has the other's range or"
                f" precision, never both; use {record.compute} or fp32"
            )
    if record.master in low and record.master != record.params:
        found.append(f"master weights in {record.master} keep less than parameters in {record.params}; use fp32")
    if record.grad_accum in low and record.params == "fp32" and not record.autocast:
        found.append(f"gradients of fp32 parameters would be summed in {record.grad_accum}; use fp32")
    if record.optimizer_state in low and record.master != record.optimizer_state:
        found.append(
            f"optimizer states in {record.optimizer_state} with masters in {record.master}: "
            f"keep the masters in {record.optimizer_state} too, or the states in fp32"
        )
    return found


def resolve_precision(root: Any) -> Precision:
    """Choose the record from the sections ``fp16``, ``bf16``, ``amp``, ``torch_autocast``, ``data_types`` and
    ``communication_data_type``.

    Args:
        root: an object with these names as attributes, such as the loaded configuration; at most one mode is on.

    Raises:
        PrecisionError: for a combination that cannot train.
    """
    asked = root.data_types.grad_accum_dtype
    reduce = root.communication_data_type
    if root.fp16.enabled or root.bf16.enabled:
        name = "fp16" if root.fp16.enabled else "bf16"
        low_master = (
            root.fp16.fp16_master_weights_and_grads if name == "fp16" else root.bf16.bf16_master_weights_and_grads
        )
        low_states = (name == "fp16" and low_master) or (name == "bf16" and root.bf16.bf16_optimizer_states)
        return Precision(
            params=name,
            compute=name,
            grad_accum=asked or name,
            reduce=reduce or name,
            master=name if low_master else "fp32",
            optimizer_state=name if low_states else "fp32",
            buffers=root.data_types.buffer_dtype,
            autocast=root.torch_autocast.enabled,
            safe_modules=_safe_modules(root),
            cast_inputs=root.fp16.auto_cast if name == "fp16" else root.bf16.auto_cast,
            check_overflow=name == "fp16" or root.bf16.check_grad_overflow,
        )
    compute = _autocast_dtype(root)
    return Precision(
        compute=compute or "fp32",
        grad_accum=asked or "fp32",
        reduce=reduce or "fp32",
        buffers=root.data_types.buffer_dtype,
        autocast=compute is not None,
        safe_modules=_safe_modules(root),
        check_overflow=compute == "fp16",
    )


def _safe_modules(root: Any) -> tuple[str, ...] | None:
    modules = root.torch_autocast.lower_precision_safe_modules if root.torch_autocast.enabled else None
    return None if modules is None else tuple(modules)


def _autocast_dtype(root: Any) -> str | None:
    """Return the compute type of autocast, or None without autocast."""
    if root.torch_autocast.enabled:
        return name_of(root.torch_autocast.dtype)
    if root.amp.enabled and root.amp.opt_level != "O0":
        return "fp16"
    return None
