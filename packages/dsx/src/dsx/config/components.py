"""Checks of ``optimizer`` and ``scheduler``: known type, known and sensible arguments, available today.

A table has the arguments of our own optimizers. For one-bit optimizers, classes of ``torch.optim`` and optimizers of
installed packages, the arguments are those of the constructor. One of our own schedules is built on a stand-in
optimizer: an error of its constructor is a problem of the configuration.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

from dsx_comm.onebit import rules as one_bit
from dsx_core import nearest

from ..errors import DsxConfigError, Problem, ScheduleError
from .notes import CLIPPING
from .translate import show

__all__ = [
    "OPTIMIZERS", "OPTIMIZER_ARGUMENTS", "argument_schema", "canonical_optimizer", "component_problems",
    "installed_optimizers", "optimizer_classes", "torch_classes",
]  # fmt: skip

OPTIMIZERS = "dsx.optimizers"
"""Group of entry points: optimizer classes of installed packages, by the name that `optimizer.type` has for them."""

_TORCH_SWITCHES = ("maximize", "foreach", "capturable", "differentiable", "fused")
_ADAM = ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "adam_w_mode", "torch_adam",
         "fp32_optimizer_states", "state_dtype", "stochastic_rounding", "seed", "set_grad_none",
         *_TORCH_SWITCHES)  # fmt: skip
_CODED_ADAM = ("lr", "betas", "eps", "weight_decay", "bias_correction", "seed")

OPTIMIZER_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adam8bit": (*_CODED_ADAM, "adam_w_mode"),
    "AdamW8bit": _CODED_ADAM,
    "Adam4bit": (*_CODED_ADAM, "adam_w_mode"),
    "AdamW4bit": _CODED_ADAM,
    "Lamb": ("lr", "betas", "eps", "weight_decay", "bias_correction", "max_coeff", "min_coeff", "amsgrad",
             "eps_inside_sqrt", "set_grad_none"),
    "Lion": ("lr", "betas", "weight_decay", "fp32_optimizer_states", "set_grad_none"),
    "Adagrad": ("lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value", "amsgrad",
                "fp32_optimizer_states", *_TORCH_SWITCHES),
    "Muon": ("lr", "muon_lr", "adam_lr", "momentum", "nesterov", "weight_decay", "ns_steps", "ns_method", "betas",
             "eps", "ns_coefficients", "ns_eps", "ns_dtype", "adjust_lr_fn", "decay", "split", "qk_clip"),
    "Dion": ("lr", "adam_lr", "mu", "rank_fraction", "rank", "weight_decay", "epsilon", "betas", "eps", "seed", "split",
             "qk_clip"),
    "Apollo": ("lr", "betas", "eps", "weight_decay", "rank_fraction", "rank", "alpha", "scale_type", "update_proj_gap",
               "growth", "seed", "split", "qk_clip"),
    "MuAdam": ("lr", "betas", "eps", "weight_decay", "amsgrad", *_TORCH_SWITCHES),
    "MuAdamW": ("lr", "betas", "eps", "weight_decay", "amsgrad", *_TORCH_SWITCHES),
    "MuSGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", *_TORCH_SWITCHES),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", *_TORCH_SWITCHES),
    **{name: one_bit.config_arguments(cls) for name, cls in one_bit.OPTIMIZERS.items()},
}  # fmt: skip

_SWITCHES = frozenset(
    {"bias_correction", "amsgrad", "adam_w_mode", "torch_adam", "fp32_optimizer_states", "set_grad_none", "nesterov",
     "eps_inside_sqrt", "maximize", "capturable", "differentiable", "cuda_aware", "stochastic_rounding"}
)  # fmt: skip
_NUMBERS = frozenset(
    {"lr", "muon_lr", "adam_lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value", "momentum",
     "max_coeff", "min_coeff", "ns_eps",
     "mu", "rank_fraction", "epsilon", "alpha", "growth",
     "coeff_beta", "factor_max", "factor_min", "factor_threshold", "variance_floor"}
)  # fmt: skip
_COUNTS = {"ns_steps": 1, "freeze_step": 1, "var_freeze_step": 1, "var_update_scaler": 1, "local_step_scaler": 1,
           "local_step_clipper": 1, "variance_window": 0, "seed": 0, "rank": 1, "update_proj_gap": 1}  # fmt: skip
"""Arguments that are whole numbers, with the smallest allowed value."""
_CHOICES = {
    "comm_backend_name": ("nccl", "mpi", "hccl", "compressed", "gloo", "dsx"),
    "compression": ("on", "off"),
    "scale": ("rms", "mean"),
    "ns_method": ("standard", "gram"),
    "state_dtype": ("fp32", "bf16", "fp16"),
    "ns_dtype": ("bfloat16", "float16", "float32", "float64"),
    "adjust_lr_fn": ("original", "match_rms_adamw", "spectral", "unit_rms_norm"),
    "decay": ("decoupled", "cautious"),
    "scale_type": ("channel", "tensor"),
}


def canonical_optimizer(name: str) -> str | None:
    """Return the documented spelling of the name, if it is one of our own optimizers; None for any other name."""
    spelled = {known.lower(): known for known in OPTIMIZER_ARGUMENTS}
    return spelled.get(name.lower())


def argument_schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of an optimizer's argument; empty if the name does not tell the type."""
    if name in _SWITCHES:
        return {"anyOf": [{"type": "boolean"}, {"const": "auto"}]}
    if name in _NUMBERS:
        return {"anyOf": [{"type": "number", "minimum": 0}, {"const": "auto"}]}
    if name in _COUNTS:
        return {"anyOf": [{"type": "integer", "minimum": _COUNTS[name]}, {"const": "auto"}]}
    if name in _CHOICES:
        return {"enum": [*dict.fromkeys((*_CHOICES[name], "auto"))]}
    if name == "betas":
        beta = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
        return {"anyOf": [{"type": "array", "items": beta, "minItems": 2, "maxItems": 2}, {"const": "auto"}]}
    return {}


