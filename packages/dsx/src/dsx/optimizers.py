"""Chooses an optimizer for a name in the configuration: the class, its arguments, and the reason for the choice.

For `Adam`, `AdamW`, `Lamb`, `Lion`, `Adagrad` and `SGD` the implementation is chosen: the fused one of `dsx_ops` if it
is installed and can run, otherwise torch's fused one, otherwise torch's plain one. Any other class of `torch.optim` is
found by its name, in upper or lower case, and so is one of an installed package (entry points of the group
`dsx.optimizers`). The reason for the choice is a text, which is logged and tested.

`Adam` decouples weight decay (AdamW) unless `adam_w_mode` is false, because that is the meaning of the name in existing
configurations. `OneBitAdam`, `ZeroOneAdam` and `OneBitLamb` are those of `dsx_comm`; they communicate by themselves, so
they are built with the process group. `Muon` is that of `dsx_ops`; `MuAdam`, `MuAdamW` and `MuSGD` are those of the
package mup.
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
from .errors import DsxConfigError, Problem, in_checkout

Build = Callable[..., torch.optim.Optimizer]

_MUP = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}
_OURS = {"lamb": "FusedLamb", "lion": "FusedLion"}
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
        raise _problem(
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
        return _adam(type_name, arguments, reference, wide)
    if key == "muon":
        return _muon(type_name, arguments, wide)
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
        raise _problem(
            "params.fp32_optimizer_states",
            f"the precision section has masters in {masters} and optimizer states in {states}",
            kind="conflict",
            got=str(asked).lower(),
            fix="leave it out; bf16.bf16_optimizer_states chooses under bf16 masters, fp16 masters have fp16 states",
        )


def _narrow(type_name: str, what: str, masters: str) -> DsxConfigError:
    return _problem(
        "type",
        f"{what} its states in the masters' {masters}, while bf16.bf16_optimizer_states is false",
        kind="conflict",
        got=type_name,
        expected="Adam, AdamW, Lamb or Lion of dsx-ops, which keep fp32 states beside them",
        fix="set bf16.bf16_optimizer_states to true, or leave bf16.bf16_master_weights_and_grads out",
    )


def _adam(type_name: str, arguments: dict[str, Any], reference: bool, wide: str) -> OptimizerChoice:
    decoupled = bool(arguments.pop("adam_w_mode", True)) or type_name.lower() == "adamw"
    wish = "torch_adam is set" if arguments.pop("torch_adam", False) else ""
    if not wish:  # torch's AdamW has another default than FusedAdam, and the choice of class must not change results
        arguments.setdefault("weight_decay", 0.0)
    only_torch = sorted(_ONLY_TORCH & {key for key, value in arguments.items() if value})
    if only_torch:
        wish = f"{only_torch[0]} is set, which only torch has"
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


def _torch_adam(torch_name: str, arguments: dict[str, Any], *, plain: bool) -> OptimizerChoice:
    if arguments.get("bias_correction", True) is not True and not plain:
        raise _problem(
            "params.bias_correction",
            f"torch's {torch_name} always corrects the bias",
            got="false",
            fix="set torch_adam to false, or leave bias_correction out",
        )
    ours = ("bias_correction", "fp32_optimizer_states", "set_grad_none")
    return _from_torch(torch_name, {key: value for key, value in arguments.items() if key not in ours}, plain)


def _muon(type_name: str, arguments: dict[str, Any], wide: str) -> OptimizerChoice:
    """Muon of dsx_ops, with the matrices of hidden layers for Muon and the rest for AdamW."""
    if wide:
        raise _narrow(type_name, "Muon keeps", wide)
    cls, missing = _ops_class("Muon")
    if cls is None:
        raise _problem("type", f'optimizer "{type_name}" is one of dsx-ops: {missing}', kind="not-available")
    split = arguments.pop("split", None) or {}
    _check_arguments(cls, arguments, type_name, more=("split",))
    _check_split(split)

    def build(parameters: Any, *, model: nn.Module) -> torch.optim.Optimizer:
        return cls(groups_for_muon(parameters, model, split), **arguments)

    return OptimizerChoice(
        type_name, build, "dsx_ops.Muon for matrices, AdamW for embeddings, heads and vectors", reads_model=True
    )


def _check_split(split: Any) -> None:
    """Raises DsxConfigError if `optimizer.params.split` is not {part of a name: {"rows": ..., "columns": ...}}."""
    wanted = '{"qkv_proj": {"rows": [4096, 1024, 1024]}, "gate_up_proj": {"columns": 2}}'
    form = isinstance(split, dict) and all(isinstance(v, dict) and v.keys() <= {"rows", "columns"} and v
                                           for v in split.values())  # fmt: skip
    if not form:
        raise _problem("params.split", "it says which weights are several matrices", got=repr(split), expected=wanted)


_NOT_FOR_MUON = ("embed", "lm_head")
"""Parts of the names of embeddings and output layers. Muon is only for matrices of hidden layers."""


def groups_for_muon(
    parameters: Any, model: nn.Module, split: Mapping[str, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Parameters, or groups of them, as groups with the entry `use_muon`.

    A parameter's attribute `use_muon` decides. Without it, tensors of two or more dimensions are for Muon, except
    weights of embeddings and parameters whose names contain "embed" or "lm_head". Tensors of three dimensions are
    stacks of matrices (packed experts), except weights of convolutions.

    Args:
        split: which weights are several matrices: for a part of the dotted name, "rows" (equal parts below each other,
            or their sizes) and "columns" (equal parts beside each other).

    Raises:
        DsxConfigError: a key of `split` is no part of the name of a parameter for Muon.
    """
    one_matrix = {id(p) for m in model.modules() if isinstance(m, _CONVOLUTIONS) for p in m.parameters(recurse=False)}
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    parts: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts.setdefault(id(parameter), set()).update(name.split("."))
        if any(word in name.lower() for word in _NOT_FOR_MUON):
            embedded.add(id(parameter))
    split, used = split or {}, set[str]()

    def settings(parameter: torch.Tensor) -> dict[str, Any]:
        said = getattr(parameter, "use_muon", None)
        if not (parameter.dim() >= 2 and id(parameter) not in embedded if said is None else bool(said)):
            return {"use_muon": False}
        found: dict[str, Any] = {"use_muon": True}
        if parameter.dim() == 3:
            found["stacked"] = id(parameter) not in one_matrix
        for key in split.keys() & parts.get(id(parameter), ()):
            used.add(key)
            found |= {f"split_{side}": value for side, value in split[key].items()}
        return found

    groups: list[dict[str, Any]] = []
    listed = list(parameters)
    for group in listed if listed and isinstance(listed[0], dict) else [{"params": listed}]:
        if "use_muon" in group:
            groups.append(group)
            continue
        params = group["params"]
        by_settings: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {}
        for parameter in [params] if isinstance(params, torch.Tensor) else params:
            own = settings(parameter)
            by_settings.setdefault(repr(own), (own, []))[1].append(parameter)
        for own, members in sorted(by_settings.values(), key=lambda pair: not pair[0]["use_muon"]):
            groups.append({**group, **own, "params": members})
    if unused := split.keys() - used:
        raise _problem(
            "params.split", "no parameter for Muon has this part in its name", got=", ".join(sorted(unused)),
            expected='a part between the dots, such as "qkv_proj" of "layers.0.attention.qkv_proj.weight"',
        )  # fmt: skip
    return groups


