"""`leaf_module` and `stage3_module_granularity_threshold` choose the units of stage 3; results do not depend on
them.
"""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import assert_close_named, run_ranks
from torch import nn


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first_expert, self.second = Expert(), Expert()
        self.head = nn.Linear(4, 40)

    def forward(self, x):
        return self.head(self.second(self.first_expert(x)))


CHOICES = {
    "nothing": ({}, {"first_expert.parts.0", "second.parts.2", ""}),
    "class": ({"leaf_module": {"classes": ["Expert"]}}, {"first_expert", "second", ""}),
    "name": ({"leaf_module": {"names": ["second"]}}, {"second", "first_expert.parts.0", ""}),
    "suffix": ({"leaf_module": {"name_suffixes": ["_expert"]}}, {"first_expert", "second.parts.0", ""}),
    "granularity": ({"stage3_module_granularity_threshold": 20}, {"first_expert", "second", ""}),
    "too coarse": ({"stage3_module_granularity_threshold": 19}, {"first_expert.parts.0", "second.parts.2", ""}),
}


def check(rank, world):
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    reference = Model()
    torch.optim.SGD(reference.parameters(), lr=0.1)
    reference(x).square().mean().backward()
    expected = {n: (p - 0.1 * p.grad).detach() for n, p in reference.named_parameters()}
    for name, (config, units) in CHOICES.items():
        model, optimizer = dsx_zero.shard(
            Model(),
            lambda params: torch.optim.SGD(params, lr=0.1),
            stage=3,
            config={"stage3_param_persistence_threshold": 0, **config},
        )
        found = {unit.plan.module for unit in optimizer.runtime.units}
        assert units <= found, f"{name}: {found}"
        leaves = {module for module in units if module and "." not in module}
        assert not any(other.startswith(f"{leaf}.") for leaf in leaves for other in found), f"{name}: {found}"
        model(x).square().mean().backward()
        optimizer.step()
        assert_close_named(
            {n: p.full_tensor().detach() for n, p in model.named_parameters()}, expected, rtol=1e-5, atol=1e-6
        )


def test_choices_and_their_results():
    run_ranks(check, 2)


def test_a_choice_that_fits_nothing_is_named():
    with pytest.raises(dsx_zero.ZeroModelError, match="classes: 'Exprt'"):
        dsx_zero.shard(Model(), None, stage=3, config={"leaf_module": {"classes": ["Expert", "Exprt"]}})
