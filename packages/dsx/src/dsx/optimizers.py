"""Chooses an optimizer for a name in the configuration: the class, its arguments, and the reason for the choice.

For `Adam`, `AdamW`, `Lamb`, `Lion`, `Adagrad` and `SGD` the implementation is chosen: the fused one of `dsx_ops` if it
is installed and can run, otherwise torch's fused one, otherwise torch's plain one. Any other class of `torch.optim` is
found by its name, in upper or lower case, and so is one of an installed package (entry points of the group
`dsx.optimizers`). The reason for the choice is a text, which is logged and tested.

`Adam` decouples weight decay (AdamW) unless `adam_w_mode` is false, because that is the meaning of the name in existing
configurations. `OneBitAdam`, `ZeroOneAdam` and `OneBitLamb` are those of `dsx_comm`; they communicate by themselves, so
they are built with the process group. `Muon`, `Dion` and `Apollo` are those of `dsx_ops`; `MuAdam`, `MuAdamW` and
`MuSGD` are those of the package mup.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from dsx_comm.onebit import rules as one_bit
from dsx_core.device import accelerator_kind
from torch import nn

from .config.notes import CLIPPING
from .errors import DsxConfigError, in_checkout
from .muon_groups import check_qk_clip, check_split, groups_for_muon, optimizer_problem

Build = Callable[..., torch.optim.Optimizer]

_MUP = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}
_OURS = {"lamb": "FusedLamb", "lion": "FusedLion"}
_ON_MATRICES = {"muon": "Muon", "dion": "Dion", "apollo": "Apollo"}
_CODED = {f"{name}{bits}bit": f"Adam{bits}bit" for name in ("adam", "adamw") for bits in (8, 4)}
_FUSED_EVERYWHERE = ("Adam", "AdamW", "SGD")  # torch's fused Adagrad exists on the CPU only
_ONLY_TORCH = {"amsgrad", "capturable", "differentiable", "foreach", "fused"}


@dataclass(frozen=True)
class OptimizerChoice:
    """A chosen optimizer.

    Attributes:
        name: the result of `engine.get_type()`.
        build: (parameters or groups) -> the optimizer.
        reason: why this implementation was chosen, in one sentence.
        communicates: `build` also takes `process_group`.
        reads_model: `build` also takes `model`.
    """

    name: str
    build: Build
    reason: str
    communicates: bool = False
    reads_model: bool = False


def choose_optimizer(
    type_name: str, params: Mapping[str, Any], *, reference: bool = False, masters: str = "fp32", states: str = "fp32"
) -> OptimizerChoice:
    """Choose the implementation of the optimizer that a config names.

    Args:
        type_name: `optimizer.type`, in any case.
        params: `optimizer.params`.
        reference: take the simplest implementation with the same arithmetic, to compare others with.
        masters, states: the dtypes of the master weights and of the optimizer's states. Only dsx_ops has fp32 states
        for
            master weights in 16 bits.

    Raises:
        DsxConfigError: the optimizer is unknown or not available, does not take an argument, or cannot keep states in
            this dtype.
    """
    key = type_name.lower()
    if "max_grad_norm" in params:
        raise optimizer_problem(
            "params.max_grad_norm",
            "optimizers do not clip gradients here",
            got=repr(params["max_grad_norm"]),
            fix=f'remove it and set "{CLIPPING}" at the top level',
        )
    arguments = dict(params)
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])  # JSON has only lists
    wide = masters if masters != "fp32" and states == "fp32" else ""  # states must be wider than the masters
    _agree_on_states(arguments, masters, states)
    if key in ("adam", "adamw"):
        return _adam(type_name, arguments, reference, wide, states)
    if key in _CODED:
        return _coded_adam(type_name, _CODED[key], arguments, wide)
    if key in _ON_MATRICES:
        return _on_matrices(type_name, _ON_MATRICES[key], arguments, wide, reference=reference)
    if key in _MUP:
        return _mup(type_name, _MUP[key], arguments, wide)
    averaging_in_one_bit = one_bit.find_optimizer(type_name)
    if averaging_in_one_bit is not None:
        return _one_bit(type_name, averaging_in_one_bit, arguments)
    if key in _OURS:
        return _only_ops(type_name, arguments, wide)
    if key == "adagrad":
        _drop_upstreams(arguments)
    if wide and not reference and not (key == "sgd" and not arguments.get("momentum")):
        raise _narrow(type_name, f"{type_name} keeps", wide)
    return _from_torch(type_name, arguments, reference)


def _agree_on_states(arguments: dict[str, Any], masters: str, states: str) -> None:
    """With master weights in 16 bits the precision section sets the dtype of the states; `fp32_optimizer_states` must
    agree.
    """
    asked = arguments.get("fp32_optimizer_states")
    if masters != "fp32" and asked is not None and bool(asked) != (states == "fp32"):
        raise optimizer_problem(
            "params.fp32_optimizer_states",
            f"the precision section has masters in {masters} and optimizer states in {states}",
            kind="conflict",
            got=str(asked).lower(),
            fix="leave it out; bf16.bf16_optimizer_states chooses under bf16 masters, fp16 masters have fp16 states",
        )


def _narrow(type_name: str, what: str, masters: str) -> DsxConfigError:
    return optimizer_problem(
        "type",
        f"{what} its states in the masters' {masters}, while bf16.bf16_optimizer_states is false",
        kind="conflict",
        got=type_name,
        expected="Adam, AdamW, Lamb or Lion of dsx-ops, which keep fp32 states beside them",
        fix="set bf16.bf16_optimizer_states to true, or leave bf16.bf16_master_weights_and_grads out",
    )


def _adam(type_name: str, arguments: dict[str, Any], reference: bool, wide: str, states: str) -> OptimizerChoice:
    decoupled = bool(arguments.pop("adam_w_mode", True)) or type_name.lower() == "adamw"
    kept = _kept_states(arguments, wide, states)
    wish = "torch_adam is set" if arguments.pop("torch_adam", False) else ""
    if not wish:  # torch's AdamW has another default than FusedAdam, and the choice of class must not change results
        arguments.setdefault("weight_decay", 0.0)
    only_torch = sorted(_ONLY_TORCH & {key for key, value in arguments.items() if value})
    if only_torch:
        wish = f"{only_torch[0]} is set, which only torch has"
    if kept:
        return _adam_with_states(type_name, {**arguments, "adam_w_mode": decoupled}, kept, wish, wide)
    if reference:
        wish = "as reference"
    cls, missing = _ops_class("FusedAdam", native=not wide)
    if wish or cls is None:
        if wide and not reference:
            raise _narrow(type_name, f"torch's is taken, because {wish or missing}; it keeps", wide)
        choice = _torch_adam("AdamW" if decoupled else "Adam", arguments, plain=reference)
        return OptimizerChoice(type_name, choice.build, f"{choice.reason}, because {wish or missing}")
    kept = {key: value for key, value in arguments.items() if key not in _ONLY_TORCH}
    return _from_ops(type_name, cls, {**kept, "adam_w_mode": decoupled}, wide)


_STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _kept_states(arguments: dict[str, Any], wide: str, states: str) -> dict[str, Any]:
    """The form of the moments that `params` ask for, taken out of `arguments`; empty where they ask for none.

    Raises:
        DsxConfigError: they contradict each other, or the precision section.
    """
    kept = {key: arguments.pop(key) for key in ("state_dtype", "stochastic_rounding", "seed") if key in arguments}
    name = kept.get("state_dtype", states)
    if wide and name != "fp32":
        raise optimizer_problem("params.state_dtype", f"the precision section has fp32 states beside masters in {wide}",
                       kind="conflict", got=name, fix="leave it out, or set bf16.bf16_optimizer_states")  # fmt: skip
    if kept.get("state_dtype") is not None and arguments.pop("fp32_optimizer_states", False) and name != "fp32":
        raise optimizer_problem("params.state_dtype", "fp32_optimizer_states says fp32", kind="conflict", got=name,
                       fix="leave one of them out")  # fmt: skip
    if kept.get("stochastic_rounding") and name != "bf16":
        raise optimizer_problem("params.stochastic_rounding", "only moments in bf16 are rounded so", kind="conflict",
                       got=f"states in {name}", expected="bf16", fix='set "state_dtype": "bf16" beside it')  # fmt: skip
    if "seed" in kept and not kept.get("stochastic_rounding"):
        raise optimizer_problem("params.seed", "it is the seed of stochastic rounding", got=str(kept["seed"]),
                       fix="leave it out, or set stochastic_rounding")  # fmt: skip
    if "state_dtype" in kept:
        kept["state_dtype"] = _STATE_DTYPES[name]
    return kept


def _adam_with_states(
    type_name: str, arguments: dict[str, Any], kept: dict[str, Any], wish: str, wide: str
) -> OptimizerChoice:
    cls, missing = _ops_class("FusedAdam")
    if wish or cls is None:
        raise optimizer_problem(f"params.{next(iter(kept))}", f"torch's Adam has none of this, and it is taken, because"
                       f" {wish or missing}", kind="conflict", got=str(next(iter(kept.values()))),
                       fix="leave it out, or what asks for torch's Adam")  # fmt: skip
    own = {key: value for key, value in arguments.items() if key not in _ONLY_TORCH}
    return _from_ops(type_name, cls, {**own, **kept}, wide)


def _coded_adam(type_name: str, name: str, arguments: dict[str, Any], wide: str) -> OptimizerChoice:
    """Adam with moments in 8 or 4 bits, of dsx_ops. `AdamW` in the name decouples weight decay whatever is said."""
    if wide:
        raise _narrow(type_name, f"{type_name}, which has no fp32 states, would keep", wide)
    if type_name.lower().startswith("adamw"):
        arguments["adam_w_mode"] = True
    cls, missing = _ops_class(name)
    if cls is None:
        raise optimizer_problem("type", f'optimizer "{type_name}" needs dsx-ops: {missing}', fix=in_checkout("dsx-ops"))
    return _from_ops(type_name, cls, arguments, wide)


def _torch_adam(torch_name: str, arguments: dict[str, Any], *, plain: bool) -> OptimizerChoice:
    if arguments.get("bias_correction", True) is not True and not plain:
        raise optimizer_problem(
            "params.bias_correction",
            f"torch's {torch_name} always corrects the bias",
            got="false",
            fix="set torch_adam to false, or leave bias_correction out",
        )
    ours = ("bias_correction", "fp32_optimizer_states", "set_grad_none")
    return _from_torch(torch_name, {key: value for key, value in arguments.items() if key not in ours}, plain)


def _on_matrices(
    type_name: str, name: str, arguments: dict[str, Any], wide: str, *, reference: bool
) -> OptimizerChoice:
    """A rule of dsx_ops for the matrices of hidden layers, and AdamW for the rest. Logits are clipped by an extension
    (`clipping.py`), which needs the sharded model.
    """
    if wide:
        raise _narrow(type_name, f"{name} keeps", wide)
    muon, missing = _ops_class("Muon")
    cls = None if muon is None else _class_on_matrices(name)
    if cls is None:
        raise optimizer_problem("type", f'optimizer "{type_name}" is one of dsx-ops: {missing}', kind="not-available")
    split, clip = arguments.pop("split", None) or {}, arguments.pop("qk_clip", None)
    _check_arguments(cls, arguments, type_name, more=("split", "qk_clip"))
    check_split(split)
    if clip is not None:
        check_qk_clip(clip)
        if reference:
            raise optimizer_problem("params.qk_clip", "the plain optimizer that others are compared with does not clip",
                           kind="not-available", got=repr(clip), fix="leave it out of the comparison")  # fmt: skip

    def build(parameters: Any, *, model: nn.Module) -> torch.optim.Optimizer:
        return cls(groups_for_muon(parameters, model, split), **arguments)

    return OptimizerChoice(
        type_name, build, f"dsx_ops' {name} for matrices, AdamW for embeddings, heads and vectors", reads_model=True
    )


def _class_on_matrices(name: str) -> Any:
    # Lazy import: see `_ops_class`.
    from dsx_ops.optim.apollo import Apollo
    from dsx_ops.optim.dion import Dion
    from dsx_ops.optim.muon import Muon

    return {"Muon": Muon, "Dion": Dion, "Apollo": Apollo}[name]


def _mup(type_name: str, name: str, arguments: dict[str, Any], wide: str) -> OptimizerChoice:
    """An optimizer of the package mup, which scales learning rates by width (`mup.set_base_shapes` comes first)."""
    if wide:
        raise _narrow(type_name, f"torch's, which {name} makes, keeps", wide)
    try:
        import mup  # lazy import: an optional package  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise optimizer_problem(
            "type", f'optimizer "{type_name}" is one of the package mup, which cannot be imported ({error})',
            kind="not-available", fix="pip install mup, and call mup.set_base_shapes on the model before initialize",
        ) from error  # fmt: skip
    return OptimizerChoice(
        type_name, lambda parameters: getattr(mup, name)(parameters, **arguments), f"mup.{name}, rates by width"
    )


def _only_ops(type_name: str, arguments: dict[str, Any], wide: str) -> OptimizerChoice:
    """An optimizer that torch does not have."""
    cls, missing = _ops_class(_OURS[type_name.lower()])
    if cls is None:
        raise optimizer_problem("type", f'optimizer "{type_name}" needs dsx-ops: {missing}', fix=in_checkout("dsx-ops"))
    return _from_ops(type_name, cls, {key: value for key, value in arguments.items() if key != "set_grad_none"}, wide)


def _drop_upstreams(arguments: dict[str, Any]) -> None:
    """Remove arguments of DeepSpeed's Adagrad that torch's does not have: a variant that DeepSpeed itself refuses, and
    one that is always true with master weights.
    """
    if arguments.pop("amsgrad", False):
        raise optimizer_problem("params.amsgrad", "Adagrad has no such variant", got="true", fix="leave it out")
    for name in ("fp32_optimizer_states", "set_grad_none"):
        arguments.pop(name, None)


def _one_bit(type_name: str, cls: Any, arguments: dict[str, Any]) -> OptimizerChoice:
    """An optimizer of dsx_comm that averages in one bit."""
    import dsx_comm  # lazy import, as every sibling

    _check_arguments(cls, arguments, type_name)

    def build(parameters: Any, *, process_group: Any = None) -> torch.optim.Optimizer:
        return cls(parameters, process_group=process_group, **arguments)

    kernels = dsx_comm.compressed.codec_status(accelerator_kind() or "cpu")
    how = "dsx-ops' kernels" if kernels["native"] else f"plain torch, because {kernels['reason']}"
    return OptimizerChoice(type_name, build, f"dsx_comm.{cls.__name__}, compressing with {how}", communicates=True)


def _from_ops(type_name: str, cls: Any, arguments: dict[str, Any], wide: str) -> OptimizerChoice:
    """A class of dsx_ops, with fp32 states if they must be `wide` or DeepSpeed's argument asks for them."""
    if arguments.pop("fp32_optimizer_states", False) or wide:
        arguments["state_dtype"] = torch.float32
    _check_arguments(cls, arguments, type_name)
    name = f"dsx_ops.{cls.__name__}"
    return OptimizerChoice(
        type_name, lambda parameters: cls(parameters, **arguments), f"{name}, one pass over the state"
    )


