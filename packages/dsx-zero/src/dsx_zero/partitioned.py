"""A parameter whose values lie spread over the ranks, as its user sees it between uses.

``PartitionedParameter`` is a wrapper tensor: shape, dtype, device and ``requires_grad`` are the logical ones, and it holds
no values. What an operation on it does is one of five things, decided by looking the operation up:

1. facts (``shape``, ``numel()``, ``dtype``, ``hash`` ...) are answered;
2. factories (``zeros_like(p)``, ``p.new_empty(...)``) make plain tensors;
3. in-place writes (``p.normal_()``, ``p.mul_(2)``, ``p.data.copy_(x)``, ``nn.init.*``) are done on the whole tensor by all
   ranks together, rank 0's result is everybody's, and each rank keeps its shard;
4. an operation inside a running forward (a weight read from another module) gathers the unit for as long as that forward
   runs, if the source can do that;
5. everything else, native access included (``data_ptr``, ``numpy``, pickling ...), raises ``PartitionedParameterError``
   with the parameter's name and the way to its values. It never yields an empty tensor.

Where the values come from is the ``ParameterSource``'s affair; this file moves no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from .errors import ZeroStateError


class PartitionedParameterError(ZeroStateError):
    """The values of a partitioned parameter were asked for in a way that cannot give them."""


class ParameterSource(Protocol):
    """Where a partitioned parameter's values are. All methods but ``local_shard`` and ``borrow`` are collective."""

    @property
    def name(self) -> str:
        """The parameter's first name in the model (what errors call it)."""
        ...

    def local_shard(self) -> torch.Tensor:
        """This rank's elements, 1-D, in the parameter's dtype (empty if it has none)."""
        ...

    def full_tensor(self) -> torch.Tensor:
        """A new tensor with the whole parameter, the same on all ranks."""
        ...

    def write(self, edit: Callable[[torch.Tensor], object]) -> None:
        """Apply ``edit`` to the whole tensor on every rank; rank 0's result is kept by all."""
        ...

    def borrow(self) -> torch.Tensor | None:
        """The plain parameter for an operation inside the running forward; None if no forward runs."""
        ...

    def lend(self, output: Any) -> Any:
        """The result of an operation on a borrowed parameter, watched so that its backward finds the values again."""
        ...

    def set_requires_grad(self, value: bool) -> str | None:
        """Freeze the parameter or let it train; the reason, if that cannot be."""
        ...


def _getters(*names: str) -> set[Callable]:
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


def _methods(*names: str) -> set[Callable]:
    return {getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)}


