"""Backward enters a unit through what its forward left on modules or returned inside an iterator; each module is
looked at once per forward.
"""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks
from torch import nn

WHOLE = {"stage3_param_persistence_threshold": 0}


@dataclass(frozen=True)
class Wrapped:
    """An output that holds an iterator."""

    items: Any


class Items:
    """An iterator of the user's own class."""

    def __init__(self, items):
        self.items = iter(items)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.items)


WAYS = {
    "list_iterator": lambda items: iter(items),
    "generator": lambda items: (item for item in items),
    "map": lambda items: map(torch.tanh, items),
    "zip": lambda items: zip(items, [1, 2]),
    "in a dict": lambda items: {"items": iter(items)},
    "in a tuple": lambda items: (1, [iter(items)]),
    "in a frozen dataclass": lambda items: Wrapped(iter(items)),
    "of a class": Items,
    "nested": lambda items: iter([iter(items)]),
}


def flat(value):
    """The tensors in an output, iterators used up."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Wrapped):
        return flat(value.items)
    if isinstance(value, dict):
        return flat(list(value.values()))
    return [tensor for item in value for tensor in flat(item)] if hasattr(value, "__iter__") else []


class Block(nn.Module):
    """Returns two tensors in an iterator of some kind."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return WAYS[self.way]([torch.tanh(self.first(x)), torch.tanh(self.second(x))])


class Iterating(nn.Module):
    """Blocks whose outputs are taken out of iterators, the last one's by the caller."""

    def __init__(self, way):
        super().__init__()
        self.blocks = nn.ModuleList(Block(way) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        x = sum(flat(self.blocks[0](x * self.scale)))
        return self.blocks[1](x)


class Lazy(nn.Module):
    """A generator function as forward: its body runs while the caller takes the items."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            yield x


class UsesLazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Lazy(), Lazy()])

    def forward(self, x):
        for block in self.blocks:
            x = sum(block(x))
        return x


class Leaving(nn.Module):
    """A block that leaves its auxiliary loss on a module inside of it."""

    def __init__(self):
        super().__init__()
        self.gate, self.layer = nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 6)

    def forward(self, x):
        scores = torch.tanh(self.gate(x))
        self.gate.losses = [scores.square().mean()]
        self.extra = (self.layer(scores).mean(), None)
        return torch.tanh(self.layer(x))


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Leaving() for _ in range(2))
        self.head = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x * self.scale)
        self.penalty = self.head(x).square().mean()
        return self.head(x)

    def left(self):
        return self.penalty + sum(b.gate.losses[0] + b.extra[0] for b in self.blocks)


def whole_loss(model, x):
    return sum(tensor.square().mean() for tensor in flat(model(x)))


def left_only(model, x):
    """Backward through what the modules hold, the output is not used."""
    model(x)
    return model.left()


def left_and_output(model, x):
    return model(x).square().mean() + model.left()


def compare(rank, world, make, loss):
    import dsx_zero

    torch.manual_seed(0)
    oracle = make()
    model = copy.deepcopy(oracle)
    model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), stage=3, config=WHOLE)
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(step))
        for net, steps in ((model, optimizer), (oracle, plain)):
            loss(net, x).backward()
            steps.step()
            steps.zero_grad()
    got = {name: p.full_tensor() for name, p in model.named_parameters()}
    assert_close_named(got, {n: p.detach() for n, p in oracle.named_parameters()}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", list(WAYS))
def test_outputs_in_iterators_are_found(way):
    run_ranks(compare, 2, lambda: Iterating(way), whole_loss)


def test_a_generator_function_as_forward():
    run_ranks(compare, 2, UsesLazy, whole_loss)


@pytest.mark.parametrize("loss", [left_only, left_and_output])
def test_auxiliary_losses_on_modules_are_found(loss):
    run_ranks(compare, 2, Auxiliary, loss)


def test_watched_generators_can_be_sent_to_and_closed():
    from dsx_zero.gather.iterators import watch_iterators

    seen, log = [], []

    def body():
        try:
            got = yield 1
            log.append(got)
            try:
                yield 2
            except KeyError:
                yield 3
        finally:
            log.append("closed")

    watched = watch_iterators([body(), "text"], seen.append)[0]
    assert next(watched) == 1 and watched.send("sent") == 2 and watched.throw(KeyError()) == 3
    watched.close()
    assert seen == [1, 2, 3] and log == ["sent", "closed"]
    same = {"a": [1, (2, 3)], "b": Wrapped(4)}
    assert watch_iterators(same, seen.append) is same and len(seen) == 3


class Counted(nn.Linear):
    """Counts how often its attributes are listed."""

    looks = 0

    def __getattribute__(self, name):
        if name == "__dict__":
            Counted.looks += 1
        return super().__getattribute__(name)


def looks(rank, world):
    """How often the hooks of one forward looked at the modules of a model with blocks."""
    import dsx_zero

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(Counted(4, 4), nn.Sequential(Counted(4, 4))) for _ in range(3))
            self.scale = nn.Parameter(torch.ones(4))  # the root has a unit, too

        def forward(self, x):
            x = x * self.scale
            for block in self.blocks:
                x = block(x)
            return x

    model, _ = dsx_zero.shard(Nested(), lambda p: torch.optim.SGD(p, lr=0.1), stage=3, config=WHOLE)
    found = {}
    for mode in (torch.no_grad, torch.enable_grad):
        before = Counted.looks
        with mode():
            model(torch.ones(1, 4))
        found[mode.__name__] = Counted.looks - before
    return found


def test_each_module_is_looked_at_once():
    for found in run_ranks(looks, 2):
        assert found["enable_grad"] - found["no_grad"] == 6
