"""Takes over frozen weights in 8 or 4 bits: torchao's int8, int4 and NF4 weights, and bitsandbytes' NF4 (QLoRA).

    quantize_(model, Int8WeightOnlyConfig())
    model = get_peft_model(model, lora)
    model, optimizer = dsx_zero.shard(model, make_optimizer, stage=3)

Such a weight is a tensor of several inner tensors: codes, scales. Each of these becomes a frozen parameter of the same
module (`weight_qdata`, `weight_scale`). So codes are divided, kept and gathered as codes, and small scales stay whole,
as small parameters do (`stage3_param_persistence_threshold`). While the module's forward runs, it has its weight again,
over the gathered codes; between forwards a `CodedWeight` stands in its place, which has its facts.

Left out: weights that are trained (`from_hooks` has those with FSDP2's hooks); they are refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from .errors import ZeroModelError, ZeroStateError
from .params.dtensors import is_dtensor
from .params.gather_hooks import has_gather_hooks
from .params.inner_tensors import Form, is_composed, take_apart
from .params.partitioned import PartitionedParameter, PartitionedParameterError
from .params.shard_view import ShardView
from .showing import show_in_forwards, show_in_loads

__all__ = ["CodedWeight", "check_codes", "codes_of", "is_taken_apart"]

_APART = "dsx_taken_apart"
"""An attribute of weights whose inner tensors have taken their place."""


@dataclass(eq=False)
class _Inner:
    """The `ParameterSource` of a weight whose inner tensors are parameters of its module."""

    name: str
    module: nn.Module
    attribute: str
    form: Form

    def inner(self) -> dict[str, Any]:
        """The parameters, by their names in the module."""
        return {name: self.module._parameters[name] for name in self.form.names(self.attribute)}

    def _refuse(self, what: str) -> NoReturn:
        raise PartitionedParameterError(
            f"weight '{self.name}' ({self.form.kind}) consists of the parameters"
            f" {', '.join(self.form.names(self.attribute))} of its module and cannot be {what}: dsx_zero shards those."
            " Read it in a forward of its module, or with weight.full_tensor() on every rank; load new values with"
            " load_state_dict"
        )

    def local_shard(self) -> torch.Tensor:
        self._refuse("read as one shard")

    def full_tensor(self) -> torch.Tensor:
        found = {
            name: p.full_tensor() if isinstance(p, PartitionedParameter) else p.detach().clone()
            for name, p in self.inner().items()
        }
        return self.form.made_of(found, self.attribute)

    def shard_view(self) -> ShardView | None:
        return None

    def write(self, edit: Callable[[torch.Tensor], object]) -> None:
        self._refuse("written")

    def borrow(self) -> torch.Tensor | None:
        found = {}
        for name, parameter in self.inner().items():
            plain = parameter.source.borrow() if isinstance(parameter, PartitionedParameter) else parameter
            if plain is None:
                return None
            found[name] = plain.detach()
        return self.form.made_of(found, self.attribute)

    def read(self) -> torch.Tensor | None:
        return None

    def watch_output(self, output: Any) -> Any:
        for parameter in self.inner().values():
            if isinstance(parameter, PartitionedParameter):
                output = parameter.source.watch_output(output)
        return output

    def set_requires_grad(self, value: bool) -> str | None:
        return f"it is a frozen weight in the codes of a {self.form.kind}" if value else None

    def gradient(self) -> torch.Tensor | None:
        return None

    def set_gradient(self, value: torch.Tensor | None) -> bool:
        return value is None

    def leaf(self) -> torch.Tensor | None:
        return None

    def converted(self, dtype: torch.dtype, device: torch.device) -> None:
        return None


class CodedWeight(PartitionedParameter):
    """Stands in the place of a weight between the forwards of its module. It has the weight's facts; `full_tensor()`
    makes the weight itself, on every rank.
    """

    _source: _Inner

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        """The stand-in of the module's copy."""
        source = copy.deepcopy(self._source, memo)
        memo[id(self)] = made = _stand_in(source, dtype=self.dtype, device=self.device)
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"CodedWeight({self._source.name!r}, {self._source.form.kind}, shape={tuple(self.shape)})"

    def _refusal(self, what: str, code: str = "") -> PartitionedParameterError:
        try:
            self._source._refuse(what)
        except PartitionedParameterError as error:
            return error

    def _conversion_refusal(self, what: str) -> PartitionedParameterError:
        return self._refusal(f"converted with {what}()")


def _stand_in(source: _Inner, *, dtype: torch.dtype, device: torch.device) -> CodedWeight:
    return CodedWeight(source, source.form.size, dtype=dtype, device=device, requires_grad=False)