_FACTS: frozenset[Callable] = frozenset(
    _getters(
        *("shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "grad_fn", "names", "itemsize"),
        *("nbytes", "is_cpu", "is_cuda", "is_xpu", "is_mps", "is_meta", "is_mkldnn", "is_sparse", "is_sparse_csr"),
        *(
            "is_quantized",
            "is_nested",
            "output_nr",
            "_version",
            "_backward_hooks",
            "grad",
            "is_ipu",
            "is_maia",
            "is_mtia",
        ),
        *("is_vulkan", "is_hpu", "_is_param", "_post_accumulate_grad_hooks", "retains_grad", "_base", "grad_dtype"),
    )
    | _methods(
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg", "is_same_size"),
        *("__hash__", "__len__", "_is_view", "dim_order", "is_distributed", "storage_offset"),
    )
    | {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_same_size, torch.is_signed, torch.is_inference}
)

_FACTORIES: frozenset[Callable] = frozenset(
    _methods("new", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")
    | {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like}
    | {torch.randint_like, torch.result_type, torch.promote_types, torch.can_cast}
)

_ALIASES: frozenset[Callable] = frozenset(_methods("detach", "detach_") | {torch.detach} | _getters("data"))

# In-place by name but no change of values; or of a kind that a shard cannot follow (metadata, storage).
_NOT_WRITES = frozenset(
    {"detach_", "requires_grad_", "resize_", "resize_as_", "rename_", "set_", "share_memory_", "squeeze_", "unsqueeze_"}
    | {"t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_", "retain_grad", "sparse_resize_", "apply_", "map_"}
)
_OPERATOR_WRITES = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"}
    | {"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
)


def _is_write(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    if name in _OPERATOR_WRITES:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITES


class PartitionedParameter(torch.Tensor):
    """See the module's text. Made by ``shard(stage=3)`` and ``Init``; ``isinstance(p, nn.Parameter)`` holds."""

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
    ) -> PartitionedParameter:
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
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
    ) -> None:
        """Everything is set in ``__new__``, as for all tensors."""

    @property
    def source(self) -> ParameterSource:
        """Where the values are."""
        return self._source

    @property
    def local_shard(self) -> torch.Tensor:
        """This rank's elements, 1-D (no communication)."""
        return self._source.local_shard()

    def full_tensor(self) -> torch.Tensor:
        """The whole parameter as a new plain tensor. Collective: every rank must call it."""
        return self._source.full_tensor()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Name and logical facts, no values."""
        return (
            f"PartitionedParameter({self._source.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}', requires_grad={self.requires_grad})"
        )

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        """Refused: the copy would need an owner of its own for every shard."""
        raise self._refusal("copied with deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a pickle would hold one rank's shard and no way back."""
        raise self._refusal("pickled")

    def _refusal(self, what: str) -> PartitionedParameterError:
        return PartitionedParameterError(
            f"parameter '{self._source.name}' (shape {tuple(self.shape)}, {self.dtype}) is partitioned over the ranks and "
            f"cannot be {what}: its values are not on this rank outside the use of its module. Read it with "
            "p.full_tensor() or inside `with dsx_zero.GatheredParameters([p]):` (on every rank); change it inside "
            "`with dsx_zero.GatheredParameters([p], modifier_rank=0):`; save a model with its checkpoint function."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The five ways of the module's text."""
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _FACTORIES:
            args, kwargs = tree_map_only(cls, _stand_in, (args, kwargs))
            return func(*args, **kwargs)
        if func in _ALIASES:
            return _alias(args[0])
        setter = _SETTERS.get(func)
        if setter is not None:
            return setter(*args)
        target = kwargs.get("out")
        if isinstance(target, cls):
            rest = {key: value for key, value in kwargs.items() if key != "out"}
            return _write(target, lambda whole: func(*args, **rest, out=whole))
        if _is_write(func):
            written = _written(args, kwargs)
            if written is not None:
                return _write_with(written, func, args, kwargs)
        return _compute(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What reached the dispatcher past the Python layer: refused by name (``detach`` is what autograd itself asks)."""
        if func is torch.ops.aten.detach.default:
            return _alias(args[0])
        raise _first(args, kwargs or {})._refusal(f"used by {func}")


def _first(args: Any, kwargs: Any) -> PartitionedParameter:
    found: list[PartitionedParameter] = []
    tree_map_only(PartitionedParameter, found.append, (args, kwargs))
    return found[0]


def _stand_in(param: PartitionedParameter) -> torch.Tensor:
    """A tensor with the logical facts that takes the memory of one element."""
    return torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape)


def _alias(param: PartitionedParameter) -> PartitionedParameter:
    """What ``p.data`` and ``p.detach()`` are: the same values (and writes), no gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        return PartitionedParameter(
            param._source, param.shape, dtype=param.dtype, device=param.device, requires_grad=False
        )


def _written(args: Any, kwargs: Any) -> PartitionedParameter | None:
    """The tensor an in-place function changes: its first argument (``nn.init`` functions pass it as ``tensor``)."""
    target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    return target if isinstance(target, PartitionedParameter) else None


def _write(target: PartitionedParameter, edit: Callable[[torch.Tensor], object]) -> PartitionedParameter:
    if torch.is_grad_enabled() and target.requires_grad:
        # The same rule as for any leaf, and the same cure.
        raise RuntimeError(
            f"a leaf Variable that requires grad is being used in an in-place operation (parameter "
            f"'{target._source.name}'): write under torch.no_grad() or through p.data"
        )
    with torch.no_grad():
        target._source.write(edit)
    return target


def _write_with(target: PartitionedParameter, func: Callable, args: Any, kwargs: Any) -> PartitionedParameter:
    """``func`` in place on the whole of ``target``; other partitioned arguments are gathered first."""
    if getattr(func, "__module__", "") == "torch.nn.init":
        # These switch gradients off themselves.
        with torch.no_grad():
            return _write_with_whole(target, func, args, kwargs)
    return _write_with_whole(target, func, args, kwargs)


def _write_with_whole(target: PartitionedParameter, func: Callable, args: Any, kwargs: Any) -> PartitionedParameter:
    others: dict[int, torch.Tensor] = {}

    def collect(param: PartitionedParameter) -> None:
        if param._source is not target._source and id(param._source) not in others:
            others[id(param._source)] = param.full_tensor()

    tree_map_only(PartitionedParameter, collect, (args, kwargs))

    def edit(whole: torch.Tensor) -> None:
        def plain(param: PartitionedParameter) -> torch.Tensor:
            return whole if param._source is target._source else others[id(param._source)]

        whole_args, whole_kwargs = tree_map_only(PartitionedParameter, plain, (args, kwargs))
        func(*whole_args, **whole_kwargs)

    return _write(target, edit)


def _compute(func: Callable, args: Any, kwargs: Any) -> Any:
    """An operation that reads values: possible inside a forward, refused by name elsewhere."""
    what = getattr(func, "__name__", str(func))
    if what in _NOT_WRITES or what in {"register_hook", "register_post_accumulate_grad_hook", "to", "cuda", "cpu"}:
        raise _first(args, kwargs)._refusal(f"treated with {what}()")
    borrowed: list[ParameterSource] = []

    def plain(partitioned: PartitionedParameter) -> torch.Tensor:
        tensor = partitioned._source.borrow()
        if tensor is None:
            raise partitioned._refusal(f"used by {what}()")
        borrowed.append(partitioned._source)
        return tensor if partitioned.requires_grad else tensor.detach()

    plain_args, plain_kwargs = tree_map_only(PartitionedParameter, plain, (args, kwargs))
    output = func(*plain_args, **plain_kwargs)
    for source in borrowed:
        output = source.lend(output)
    return output


def _set_data(param: PartitionedParameter, value: torch.Tensor) -> None:
    if value.shape != param.shape or value.dtype != param.dtype:
        raise param._refusal(f"given other data (got {tuple(value.shape)} {value.dtype})")
    if isinstance(value, PartitionedParameter):
        if value._source is param._source:
            return
        value = value.full_tensor()
    with torch.no_grad():
        param._source.write(lambda whole: whole.copy_(value))


def _set_grad(param: PartitionedParameter, value: torch.Tensor | None) -> None:
    if value is not None:
        raise param._refusal("given a .grad of its own (set_full_grad writes gradients)")


def _set_requires_grad(param: PartitionedParameter, value: bool = True) -> PartitionedParameter:
    reason = param._source.set_requires_grad(bool(value))
    if reason is not None:
        raise PartitionedParameterError(f"parameter '{param._source.name}' cannot be unfrozen: {reason}")
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.requires_grad_(param, bool(value))
    return param


_SETTERS: dict[Any, Callable] = {
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.grad.__set__: _set_grad,  # type: ignore[attr-defined]
    torch.Tensor.grad.__delete__: lambda param: None,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_: _set_requires_grad,
}
