"""Attention modules of a sharded model, and the rows of their weights that make the queries and keys of each head.

The names of a module's projections say what it is: `q_proj` and `k_proj`, one fused `qkv_proj`, or the projections of
latent attention (MLA). Of each row a clip of logits has to know the head, and the power of the head's factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dsx_comm
import torch
from dsx_core.errors import first_few
from dsx_core.modules import runs_compiled
from torch import nn

from .errors import ZeroOptimizerError
from .optimizer import ZeroOptimizer

__all__ = ["AttentionLayer", "HeadRows", "columns_of", "found_layers", "is_compiled", "layers_on_stages", "trains"]

_PAIRS = (("q_proj", "k_proj"), ("wq", "wk"), ("query", "key"), ("to_q", "to_k"))
_FUSED = ("qkv_proj", "Wqkv", "qkv")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class HeadRows:
    """The rows of a parameter, each of which a clip multiplies by its head's factor to the power of its exponent.

    Attributes:
        name: of the parameter; heads, exponents: one per row.
    """

    name: str
    heads: torch.Tensor
    exponents: torch.Tensor


@dataclass(frozen=True)
class AttentionLayer:
    """An attention module. `shared`: so many heads, which follow each other, have one key."""

    name: str
    module: nn.Module
    heads: int
    shared: int
    rows: tuple[HeadRows, ...]


def found_layers(
    optimizer: ZeroOptimizer,
    alpha: float,
    heads: int | None,
    names: Iterable[str] | None,
    *,
    may_be_none: bool = False,
) -> Iterator[AttentionLayer]:
    """The attention modules with these names, or all of a model's. Raises ZeroOptimizerError: see `QKClip`."""
    modules = dict(optimizer.runtime.model.named_modules())
    wanted = None if names is None else list(names)
    if wanted is not None and (unknown := [name for name in wanted if name not in modules]):
        raise ZeroOptimizerError(
            f"layers: the model has no module {first_few(unknown)}; expected names of named_modules()"
        )
    held = frozenset(id(p) for members in optimizer.held.parts.groups.shown for p in members)
    number = 0
    for name in modules if wanted is None else wanted:
        parts = _Projections.of(optimizer, held, name, modules[name])
        if parts is None:
            if wanted is not None:
                raise ZeroOptimizerError(f"{name or 'the model'}: {_EXPECTED}")
            continue
        number += 1
        yield parts.layer(alpha, heads)
    if not number and not may_be_none:
        raise _no_attention()


def _no_attention() -> ZeroOptimizerError:
    """The error of a model without attention."""
    return ZeroOptimizerError(f"QKClip: found no attention in the model; {_EXPECTED}")


def layers_on_stages(
    find: Callable[..., Iterator[AttentionLayer]],
    optimizer: ZeroOptimizer,
    layers: Iterable[str] | None,
    stages: Any,
) -> list[AttentionLayer]:
    """The attention of this rank's stage (collective over `stages`).

    Args:
        find: `found_layers` with its first arguments.

    Raises:
        ZeroOptimizerError: on all stages alike, for what one of them refuses, and for names and attention that no stage
            has.
    """
    found = list[AttentionLayer]()
    wanted = None if layers is None else list(layers)

    def mine() -> tuple[list[str], int]:
        here = dict(optimizer.runtime.model.named_modules())
        known = [name for name in wanted or () if name in here]
        if known or wanted is None:
            found.extend(find(wanted if wanted is None else known, may_be_none=True))
        return known, len(found)

    told = dsx_comm.together(stages, kinds=(ZeroOptimizerError,)).run("looking for attention", mine)
    held = {name for known, _ in told for name in known}
    if missing := [name for name in wanted or () if name not in held]:
        raise ZeroOptimizerError(
            f"layers: no stage has a module {first_few(missing)}; expected names of named_modules()"
        )
    if not any(count for _, count in told):
        raise _no_attention()
    return found