@dataclass(eq=False)
class _Weights:
    """Shows a module's own weights while its forward runs."""

    module: nn.Module
    stand_ins: dict[str, CodedWeight]
    running: list[dict[str, torch.Tensor]] = field(default_factory=list)

    what = "the inner tensors of its weights"

    def show(self) -> None:
        shown = {}
        for attribute, weight in self.stand_ins.items():
            if self.module.__dict__.get(attribute) is weight and (found := weight._source.borrow()) is not None:
                shown[attribute] = self.module.__dict__[attribute] = found
        self.running.append(shown)

    def withdraw(self) -> None:
        for attribute, weight in (self.running.pop() if self.running else {}).items():
            if self.module.__dict__.get(attribute) is weight:
                self.module.__dict__[attribute] = self.stand_ins[attribute]

    def to_load(self, values: dict[str, Any], prefix: str) -> None:
        for attribute, weight in self.stand_ins.items():
            if (value := values.pop(prefix + attribute, None)) is None:
                continue
            form, want = None, weight._source.form
            if isinstance(value, torch.Tensor) and is_composed(value):
                form, plain = take_apart(value, attribute)
            if form is None or form.kind != want.kind or form.names("") != want.names(""):
                raise ZeroStateError(
                    f"{prefix}{attribute}: got a {type(value).__name__}, expected a {want.kind} like the model's, or"
                    f" its inner tensors {', '.join(prefix + name for name in want.names(attribute))}"
                )
            values.update((prefix + name, inner) for name, inner in plain.items())


def check_codes(model: nn.Module) -> None:
    """Refuse weights of several inner tensors that cannot be taken over. Nothing is changed.

    Raises:
        ZeroModelError: such a weight is trained, or its inner tensors have names that its module uses.
    """
    for path, module, weights in _found(model):
        for attribute, weight in weights.items():
            _check(module, f"{path}.{attribute}" if path else attribute, attribute, weight)


def _found(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """The modules with weights of several inner tensors: name, module, weights by attribute."""
    for path, module in list(model.named_modules()):
        weights = {
            attribute: weight
            for attribute, weight in module._parameters.items()
            if is_composed(weight)
            and not (is_dtensor(weight) or isinstance(weight, PartitionedParameter))
            and not has_gather_hooks(weight)
        }
        if weights:
            yield path, module, weights


@contextmanager
def codes_of(model: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Replace a model's frozen weights of several inner tensors (`check_codes`) by these. An error inside the context
    puts them back.

    Args:
        device: where the inner tensors will be; None: where they are.
    """
    found = list(_found(model))
    before = {module: dict(module._parameters) for _, module, _ in found}
    made: dict[int, tuple[Form, list[nn.Parameter]]] = {}  # a tied weight is one
    handles: list[Any] = []
    try:
        for path, module, weights in found:
            handles += _replace(module, path, weights, made, device)
        yield
    except BaseException:
        for handle in handles:
            handle.remove()
        for _, module, weights in found:
            for attribute, weight in weights.items():
                module.__dict__.pop(attribute, None)
                vars(weight).pop(_APART, None)
            module._parameters.clear()
            module._parameters.update(before[module])
        raise


def _check(module: nn.Module, name: str, attribute: str, weight: Any) -> None:
    kind = type(weight).__name__
    if weight.requires_grad:
        raise ZeroModelError(
            f"{name}: is a {kind} that is trained, whose inner tensors no optimizer can step; freeze it"
            " (requires_grad_(False)) and train adapters, or convert the model without that form"
        )
    form, _ = take_apart(weight, attribute)
    for inner in form.names(attribute):
        if hasattr(module, inner):
            raise ZeroModelError(
                f"{name}: is a {kind}, whose inner tensor would become the parameter {inner!r} of its module, which has"
                " an attribute of this name; rename that"
            )


def _replace(
    module: nn.Module,
    path: str,
    weights: dict[str, Any],
    made: dict[int, tuple[Form, list[nn.Parameter]]],
    device: torch.device | None,
) -> Iterator[Any]:
    """Replace a module's own weights. Yields the handles that remove its hooks."""
    parameters: dict[str, Any] = {}
    stand_ins = {}
    for attribute, parameter in module._parameters.items():
        weight = weights.get(attribute)
        if weight is None:
            parameters[attribute] = parameter
            continue
        if id(weight) not in made:
            form, plain = take_apart(weight, attribute)
            made[id(weight)] = form, [nn.Parameter(value, requires_grad=False) for value in plain.values()]
            vars(weight)[_APART] = True
        form, inner = made[id(weight)]
        parameters.update(zip(form.names(attribute), inner, strict=True))
        source = _Inner(f"{path}.{attribute}" if path else attribute, module, attribute, form)
        stand_ins[attribute] = _stand_in(source, dtype=weight.dtype, device=device or weight.device)
    module._parameters.clear()
    module._parameters.update(parameters)
    module.__dict__.update(stand_ins)
    if getattr(module, "quant_state", None) is not None:  # of bitsandbytes: it would keep all scales whole
        module.quant_state = None
    shown = _Weights(module, stand_ins)
    yield from show_in_forwards(module, shown)
    yield show_in_loads(module, shown)


def is_taken_apart(parameter: torch.Tensor) -> bool:
    """Whether inner tensors have taken the place of this weight."""
    return _APART in vars(parameter)
