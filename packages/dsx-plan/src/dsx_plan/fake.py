"""Tensors without contents: a dispatch mode in which operators on large tensors give the right shapes and compute
nothing.

The idea: a model and its engine run as they are, on ordinary CPU tensors whose memory is asked for and never touched,
so that the operating system never provides it. What an operator would return is found on the meta device, once for each
kind of arguments. Small tensors are computed as ever: counts, hashes, flags, positions of tokens, by which programs
decide what to do next. A small result of large tensors (a loss, a norm) is zero. Comparisons are answered as if
all values were zero, and whether all of them are true with yes: programs ask so whether values are finite.
What is chosen by values that are not there (`topk`, `sort`, `argmax`) is spread evenly over what there is to choose, so
that experts get the same number of tokens, as a trained router gives them.

Why not `FakeTensorMode`: the engine compares addresses and storages of buffers, resizes them, and exchanges words with
other ranks in host memory; fake tensors have no address, and their words no values.

Left out: operators whose results' shapes depend on values are computed, whatever they cost; kernels that are not called
through PyTorch's dispatcher.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .shapes import call_key, map_tensors, result_on_meta, run_below

__all__ = ["FakeCompute", "OperatorWatch", "is_small"]

SMALL_WORDS = 1 << 20
"""Bytes of whole numbers up to which they are computed."""
SMALL_VALUES = 1 << 14
"""The same of floating-point numbers."""
SMALL_POSITIONS = 1 << 21
"""Elements up to which 64-bit numbers and flags are computed: routes of tokens to experts are sorted and counted."""

_VIEW, _IN_PLACE, _NEW, _REAL, _ITEM, _EMPTY = "view", "in place", "new", "real", "item", "empty"
_REAL_BY_NAME = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})
_EMPTY_BY_NAME = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_CHOOSERS = frozenset({"argmax", "argmin", "argsort", "max", "min", "multinomial", "sort", "topk"})
_VIEW_BY_NAME = frozenset({"_unsafe_view", "_reshape_alias", "detach", "lift_fresh", "alias"})


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are computed: by the size of its memory, since a part of something without contents has
    none either.
    """
    return tensor.untyped_storage().nbytes() <= _limit(tensor.dtype)


def _limit(dtype: torch.dtype) -> int:
    """Bytes of a type up to which values are computed."""
    if dtype.is_floating_point or dtype.is_complex:
        return SMALL_VALUES
    return SMALL_POSITIONS * dtype.itemsize if dtype in (torch.int64, torch.bool) else SMALL_WORDS


class OperatorWatch(Protocol):
    """Hears of every operator."""

    def ran(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, *, view: bool) -> None:
        """An operator ran, or would have. `view`: its result shares its argument's memory."""
        ...

    def made(self, tensor: torch.Tensor, func: Any, args: Sequence[Any]) -> torch.Tensor:
        """Memory was asked for. Returns the tensor that takes the result's place: usually itself."""
        ...