def _ops_class(name: str, *, native: bool = False) -> tuple[Any, str]:
    """A class of dsx_ops, or None and the reason; `native`: None also if its native code is missing."""
    try:
        # Lazy import: only an engine that builds its own optimizer needs the package.
        import dsx_ops
    except ImportError as error:
        return None, f"dsx-ops cannot be imported ({error})"
    if native and not dsx_ops.native_status()["native"]:
        return None, f"dsx-ops runs without its native code ({dsx_ops.native_status()['reason']})"
    return getattr(dsx_ops, name), ""


def _from_torch(type_name: str, arguments: dict[str, Any], plain: bool) -> OptimizerChoice:
    classes = torch_optimizers()
    cls = classes.get(type_name.lower())
    if cls is None:
        raise _unknown(type_name, classes.values())
    accepted = _check_arguments(cls, arguments, type_name)
    arguments = dict(arguments)
    where = "torch.optim" if cls.__module__.startswith("torch.optim") else cls.__module__
    if plain:
        arguments.update({key: False for key in ("fused", "foreach") if key in accepted})
        reason = f"{where}.{cls.__name__}, tensor by tensor"
    elif cls.__name__ in _FUSED_EVERYWHERE and not {"fused", "foreach"} & arguments.keys():
        arguments["fused"] = True
        reason = f"{where}.{cls.__name__}, fused"
    else:
        reason = f"{where}.{cls.__name__}"
    return OptimizerChoice(type_name, lambda parameters: cls(parameters, **arguments), reason)


def torch_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer class of `torch.optim`, and of installed packages, by lower-case name."""
    from .config.components import optimizer_classes  # lazy import: pydantic comes with the first configuration

    found: dict[str, Any] = {name.lower(): value for name, value in optimizer_classes().items()}
    return found


def _check_arguments(cls: Any, arguments: Mapping[str, Any], type_name: str, more: Iterable[str] = ()) -> set[str]:
    accepted = {*list(inspect.signature(cls.__init__).parameters)[2:], *more}
    for name in arguments:
        if name not in accepted:
            raise optimizer_problem(
                f"params.{name}", f"{type_name} does not take this", got=name, expected=", ".join(sorted(accepted))
            )
    return accepted


def _unknown(type_name: str, classes: Iterable[type]) -> DsxConfigError:
    # Lazy import: only an error message needs it.
    from dsx_core import nearest

    known = sorted({"Adam", "AdamW", "Lamb", "Lion", "Adagrad", "SGD", *(cls.__name__ for cls in classes)})
    near = nearest(type_name, known)
    return optimizer_problem(
        "type",
        f'optimizer "{type_name}" is unknown',
        got=type_name,
        expected=", ".join(known),
        fix=f"did you mean {' or '.join(near)}?" if near else "",
    )
