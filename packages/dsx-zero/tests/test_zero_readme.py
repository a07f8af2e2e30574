"""The README's example runs as it stands, on one and on two ranks, and learns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from dsx_testkit import run_ranks

TEXT = (Path(__file__).parents[1] / "README.md").read_text()


def example(rank, world, code):
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    losses = scope["losses"]
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10]), losses[::10]
    return losses[-1]


@pytest.mark.parametrize("world", [1, 2])
def test_example(world):
    code, *_ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    run_ranks(example, world, code)


def experts(rank, world, code):
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    model, optimizer = scope["model"], scope["optimizer"]
    (model["dense"](torch.ones(1, 8)) + model["expert"](torch.ones(1, 8))).sum().backward()
    optimizer.step()
    return optimizer.layout.group_of("expert.weight").ranks.size


def test_example_of_experts():
    _, code, *_ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert run_ranks(experts, 2, code) == [1, 1]


def fewer_bytes(rank, world, code):
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    for model, optimizer in ((scope["model"], scope["optimizer"]), (scope["hybrid"], scope["hybrid_optimizer"])):
        x = torch.ones(1, 64)
        for block in model:
            x = block(x)
        x.sum().backward()
        optimizer.step()
    return scope["hybrid_optimizer"].layout.group_of("0.weight").ranks.size


def test_example_of_fewer_bytes_between_nodes():
    (code,) = (found for found in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "zero_hpz" in found)
    assert run_ranks(fewer_bytes, 4, code) == [2] * 4


def sparse(rank, world, code):
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    return scope["table"].weight.grad.is_sparse


def test_example_of_sparse_embeddings():
    (code,) = (found for found in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "sparse_gradients" in found)
    assert run_ranks(sparse, 2, code) == [True] * 2