class FakeCompute(TorchDispatchMode):
    """A dispatch mode in which operators on large tensors give the right shapes and compute nothing.

    `watch` hears of everything.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by the base class; nothing is compiled under this mode."""
        return False

    def __init__(self, watch: OperatorWatch) -> None:
        super().__init__()
        self._watch = watch
        self._kinds: dict[int, str] = {}
        self._seen: list[Any] = []  # operators, so that their ids stay theirs
        self._results: dict[Any, Any] = {}
        self.computed: dict[str, int] = {}
        """Operators on large tensors that had to be computed, with how often."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(cls.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for cls in types):
            return NotImplemented  # a wrapper answers itself; what it does inside comes here again
        kwargs = kwargs or {}
        kind = self._kinds.get(id(func))
        if kind is None:
            kind = self._kinds[id(func)] = _kind_of(func)
            self._seen.append(func)
        if _on_no_device(args, kwargs):
            return run_below(func, args, kwargs)
        if kind is _VIEW:
            result = run_below(func, args, kwargs)
            self._watch.ran(func, args, kwargs, result, view=True)
            return result
        if kind is _ITEM and not is_small(args[0]):
            return _nothing(args[0].dtype)
        if kind in (_REAL, _ITEM):
            return self._compute(func, args, kwargs)
        small = kind is not _EMPTY and not _any_large(args, kwargs)
        if small and (kind is _IN_PLACE or not self._makes_large(func, args, kwargs)):
            return self._compute(func, args, kwargs)
        if kind is _EMPTY:
            result = self._empty(func, args, kwargs)
            result = self._watch.made(result.zero_() if is_small(result) else result, func, args)
        elif kind is _IN_PLACE:
            result = _written(func, args, kwargs)
        else:
            found = self._shape(func, args, kwargs)
            if found is None:
                name = func._overloadpacket._qualified_op_name
                self.computed[name] = self.computed.get(name, 0) + 1
                return self._compute(func, args, kwargs)
            chooses = func._overloadpacket.__name__ in _CHOOSERS and _chooses_of_many(found, args)
            result = self._choices(found, func, args, kwargs) if chooses else self._make(found, func, args)
            answer = _answer_about_zeros(func, args, kwargs)
            if answer is not None and is_small(result):
                result.fill_(answer)
        self._watch.ran(func, args, kwargs, result, view=False)
        return result

    def _empty(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return run_below(func, args, kwargs)
        except RuntimeError:
            found = self._shape(func, args, kwargs)  # more than the system gives in one piece, or a mistake
            if not isinstance(found, tuple):
                raise
            return without_memory(*found)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = run_below(func, args, kwargs)
        result = map_tensors(result, lambda tensor: self._watch.made(tensor, func, args))
        self._watch.ran(func, args, kwargs, result, view=False)
        return result

    def _makes_large(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Do small arguments, or none, give something large (`zeros`, `expand` and a copy)?"""
        found = self._shape(func, args, kwargs)
        return found is not None and any(
            spec is not None and not _small_spec(spec) for spec in (found if isinstance(found, list) else [found])
        )

    # - shapes of results

    def _shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """(size, stride, dtype) of the result, a list of such for several, None where the meta device cannot say."""
        key = call_key((id(func), args, tuple(kwargs.items())))
        if key is not None and key in self._results:
            return self._results[key]
        found = result_on_meta(func, args, kwargs)
        if key is not None:
            self._results[key] = found
        return found

    def _make(self, found: Any, func: Any, args: Any) -> Any:
        if not isinstance(found, list):
            return self._one(found, func, args)
        made = [None if spec is None else self._one(spec, func, args) for spec in found]
        return made if len(func._schema.returns) == 1 else tuple(made)

    def _choices(self, found: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """The results of an operator that chooses: its positions, which come last, are known, and its values are one: a
        router divides them by their sum.
        """
        *values, (size, _, _) = found if isinstance(found, list) else [found]
        arguments = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
        dim = -1 if func._overloadpacket.__name__ == "multinomial" else arguments.get("dim", -1)
        keeps = arguments["self"].dim() == len(size)
        made = [self._one(spec, func, args) for spec in values]
        made = [value.fill_(1) if is_small(value) else value for value in made]
        made.append(self._watch.made(_spread(size, arguments["self"].shape[dim], dim if keeps else None), func, args))
        return tuple(made) if isinstance(found, list) else made[0]

    def _one(self, spec: Any, func: Any, args: Any) -> Any:
        if not isinstance(spec, tuple):
            return spec  # a number
        size, stride, dtype = spec
        tensor = without_memory(size, stride, dtype)
        if is_small(tensor):
            tensor.zero_()
        return self._watch.made(tensor, func, args)


def _chooses_of_many(found: Any, args: Any) -> bool:
    """Whether positions in a tensor with dimensions are among the results, as `max()` of all values has none."""
    last = found[-1] if isinstance(found, list) else found
    return isinstance(last, tuple) and last[2] == torch.int64 and args[0].dim() > 0 and bool(last[0])


def _spread(size: Sequence[int], options: int, dim: int | None) -> torch.Tensor:
    """int64 of a size: the j-th choice of the t-th row is (t + j) modulo `options`. `dim`: of the choices; None: each
    row has one.

    Rows overlap in memory, so that the positions of long rows (a sort by all experts) are known, too.
    """
    rows, choices = list(size), 1
    if dim is not None:
        choices = rows.pop(dim)
    strides, count = [], 1
    for extent in reversed(rows):
        strides.insert(0, count)
        count *= extent
    line = torch.arange(count + choices, dtype=torch.int64) % options
    spread = line.as_strided((*rows, choices), (*strides, 1))
    return spread.squeeze(-1) if dim is None else spread.movedim(-1, dim)


def without_memory(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory is not touched. It may be larger than this machine's memory.

    Raises:
        RuntimeError: the system refuses even that; `vm.overcommit_memory` is 2, or `ulimit -v` is too low.
    """
    try:
        return torch.empty_strided(size, stride, dtype=dtype)
    except RuntimeError:
        # The system refuses memory that it can never provide, unless it is told that none need be kept for it.
        most = 1 + sum((extent - 1) * step for extent, step in zip(size, stride))
        try:
            memory = mmap.mmap(-1, most * dtype.itemsize, flags=_UNKEPT)
        except (OSError, ValueError, OverflowError):
            memory = None
        if memory is None:
            raise
        return torch.frombuffer(memory, dtype=dtype).as_strided(size, stride)


_UNKEPT = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) | getattr(mmap, "MAP_NORESERVE", 0x4000)
"""The number of MAP_NORESERVE on Linux, which has a name in Python since 3.13."""


def _nothing(dtype: torch.dtype) -> bool | int | float | complex:
    """The number that a tensor without contents gives."""
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return 0j
    return 0.0 if dtype.is_floating_point else 0


def _answer_about_zeros(func: Any, args: Any, kwargs: Any) -> bool | None:
    """The result of an operator that compares if all values are zero; None for other operators."""
    name = func._overloadpacket.__name__
    if name == "all":
        return True
    if name not in _COMPARISONS:
        return None
    return bool(run_below(func, map_tensors(args, lambda tensor: torch.zeros((), dtype=tensor.dtype)), kwargs))


def _small_spec(spec: Any) -> bool:
    if not isinstance(spec, tuple):
        return True
    numel = 1
    for extent in spec[0]:
        numel *= extent
    return numel * spec[2].itemsize <= _limit(spec[2])


def _kind_of(func: Any) -> str:
    name = func._overloadpacket.__name__
    if func.namespace == "aten":
        if name in _VIEW_BY_NAME:
            return _VIEW
        if name in _REAL_BY_NAME:
            return _REAL
        if name == "_local_scalar_dense":
            return _ITEM
        if name in _EMPTY_BY_NAME:
            return _EMPTY
    if torch.Tag.inplace_view in func.tags:
        return _VIEW
    returns = func._schema.returns
    aliases = [r.alias_info for r in returns]
    if returns and any(a is not None and not a.is_write for a in aliases):
        return _VIEW
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    if writes and all(a is not None and a.is_write for a in aliases):
        return _IN_PLACE
    dynamic = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    if dynamic and name not in ("index", "equal"):
        return _REAL
    return _NEW


def _on_no_device(args: Any, kwargs: Any) -> bool:
    """Is it the program itself that asks the meta device?"""
    first = args[0] if args else None
    if isinstance(first, torch.Tensor):
        return first.is_meta
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _any_large(args: Any, kwargs: Any) -> bool:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            if not is_small(value):
                return True
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, torch.Tensor) and not is_small(item):
                    return True
    return False


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an in-place operator: the arguments that it writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) and not argument.kwarg_only else kwargs.get(argument.name))
    count = len(func._schema.returns)
    if count == 0:
        return None
    return found[0] if count == 1 else tuple(found[:count])
