"""A parameter whose values are sharded over the ranks, as its user sees it between uses.

``PartitionedParameter`` is a wrapper tensor: shape, dtype, device and ``requires_grad`` are the logical ones, and it
holds no values. An operation on it does one of six things, depending on which operation it is:

1. facts (``shape``, ``numel()``, ``dtype``, ``hash`` ...) are answered by the wrapper;
2. factories (``zeros_like(p)``, ``p.new_empty(...)``) make plain tensors;
3. in-place writes (``p.normal_()``, ``p.mul_(2)``, ``p.data.copy_(x)``, ``nn.init.*``) change the whole tensor on all
   ranks together; each rank keeps its shard of rank 0's result;
4. an operation inside a running forward (a weight read from another module) gathers the unit for as long as that
   forward runs, if the source can do that; an operation without gradients while a model is built under ``Init`` gets a
   copy of the values;
5. conversions of the whole module (``model.to(...)``, ``model.half()``) convert this rank's shard, as long as the model
   is not sharded; those that change nothing return the parameter itself at any time. Views (``p.data[3]``) are
   wrappers, too, and pass writes to the parameter;
6. everything else, native access included (``data_ptr``, ``numpy``, pickling ...), raises ``PartitionedParameterError``
   with the parameter's name and the way to its values. It never returns an empty tensor.

The ``ParameterSource`` knows where the values are; this file moves no bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NoReturn

import torch

from ..errors import ZeroStateError
from ..torch_names import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map_only
from .conversions import CONVERSIONS, conversion_target
from .dtensors import GlobalTensor, global_of
from .partitioned_view import VIEWS, ViewSource, find_views
from .shard_view import ShardView
from .sources import ParameterSource
from .tensor_kinds import FACTORIES, FACTS, NOT_WRITES, is_write, stand_in
from .tensors import tensors_in


class PartitionedParameterError(ZeroStateError):
    """A partitioned parameter was used in a way that needs values which this rank does not have."""

    code = "DSX303"


_ALIASES: frozenset[Callable] = frozenset(
    {torch.Tensor.detach, torch.Tensor.detach_, torch.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
)
_NATIVE = frozenset({"data_ptr", "numpy", "__array__", "__dlpack__", "storage", "untyped_storage", "_typed_storage"})
"""Operations that give access to the memory itself. They cannot work on a copy."""

_GRAD = torch.Tensor.grad.__get__  # type: ignore[attr-defined]


class PartitionedParameter(torch.Tensor):
    """A parameter whose values are sharded over the ranks. ``shard(stage=3)`` and ``Init`` make it;
    ``isinstance(p, nn.Parameter)`` is True.
    """

    _is_param = True
    _source: ParameterSource

    @staticmethod
    def __new__(
        cls,
        source: ParameterSource,
        shape: torch.Size | tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        strides: tuple[int, ...] | None = None,
    ) -> PartitionedParameter:
        self = make_wrapper_subclass(cls, shape, strides, dtype=dtype, device=device, requires_grad=requires_grad)
        self._source = source
        return self

    def __init__(
        self,
        source: ParameterSource,
        shape: torch.Size | tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        """Everything is set in ``__new__``, as for all tensors."""

    @property
    def source(self) -> ParameterSource:
        """The object that has access to the values."""
        return self._source

    @property
    def local_shard(self) -> torch.Tensor:
        """This rank's elements, 1-D. No communication."""
        return self._source.local_shard()

    def full_tensor(self) -> torch.Tensor:
        """The whole parameter as a new plain tensor. Collective: every rank must call it."""
        whole, of = self._source.full_tensor(), self._global
        return whole if of is None else of.whole(whole)

    @property
    def _global(self) -> GlobalTensor | None:
        """The tensor that it is a part of, where it was a DTensor."""
        return global_of(self) or global_of(self._source.leaf())

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """The name and the logical facts, without values."""
        return (
            f"PartitionedParameter({self._source.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}', requires_grad={self.requires_grad})"
        )

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        """Before the model is sharded: another partitioned parameter, of which each rank copies its own part; an
        ordinary one while it is gathered.

        Raises:
            PartitionedParameterError: the model is sharded. All ranks would have to gather the whole parameter.
        """
        if id(self) in memo:
            return memo[id(self)]
        opened = self._source.borrow()
        source = self._source.converted(self.dtype, self.device) if opened is None else None
        copy: torch.Tensor
        if source is not None:
            copy = PartitionedParameter(
                source, self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad
            )
        elif opened is not None:
            copy = torch.nn.Parameter(opened.detach().clone(), requires_grad=self.requires_grad)
        else:
            self._refuse_deepcopy()
        vars(copy).update(deepcopy({k: v for k, v in vars(self).items() if k not in ("_source", "_is_param")}, memo))
        memo[id(self)] = copy
        return copy

    def _refuse_deepcopy(self) -> NoReturn:
        raise PartitionedParameterError(
            f"parameter '{self._source.name}' (shape {tuple(self.shape)}, {self.dtype}) is partitioned over the ranks"
            " and cannot be copied with deepcopy: this rank does not have its values. Copy the model before it is"
            " sharded, or on every rank inside `with dsx_zero.GatheredParameters(model.parameters()):`, which gives an"
            " ordinary model with whole parameters. For an EMA (torch's AveragedModel), a reference or a teacher there"
            " is optimizer.copy_of(), which stays sharded over the ranks."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises `PartitionedParameterError`: a pickle would have one rank's shard only."""
        raise self._refusal("pickled", code="DSX304")

    def _shard_view(self) -> ShardView:
        found = self._source.shard_view()
        if found is None:
            raise self._refusal("saved or loaded by torch.distributed.checkpoint before dsx_zero.shard")
        return found

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        """See `ShardView`."""
        return self._shard_view().__create_write_items__(fqn, value)

    def __create_chunk_list__(self) -> list[Any]:
        """See `ShardView`. Raises PartitionedParameterError where the shard is on disk."""
        view = self._shard_view()
        if not view.in_place:
            raise PartitionedParameterError(
                f"parameter '{self._source.name}' is kept on disk, and a checkpoint cannot be read into it in place;"
                " load into torch's get_model_state_dict(model), and then call set_model_state_dict(model, state)"
            )
        return view.__create_chunk_list__()

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """See `ShardView`."""
        return self._shard_view().__get_tensor_shard__(index)

    def _refusal(self, what: str, code: str = "") -> PartitionedParameterError:
        return PartitionedParameterError(
            f"parameter '{self._source.name}' (shape {tuple(self.shape)}, {self.dtype}) is partitioned over the ranks"
            f" and cannot be {what}: its values are not on this rank outside the use of its module. Read it with"
            " p.full_tensor() or inside `with dsx_zero.GatheredParameters([p]):` (on every rank), under"
            " torch.no_grad() where `Init` builds the model; change it inside `with dsx_zero.GatheredParameters([p],"
            " modifier_rank=0):`; save a model with dsx_zero.full_state_dict(optimizer), torch's"
            " get_model_state_dict(model), or engine.save_checkpoint.",
            code=code,
        )

    def _conversion_refusal(self, what: str) -> PartitionedParameterError:
        return PartitionedParameterError(
            f"parameter '{self._source.name}' ({self.dtype}, {self.device}) is partitioned over the ranks and cannot be"
            f" converted with {what}(): the optimizer of a sharded model works with its dtype and device, and outside"
            " of a forward no gradient would reach it. Convert the model before it is sharded; convert a copy of the"
            " values with p.full_tensor() (on every rank)."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do one of the six things that the module's text lists."""
        kwargs = kwargs or {}
        if func == _GRAD:
            return args[0]._source.gradient()
        if func in FACTS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in FACTORIES:
            args, kwargs = tree_map_only(cls, stand_in, (args, kwargs))
            return func(*args, **kwargs)
        if func in _ALIASES:
            return _alias(args[0])
        if func in CONVERSIONS:
            return _convert(func, args, kwargs)
        if func in VIEWS:
            return _view(func, args, kwargs)
        setter = _SETTERS.get(func)
        if setter is not None:
            return setter(*args)
        target = kwargs.get("out")
        if isinstance(target, cls):
            rest = {key: value for key, value in kwargs.items() if key != "out"}
            return _write(target, lambda whole: func(*args, **rest, out=whole))
        if is_write(func):
            written = _written(args, kwargs)
            if written is not None:
                return _write_with(written, func, args, kwargs)
        return _compute(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse operations that bypass ``__torch_function__``, except for ``detach``, which autograd calls."""
        if func is torch.ops.aten.detach.default:
            return _alias(args[0])
        raise _first(args, kwargs or {})._refusal(f"used by {func}")


def _first(args: Any, kwargs: Any) -> PartitionedParameter:
    found: list[PartitionedParameter] = []
    tree_map_only(PartitionedParameter, found.append, (args, kwargs))
    return found[0]


def _alias(param: PartitionedParameter) -> PartitionedParameter:
    """The result of ``p.data`` and ``p.detach()``: a wrapper over the same values, without a gradient."""
    with DisableTorchFunctionSubclass():
        return PartitionedParameter(
            param._source, param.shape, dtype=param.dtype, device=param.device, requires_grad=False
        )


def _written(args: Any, kwargs: Any) -> PartitionedParameter | None:
    """The tensor an in-place function changes: its first argument (``nn.init`` functions pass it as ``tensor``)."""
    target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    return target if isinstance(target, PartitionedParameter) else None


def _write(target: PartitionedParameter, edit: Callable[[torch.Tensor], object]) -> PartitionedParameter:
    if torch.is_grad_enabled() and target.requires_grad:
        # torch has the same rule for every leaf, and the same remedy.
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation (parameter "
            f"'{target._source.name}'): write under torch.no_grad() or through p.data"
        )
    with torch.no_grad():
        target._source.write(edit)
    return target


def _write_with(target: PartitionedParameter, func: Callable, args: Any, kwargs: Any) -> PartitionedParameter:
    """Apply ``func`` in place to the whole of ``target``. Other partitioned arguments are gathered first."""
    if getattr(func, "__module__", "") == "torch.nn.init":
        # These functions switch gradients off themselves.
        with torch.no_grad():
            return _write_with_whole(target, func, args, kwargs)
    return _write_with_whole(target, func, args, kwargs)


def _write_with_whole(target: PartitionedParameter, func: Callable, args: Any, kwargs: Any) -> PartitionedParameter:
    others: dict[int, torch.Tensor] = {}

    def collect(param: PartitionedParameter) -> None:
        if param._source is not target._source and id(param._source) not in others:
            others[id(param._source)] = param._source.full_tensor()

    tree_map_only(PartitionedParameter, collect, (args, kwargs))

    def edit(whole: torch.Tensor) -> None:
        def plain(param: PartitionedParameter) -> torch.Tensor:
            return whole if param._source is target._source else others[id(param._source)]

        whole_args, whole_kwargs = tree_map_only(PartitionedParameter, plain, (args, kwargs))
        func(*whole_args, **whole_kwargs)

    return _write(target, edit)


def _compute(func: Callable, args: Any, kwargs: Any) -> Any:
    """An operation that reads values. It works inside a forward, and while a model is built under ``Init``.

    Elsewhere it raises `PartitionedParameterError`.
    """
    what = getattr(func, "__name__", str(func))
    if what in NOT_WRITES:
        raise _first(args, kwargs)._refusal(f"treated with {what}()")
    borrowed: list[ParameterSource] = []
    copies: dict[int, PartitionedParameter] = {}

    def plain(partitioned: PartitionedParameter) -> torch.Tensor:
        tensor = partitioned._source.borrow()
        if tensor is not None:
            borrowed.append(partitioned._source)
            tensor = tensor if partitioned.requires_grad else tensor.detach()
            of = partitioned._global
            return tensor if of is None else of.shown(tensor)
        differentiable = torch.is_grad_enabled() and partitioned.requires_grad
        copy = None if differentiable or what in _NATIVE else partitioned._source.read()
        if copy is None:
            raise (
                partitioned._conversion_refusal(what)
                if func in CONVERSIONS
                else partitioned._refusal(f"used by {what}()")
            )
        copies[copy.untyped_storage().data_ptr()] = partitioned
        return copy

    plain_args, plain_kwargs = tree_map_only(PartitionedParameter, plain, (args, kwargs))
    output = func(*plain_args, **plain_kwargs)
    for source in borrowed:
        output = source.watch_output(output)
    for tensor in tensors_in(output) if copies else ():
        if (known := copies.get(tensor.untyped_storage().data_ptr())) is not None and tensor.numel():
            raise known._refusal(
                f"used by {what}(), whose result would share memory with a copy: writes to it would be lost"
            )
    return output


def _view(func: Callable, args: Any, kwargs: Any) -> Any:
    """A view of the parameter that passes writes to it; inside a forward a view of the gathered parameter."""
    param = args[0] if args else None
    if not isinstance(param, PartitionedParameter) or param._source.borrow() is not None:
        return _compute(func, args, kwargs)
    differentiable = torch.is_grad_enabled() and param.requires_grad
    found = None if differentiable else find_views(func, param, args[1:], kwargs)
    if found is None:
        return _compute(func, args, kwargs)
    parts = [
        PartitionedParameter(
            ViewSource(param._source, cut),
            made.shape,
            dtype=param.dtype,
            device=param.device,
            requires_grad=False,
            strides=made.stride(),
        )
        for made, cut in found[0]
    ]
    return parts if found[1] else parts[0]


def _convert(func: Callable, args: Any, kwargs: Any) -> Any:
    """Convert dtype or device: of this rank's shard, or, inside a forward, of the gathered parameter."""
    param = args[0]
    rest, options = tree_map_only(PartitionedParameter, stand_in, (tuple(args[1:]), kwargs))
    if func is torch.Tensor.type and not rest and "dtype" not in options:
        return stand_in(param).type()  # a question, not a conversion
    if not isinstance(param, PartitionedParameter):  # `x.to(p)` asks for p's dtype and device only
        return func(param, *rest, **options)
    dtype, device = conversion_target(func, rest, options, dtype=param.dtype, device=param.device)
    if (dtype, device) == (param.dtype, param.device) and not options.get("copy"):
        return param
    differentiable = torch.is_grad_enabled() and param.requires_grad
    source = None if differentiable else param._source.converted(dtype, device)
    if source is not None:
        return PartitionedParameter(source, param.shape, dtype=dtype, device=device, requires_grad=False)
    return _compute(func, args, kwargs)


def _set_data(param: PartitionedParameter, value: torch.Tensor) -> None:
    if isinstance(value, PartitionedParameter) and param._source.converted(param.dtype, param.device) is not None:
        # `model.to(...)` sets the result of a conversion so, before the model is sharded. The object stays the same.
        if value.shape != param.shape:
            raise param._refusal(f"given other data (got {tuple(value.shape)} {value.dtype})")
        with DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(param, _alias(value))  # type: ignore[attr-defined]
        param._source = value._source
        return
    if value.shape != param.shape or value.dtype != param.dtype:
        raise param._refusal(f"given other data (got {tuple(value.shape)} {value.dtype})")
    if isinstance(value, PartitionedParameter):
        if value._source is param._source:
            return
        value = value._source.full_tensor()
    with torch.no_grad():
        param._source.write(lambda whole: whole.copy_(value))


def _set_grad(param: PartitionedParameter, value: torch.Tensor | None = None) -> None:
    if not param._source.set_gradient(value):
        raise PartitionedParameterError(
            f"parameter '{param._source.name}' cannot be given a .grad: the model is not sharded yet; call"
            " dsx_zero.shard first"
        )


def _register_hook(param: PartitionedParameter, hook: Callable[[torch.Tensor], Any]) -> Any:
    return _leaf(param, "register_hook").register_hook(hook)


def _register_accumulate_hook(param: PartitionedParameter, hook: Callable[[torch.Tensor], Any]) -> Any:
    # The hook gets the partitioned parameter, because the plain one has no memory when its unit is freed. The
    # reference is weak, because Python's collector does not see the references of a tensor's hooks.
    known = weakref.ref(param)

    def call(plain: torch.Tensor) -> Any:
        face = known()
        return None if face is None else hook(face)

    return _leaf(param, "register_post_accumulate_grad_hook").register_post_accumulate_grad_hook(call)


def _leaf(param: PartitionedParameter, what: str) -> torch.Tensor:
    leaf = param._source.leaf()
    if leaf is None:
        raise PartitionedParameterError(
            f"parameter '{param._source.name}' cannot be treated with {what}(): the model is not sharded yet, and its"
            " gradients will arrive elsewhere; call dsx_zero.shard first"
        )
    return leaf


def _set_requires_grad(param: PartitionedParameter, value: bool = True) -> PartitionedParameter:
    reason = param._source.set_requires_grad(bool(value))
    if reason is not None:
        raise PartitionedParameterError(f"parameter '{param._source.name}' cannot be unfrozen: {reason}")
    with DisableTorchFunctionSubclass():
        torch.Tensor.requires_grad_(param, bool(value))
    return param


_SETTERS: dict[Any, Callable] = {
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.grad.__set__: _set_grad,  # type: ignore[attr-defined]
    torch.Tensor.grad.__delete__: _set_grad,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_: _set_requires_grad,
    torch.Tensor.register_hook: _register_hook,
    torch.Tensor.register_post_accumulate_grad_hook: _register_accumulate_hook,
}