def torch_classes(module: str) -> dict[str, type]:
    """Return the public classes of `torch.optim` or `torch.optim.lr_scheduler` that can be named in a configuration."""
    import importlib  # lazy import, like torch: a configuration with only our own classes needs neither

    return {
        name: value
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, type)
        and value.__module__.startswith(module)  # leave out classes that the module only imports
        and not name.startswith("_")
        and name not in ("Optimizer", "LRScheduler")
    }


def installed_optimizers() -> dict[str, type]:
    """The optimizer classes that installed packages offer, by name (entry points of the group `dsx.optimizers`).

    Raises:
        DsxConfigError: the name of one is that of another optimizer, or it is no class of an optimizer.
    """
    from torch.optim import Optimizer  # lazy import, as in `torch_classes`

    found: dict[str, type] = {}
    taken = {name.lower() for name in (*OPTIMIZER_ARGUMENTS, *torch_classes("torch.optim"))}
    for one in entry_points(group=OPTIMIZERS):
        made = one.load()
        if one.name.lower() in taken:
            raise DsxConfigError([Problem("conflict", "optimizer.type", f"{one.value} takes a name that is taken",
                                          got=one.name, expected="another name of the entry point")])  # fmt: skip
        if not isinstance(made, type) or not issubclass(made, Optimizer):
            expected = "a subclass of torch.optim.Optimizer"
            raise DsxConfigError([Problem("value", "optimizer.type", f"{one.value} is no class of an optimizer",
                                          got=type(made).__name__, expected=expected)])  # fmt: skip
        found[one.name] = made
    return found


def optimizer_classes() -> dict[str, type]:
    """The optimizers that a configuration can name besides our own: those of torch and of installed packages."""
    return {**torch_classes("torch.optim"), **installed_optimizers()}


def component_problems(root: Any, where: Callable[[str], str]) -> Iterator[Problem]:
    """Yield the problems of ``optimizer`` and ``scheduler`` in a validated configuration."""
    if root.optimizer is not None:
        yield from _optimizer_problems(root.optimizer, where)
    if root.scheduler is not None:
        yield from _scheduler_problems(root.scheduler, where)


def _optimizer_problems(section: Any, where: Any) -> Iterator[Problem]:
    own = canonical_optimizer(section.type)
    if own is not None:
        yield from _argument_problems("optimizer.params", section.params, OPTIMIZER_ARGUMENTS[own], own, where)
        yield from _optimizer_values(section.params, where)
        return
    classes = optimizer_classes()
    yield from _class_problems(
        "optimizer", "torch.optim", classes, section, list(OPTIMIZER_ARGUMENTS), ("params",), where
    )


