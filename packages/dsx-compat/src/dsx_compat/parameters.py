"""`param.ds_shape`, `ds_numel`, `ds_status`, `ds_id`, `ds_tensor` ..., and `module._z3_leaf`: computed when read.

DeepSpeed stores them on the tensors; dsx stores nothing on tensors. So they are
descriptors of `torch.Tensor` that ask `dsx_zero.partition_of`. A tensor that stage 3 does not manage does not have
them: `hasattr` is False, as programs expect that ask it to tell partitioned parameters from others.

Left out: methods that move partitions (`param.all_gather()`, `param.partition()`): use `zero.GatheredParameters`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from .errors import ShardValueError
from .values import ZeroParamStatus, ZeroParamType

__all__ = ["attach", "is_zero_param"]


class _ComputedAttribute:
    """An attribute that parameters managed by stage 3 have. A value that a program assigns is stored on the tensor.

    `__set__` and `__delete__` only do what Python does without them. They are defined because `torch.overrides`, which
    torch.compile uses, expects every descriptor on `torch.Tensor` to have them.
    """

    def __init__(self, name: str, compute: Callable[[Any], Any]) -> None:
        self.name, self.compute = name, compute

    def __get__(self, parameter: torch.Tensor | None, owner: type | None = None) -> Any:
        if parameter is None:
            return self
        if self.name in vars(parameter):
            return vars(parameter)[self.name]
        zero = sys.modules.get("dsx_zero")  # before its import no parameter is managed
        partition = None if zero is None else zero.partition_of(parameter)
        if partition is None:
            raise AttributeError(f"{type(parameter).__name__!r} object has no attribute {self.name!r}")
        return self.compute(partition)

    def __set__(self, parameter: torch.Tensor, value: Any) -> None:
        vars(parameter)[self.name] = value

    def __delete__(self, parameter: torch.Tensor) -> None:
        if self.name not in vars(parameter):
            raise AttributeError(f"{type(parameter).__name__!r} object has no attribute {self.name!r}")
        del vars(parameter)[self.name]


class _LocalShard(torch.Tensor):
    """`param.ds_tensor`: the part of a parameter that this rank has, as a view.

    To assign to `data` writes the values into that part. In an ordinary tensor it would give this view other memory,
    and the parameter would keep its values.
    """

    # results of operators are ordinary tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _partition: Any

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach().as_subclass(torch.Tensor)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if not isinstance(values, torch.Tensor) or values.shape != self.shape or values.dtype != self.dtype:
            got = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
            raise ShardValueError(
                f"ds_tensor.data: got {got}, expected {self.dtype} {tuple(self.shape)}, the part of this rank; for"
                " whole values use deepspeed.zero.GatheredParameters(parameter, modifier_rank=0)"
            )
        if self._partition.local_shard.data_ptr() != self.data_ptr():  # each look has memory of its own: a copy
            raise ShardValueError(
                "ds_tensor.data: got values for a part that is not in memory or has moved, expected one in memory; use"
                " deepspeed.utils.safe_set_local_fp32_param(parameter, values)"
            )
        with torch.no_grad():
            self.copy_(values)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.data, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.data.__reduce_ex__(protocol)


def _local_shard(partition: Any) -> torch.Tensor:
    found = partition.local_shard.as_subclass(_LocalShard)
    found._partition = partition
    return found


def _convert_to_zero_parameters(partition: Any, param_list: Iterable[Any]) -> None:
    """Hand over parameters that were attached to a model after `zero.Init` (adapters). dsx divides them when the engine
    is built, with all other parameters of the model, so that nothing is left to do before.

    Raises:
        EngineArgumentError: the engine is built already, or something else than parameters is given.
    """
    from dsx.engine.errors import EngineArgumentError  # lazy import: this module is loaded before anything of dsx

    given = list(param_list)
    if wrong := [type(p).__name__ for p in given if not isinstance(p, torch.nn.Parameter)]:
        raise EngineArgumentError(f"convert_to_zero_parameters: got {wrong[0]}, expected parameters")
    if partition.sharded and any(not is_zero_param(p) for p in given):
        raise EngineArgumentError(
            f"convert_to_zero_parameters: the engine of parameter '{partition.name}' is built already, and new"
            " parameters would not be divided or trained; attach modules before deepspeed.initialize, or call it again"
        )


_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "ds_id": lambda partition: partition.key,
    "ds_numel": lambda partition: partition.numel,
    "ds_shape": lambda partition: partition.shape,
    "ds_tensor": _local_shard,
    "ds_status": lambda partition: ZeroParamStatus.AVAILABLE if partition.gathered else ZeroParamStatus.NOT_AVAILABLE,
    "ds_param_type": lambda partition: ZeroParamType.PARTITIONED,
    "ds_persist": lambda partition: partition.gathered and partition.local_shard.numel() == partition.numel,
    "ds_active_sub_modules": lambda partition: set(),  # dsx counts uses per unit, not per parameter
    "convert_to_zero_parameters": lambda partition: partial(_convert_to_zero_parameters, partition),
    "is_external_param": lambda partition: False,  # no parameter stays gathered because a forward has returned it
    "partition_numel": lambda partition: partition.local_shard.numel,
}


class _LeafMark:
    """`module._z3_leaf`: whether the module is marked to be gathered as a whole at stage 3. To assign to it marks the
    module, as `set_z3_leaf_module` does.

    Every module has it, False without a mark: torch.compile reads all attributes of the class.
    """

    def __get__(self, module: torch.nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        zero = sys.modules.get("dsx_zero")  # before its import no module is marked
        return zero is not None and zero.z3_leaf_module(module)

    def __set__(self, module: torch.nn.Module, value: bool) -> None:
        from dsx_zero import set_z3_leaf_module  # lazy import: see `is_zero_param`

        set_z3_leaf_module(module, bool(value))

    def __delete__(self, module: torch.nn.Module) -> None:
        self.__set__(module, False)


def attach() -> None:
    """Add the attributes to `torch.Tensor` and `torch.nn.Module`. A second call changes nothing."""
    if not isinstance(vars(torch.nn.Module).get("_z3_leaf"), _LeafMark):
        torch.nn.Module._z3_leaf = _LeafMark()  # type: ignore[assignment]
    for name, compute in _ATTRIBUTES.items():
        if not isinstance(vars(torch.Tensor).get(name), _ComputedAttribute):
            setattr(torch.Tensor, name, _ComputedAttribute(name, compute))


def is_zero_param(parameter: Any) -> bool:
    """Whether stage 3 or `zero.Init` manages the tensor."""
    from dsx_zero import partition_of  # lazy import: the names of this module are read before anything is sharded

    return isinstance(parameter, torch.Tensor) and partition_of(parameter) is not None
