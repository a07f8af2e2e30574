"""The README's examples run as they stand, on one and on two ranks: the model learns, and the budget holds."""

import re
from pathlib import Path

import pytest
from dsx_testkit import run_ranks

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


def run(rank, world, code):
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    return scope


def budgeted(rank, world, code):
    scope = run(rank, world, code)
    losses, choice = scope["losses"], scope["budget"].choice
    assert losses[-1] < 0.5 * losses[0], losses
    assert choice.fits and choice.recomputed, choice
    return choice


@pytest.mark.parametrize("world", [1, 2])
def test_the_first_example_learns_within_its_budget(world):
    choices = run_ranks(budgeted, world, EXAMPLES[0])
    assert all(choice == choices[0] for choice in choices)


def by_hand(rank, world, code):
    return all(p.grad is not None for p in run(rank, world, code)["block"].parameters())


def test_the_second_example_gives_gradients():
    assert len(EXAMPLES) == 2
    assert run_ranks(by_hand, 1, EXAMPLES[1]) == [True]
