"""`fp16.auto_cast` casts the floating tensors of a batch, and hands the model a batch of the same kind."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import dsx
import pytest
import torch
from torch import nn


class Encoding(UserDict):
    """Items are attributes too, as in the batches of tokenizers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Point(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor


class Sealed(Mapping):
    """A mapping that cannot be made from a dict."""

    def __init__(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        self._held = {"x": x, "ids": ids}

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._held[key]

    def __iter__(self):
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class Reads(nn.Module):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen: Any = None

    def forward(self, batch: Any) -> torch.Tensor:
        self.seen = batch
        return self.weight.sum()


@pytest.fixture(scope="module")
def engine():
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "auto_cast": True},
        "optimizer": {"type": "SGD"},
    }
    made = dsx.initialize(model=Reads(), config=config)[0]
    yield made
    made.destroy()


def pair() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 3), "ids": torch.tensor([1, 2])}


def items_of(batch: Any) -> list[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    return list(batch._asdict().items()) if hasattr(batch, "_asdict") else list(enumerate(batch))


BATCHES = {
    "dict": lambda: pair(),
    "ordered": lambda: OrderedDict(reversed(pair().items())),
    "encoding": lambda: Encoding(pair()),
    "named tuple": lambda: Point(**pair()),
    "tuple": lambda: tuple(pair().values()),
    "list": lambda: list(pair().values()),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_the_model_gets_a_batch_of_the_callers_kind(engine, kind):
    given = BATCHES[kind]()
    before = items_of(given)
    engine(given)
    seen = engine.module.seen
    assert type(seen) is type(given)
    assert [key for key, _ in items_of(seen)] == [key for key, _ in before]
    for (_, got), (_, sent), (_, kept) in zip(items_of(seen), before, items_of(given), strict=True):
        assert kept is sent  # the caller's batch is as it was
        if sent.is_floating_point():
            assert torch.equal(got, sent.to(torch.float16))
        else:
            assert got is sent
    if kind == "encoding":
        assert seen.x.dtype == torch.float16


def test_batches_inside_batches_are_cast_and_other_objects_passed_on(engine):
    class Other:
        x = torch.randn(2)

    other = Other()
    engine([Encoding({"points": (Point(**pair()), other)}), {"mask": torch.tensor([True])}, 3, "text", None])
    encoding, masks, *rest = engine.module.seen
    point, passed = encoding.points
    assert type(encoding) is Encoding and type(point) is Point
    assert (point.x.dtype, point.ids.dtype, masks["mask"].dtype) == (torch.float16, torch.int64, torch.bool)
    assert passed is other and other.x.dtype == torch.float32
    assert rest == [3, "text", None]


def test_a_mapping_that_cannot_be_rebuilt_reaches_the_model_as_a_dict(engine):
    engine(Sealed(**pair()))
    seen = engine.module.seen
    assert type(seen) is dict
    assert (seen["x"].dtype, seen["ids"].dtype) == (torch.float16, torch.int64)