def is_compiled(model: nn.Module, name: str) -> bool:
    """Is a module, or one around it, called as compiled code?"""
    module, around = model, [model]
    for part in name.split(".") if name else ():
        module = module.get_submodule(part)
        around.append(module)
    return any(runs_compiled(m) for m in around)


_EXPECTED = (
    f"expected a module with {', '.join(' and '.join(pair) for pair in _PAIRS)}, with {', '.join(_FUSED)} or"
    " in_proj_weight (rows of queries, then keys, then values), or with kv_b_proj and q_b_proj or q_proj"
)


@dataclass(frozen=True)
class _Projections:
    """The parameters of one attention module that make queries and keys.

    Attributes:
        held: the `id`s of the parameters in the optimizer's groups.
        kind: pair, fused or latent.
        query, key: beginnings of the parameters' names; key is empty where one parameter has both.
    """

    optimizer: ZeroOptimizer
    held: frozenset[int]
    name: str
    module: nn.Module
    kind: str
    query: str
    key: str

    @classmethod
    def of(cls, optimizer: ZeroOptimizer, held: frozenset[int], name: str, module: nn.Module) -> _Projections | None:
        dot = f"{name}." if name else ""
        has = dict(module.named_children())
        if "kv_b_proj" in has and (query := next((q for q in ("q_b_proj", "q_proj") if q in has), None)):
            return cls(optimizer, held, name, module, "latent", f"{dot}{query}.", f"{dot}kv_b_proj.")
        for query, key in _PAIRS:
            if query in has and key in has:
                return cls(optimizer, held, name, module, "pair", f"{dot}{query}.", f"{dot}{key}.")
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            return cls(optimizer, held, name, module, "fused", f"{dot}in_proj_", "")
        if fused := next((f for f in _FUSED if f in has), None):
            return cls(optimizer, held, name, module, "fused", f"{dot}{fused}.", "")
        return None

    def layer(self, alpha: float, heads: int | None) -> AttentionLayer:
        count = self._count(_HEADS, "heads") if heads is None else heads
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ZeroOptimizerError(f"heads: got {count!r}, expected the number of query heads of a layer")
        if heads is None and self._group(f"{self.query}weight").ranks.tensor_groups:
            raise ZeroOptimizerError(
                f"{self.name}: tensor parallelism gives this rank some of the heads; say how many: heads=..."
            )
        keys, queries_of, keys_of = getattr(self, f"_{self.kind}")(count, alpha)
        rows = [*self._rows(self.query, queries_of), *(self._rows(self.key, keys_of) if self.key else ())]
        return AttentionLayer(self.name, self.module, count, count // keys, tuple(rows))

    def _pair(self, heads: int, alpha: float) -> tuple[int, list[tuple[int, int, float]], list[tuple[int, int, float]]]:
        """Key heads, and for queries and keys stretches of rows: (rows, head, exponent)."""
        rows, key_rows = self._numel(self.query), self._numel(self.key)
        size = self._size(rows, heads)
        if key_rows % size or heads % (key_rows // size):
            raise ZeroOptimizerError(f"{self.name}: got {key_rows} rows of keys for {heads} heads of {size} rows")
        keys = key_rows // size
        return keys, [(size, head, alpha) for head in range(heads)], _keys(heads, keys, size, alpha)

    def _fused(
        self, heads: int, alpha: float
    ) -> tuple[int, list[tuple[int, int, float]], list[tuple[int, int, float]]]:
        keys = self._count(_KEY_HEADS, "") or heads
        rows = self._numel(self.query)
        if rows % (heads + 2 * keys) or heads % keys:
            raise ZeroOptimizerError(
                f"{self.name}: got {rows} fused rows, expected a multiple of {heads + 2 * keys} for {heads} heads of"
                f" queries and {keys} of keys and of values"
            )
        size = self._size(rows // (heads + 2 * keys) * heads, heads)
        queries = [(size, head, alpha) for head in range(heads)]
        return keys, [*queries, *_keys(heads, keys, size, alpha), (keys * size, 0, 0.0)], []

    def _latent(
        self, heads: int, alpha: float
    ) -> tuple[int, list[tuple[int, int, float]], list[tuple[int, int, float]]]:
        missing = [name for name in _LATENT if self._count((name,), "") is None]
        if missing:
            raise ZeroOptimizerError(f"{self.name}: latent attention without {', '.join(missing)}, which say its rows")
        plain, turned, values = (int(self._count((name,), "") or 0) for name in _LATENT)
        for prefix, size in ((self.query, plain + turned), (self.key, plain + values)):
            if self._numel(prefix) != heads * size:
                raise ZeroOptimizerError(
                    f"{prefix}weight: got {self._numel(prefix)} rows, expected {heads} heads of {size}"
                )
        queries = [one for head in range(heads) for one in ((plain, head, alpha), (turned, head, 1.0))]
        return heads, queries, [one for h in range(heads) for one in ((plain, h, 1 - alpha), (values, h, 0.0))]

    def _count(self, names: Sequence[str], wanted: str) -> int | None:
        """The first of these numbers that the module or its `config` has."""
        for holder in (self.module, getattr(self.module, "config", None)):
            for name in names:
                if isinstance(value := getattr(holder, name, None), int):
                    return value
        if wanted:
            raise ZeroOptimizerError(
                f"{self.name}: {type(self.module).__name__} does not say its {wanted}; say it: {wanted}=..., the number"
                " of query heads of a layer"
            )
        return None

    def _size(self, rows: int, heads: int) -> int:
        said = self._count(("head_dim",), "")
        if rows % heads or (said is not None and said * heads != rows):
            raise ZeroOptimizerError(
                f"{self.name}: got {rows} rows of queries, expected {heads} heads of {said or 'equal'} rows; heads is"
                " the number on this rank"
            )
        return rows // heads

    def _group(self, name: str) -> Any:
        optimizer = self.optimizer
        try:
            group = optimizer.layout.group_of(name)
        except KeyError:
            raise ZeroOptimizerError(
                f"{self.name}: {name} is no parameter of the sharded model, or one with another name (tied)"
            ) from None
        # At stage 3 the groups have what the model holds between uses.
        tensors = (group.parameters[group.layout.index(name)], optimizer.runtime.model.get_parameter(name))
        if not trains(optimizer, name) or not self.held.intersection(map(id, tensors)):
            raise ZeroOptimizerError(
                f"{name} does not train (it is frozen, or in no parameter group), so it cannot be clipped; leave"
                f" {self.name} out of layers"
            )
        return group

    def _numel(self, prefix: str) -> int:
        group = self._group(f"{prefix}weight")
        return group.layout.shapes[group.layout.index(f"{prefix}weight")][0]

    def _rows(self, prefix: str, stretches: Sequence[tuple[int, int, float]]) -> Iterator[HeadRows]:
        heads = torch.tensor([head for rows, head, _ in stretches for _ in range(rows)], device="cpu")
        powers = torch.tensor([p for rows, _, p in stretches for _ in range(rows)], device="cpu", dtype=torch.float32)
        for name in (f"{prefix}weight", f"{prefix}bias"):
            if name.endswith("weight") or name in dict(self.optimizer.runtime.model.named_parameters()):
                self._group(name)
                yield HeadRows(name, heads, powers)


def _keys(heads: int, keys: int, size: int, alpha: float) -> list[tuple[int, int, float]]:
    return [(size, key * (heads // keys), 1 - alpha) for key in range(keys)]


def trains(optimizer: ZeroOptimizer, name: str) -> bool:
    """Is a parameter of the sharded model not frozen now?"""
    group = optimizer.layout.group_of(name)
    return group.trainable and group.parameters[group.layout.index(name)].requires_grad


def columns_of(optimizer: ZeroOptimizer, name: str) -> int:
    """Elements of a row of a parameter; 1 for a vector."""
    layout = optimizer.layout.group_of(name).layout
    return math.prod(layout.shapes[layout.index(name)][1:])
