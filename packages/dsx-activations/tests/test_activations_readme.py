"""The README's examples run as they stand, on one and on two ranks: the model learns, and the budget holds."""

import re
from pathlib import Path

import pytest
import torch
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
    assert len(EXAMPLES) == 4
    assert run_ranks(by_hand, 1, EXAMPLES[1]) == [True]


def long_sequence(rank, world, code):
    scope = run(rank, world, code)
    segments = scope["sequence_segments"](37, world, rank, "zigzag")
    return segments, scope["by_heads"].detach(), scope["x"].grad


def test_the_third_example_does_not_depend_on_the_number_of_ranks():
    ((order, out, grad),) = run_ranks(long_sequence, 1, EXAMPLES[2])
    assert order == ((0, 19), (19, 37))
    for segments, ours, its_grad in run_ranks(long_sequence, 2, EXAMPLES[2]):
        rows = [token for pair in segments for token in range(*pair)]
        torch.testing.assert_close(ours, out[:, :, rows])
        torch.testing.assert_close(its_grad, grad[:, :, rows], rtol=1e-4, atol=1e-5)


def converted(rank, world, code):
    return run(rank, world, code)["loss"].item()


def test_a_model_over_cut_sequences():
    """The example's weights and text are random: they are seeded here, and the loss is that of one rank."""
    code = EXAMPLES[3].replace("model = Language()", "torch.manual_seed(0)\nmodel = Language()")
    assert code != EXAMPLES[3]
    (alone,) = run_ranks(converted, 1, code)
    for loss in run_ranks(converted, 2, code):
        assert abs(loss - alone) < 1e-5