def _optimizer_values(params: dict[str, Any], where: Any) -> Iterator[Problem]:
    for name, value in params.items():
        path = f"optimizer.params.{name}"
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        expected = ""
        if name in _SWITCHES and not isinstance(value, bool):
            expected = "true or false"
        elif name in _NUMBERS and not (number and value >= 0):
            expected = "a number of at least 0"
        elif name in _COUNTS and not (isinstance(value, int) and number and value >= _COUNTS[name]):
            expected = f"a whole number of at least {_COUNTS[name]}"
        elif name in _CHOICES and value not in _CHOICES[name]:
            expected = f"one of {', '.join(_CHOICES[name])}"
        elif name == "betas" and not _are_betas(value):
            expected = "a list of two numbers, each at least 0 and less than 1"
        if expected:
            kind = "value" if number else "type"
            yield Problem(kind, path, "this argument cannot be used", got=show(value), expected=expected,
                          where=where(path), fix=f"write {expected}")  # fmt: skip


def _are_betas(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(beta, (int, float)) and not isinstance(beta, bool) and 0 <= beta < 1 for beta in value)
    )


def _argument_problems(path: str, params: dict[str, Any], known: Any, owner: str, where: Any) -> Iterator[Problem]:
    for name in params:
        if name in known:
            continue
        full = f"{path}.{name}"
        if name == "max_grad_norm":
            yield Problem("value", full, "clipping is not the optimizer's work here", got=show(params[name]),
                          where=where(full), fix=f"set the top-level key {CLIPPING}")  # fmt: skip
            continue
        near = nearest(name, known)
        yield Problem(
            "unknown-key", full, f'unknown argument "{name}" of {owner}', got=f'"{name}"',
            expected=" or ".join(f"{path}.{other}" for other in near) if near else f"one of {', '.join(known)}",
            fix=f'did you mean "{near[0]}"?' if len(near) == 1 else "remove it or use one of these", where=where(full),
        )  # fmt: skip


def _scheduler_problems(section: Any, where: Any) -> Iterator[Problem]:
    from ..lr_schedules import SCHEDULES  # lazy import: only a configuration with a schedule pays for it

    own = {name.lower(): name for name in SCHEDULES}.get(section.type.lower())
    if own is None:
        module = "torch.optim.lr_scheduler"
        yield from _class_problems(
            "scheduler", module, torch_classes(module), section, list(SCHEDULES), ("optimizer",), where
        )
        return
    signature = inspect.signature(SCHEDULES[own])
    known = [name for name in signature.parameters if name not in ("optimizer", "last_batch_iteration")]
    wrong = list(_argument_problems("scheduler.params", section.params, known, own, where))
    wrong += _required_problems("scheduler.params", signature, section.params, own, where, skip=("optimizer",))
    yield from wrong
    if wrong:
        return
    try:
        SCHEDULES[own](_StandIn(section.params), **section.params)
    except (ScheduleError, TypeError) as error:
        yield Problem("value", "scheduler.params", str(error), got=show(section.params),
                      where=where("scheduler.params"), fix=f"see {own} in docs/config.md")  # fmt: skip


class _StandIn:
    """A stand-in for an optimizer, with one parameter group for each value of the longest list of values per group.

    So the values of such lists are checked, too.
    """

    def __init__(self, params: dict[str, Any]) -> None:
        count = max([1, *(len(value) for value in params.values() if isinstance(value, list))])
        self.param_groups = [{"lr": 0.001} for _ in range(count)]


def _required_problems(
    path: str, signature: inspect.Signature, params: Any, owner: str, where: Any, *, skip: tuple[str, ...]
) -> list[Problem]:
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        Problem("missing", f"{path}.{name}", f"{owner} needs this argument", where=where(path),
                fix=f'add "{name}"; it has no default, and "auto" cannot be resolved for it')
        for name, parameter in signature.parameters.items()
        if name not in skip and parameter.default is inspect.Parameter.empty and parameter.kind not in fixed
        and name not in params
    ]  # fmt: skip


def _class_problems(
    key: str, module: str, classes: dict[str, type], section: Any, ours: list[str], skip: tuple[str, ...], where: Any
) -> Iterator[Problem]:
    chosen = classes.get(section.type) or {name.lower(): value for name, value in classes.items()}.get(
        section.type.lower()
    )
    if chosen is None:
        near = nearest(section.type, [*ours, *classes])
        yield Problem(
            "value", f"{key}.type", f"unknown {key}", got=show(section.type), where=where(f"{key}.type"),
            expected=" or ".join(near) if near else f"one of {', '.join(ours)}, or a class of {module}",
            fix=f'did you mean "{near[0]}"?' if near else "pass the object to initialize instead",
        )  # fmt: skip
        return
    signature = inspect.signature(chosen)
    if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in signature.parameters.values()):
        return
    known = [name for name in signature.parameters if name not in skip]
    yield from _argument_problems(f"{key}.params", section.params, known, section.type, where)
    yield from _required_problems(f"{key}.params", signature, section.params, section.type, where, skip=skip)