_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)


def _mup(type_name: str, name: str, arguments: dict[str, Any], wide: str) -> OptimizerChoice:
    """An optimizer of the package mup, which scales learning rates by width (`mup.set_base_shapes` comes first)."""
    if wide:
        raise _narrow(type_name, f"torch's, which {name} makes, keeps", wide)
    try:
        import mup  # lazy import: an optional package  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _problem(
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
        raise _problem("type", f'optimizer "{type_name}" needs dsx-ops: {missing}', fix=in_checkout("dsx-ops"))
    return _from_ops(type_name, cls, {key: value for key, value in arguments.items() if key != "set_grad_none"}, wide)


def _drop_upstreams(arguments: dict[str, Any]) -> None:
    """Remove arguments of DeepSpeed's Adagrad that torch's does not have: a variant that DeepSpeed itself refuses, and
    one that is always true with master weights.
    """
    if arguments.pop("amsgrad", False):
        raise _problem("params.amsgrad", "Adagrad has no such variant", got="true", fix="leave it out")
    for name in ("fp32_optimizer_states", "set_grad_none"):
        arguments.pop(name, None)


def _one_bit(type_name: str, cls: Any, arguments: dict[str, Any]) -> OptimizerChoice:
    """An optimizer of dsx_comm that averages in one bit."""
    import dsx_comm  # lazy import, as every sibling

    _check_arguments(cls, arguments, type_name)

    def build(parameters: Any, *, process_group: Any = None) -> torch.optim.Optimizer:
        return cls(parameters, process_group=process_group, **arguments)

    kernels = dsx_comm.codec_status(accelerator_kind() or "cpu")
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
            raise _problem(
                f"params.{name}", f"{type_name} does not take this", got=name, expected=", ".join(sorted(accepted))
            )
    return accepted


def _unknown(type_name: str, classes: Iterable[type]) -> DsxConfigError:
    # Lazy import: only an error message needs it.
    from dsx_core import nearest

    known = sorted({"Adam", "AdamW", "Lamb", "Lion", "Adagrad", "SGD", *(cls.__name__ for cls in classes)})
    near = nearest(type_name, known)
    return _problem(
        "type",
        f'optimizer "{type_name}" is unknown',
        got=type_name,
        expected=", ".join(known),
        fix=f"did you mean {' or '.join(near)}?" if near else "",
    )


def _problem(
    path: str, message: str, *, kind: str = "value", got: str = "", expected: str = "", fix: str = ""
) -> DsxConfigError:
    return DsxConfigError([Problem(kind, f"optimizer.{path}", message, got=got, expected=expected, fix=fix)])
