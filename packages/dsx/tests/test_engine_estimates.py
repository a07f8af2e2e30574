"""The estimates of memory against the bytes that engines count, in the mixed precision that the formulas describe:
16-bit parameters, fp32 gradients, fp32 masters, two fp32 states.
"""

from __future__ import annotations

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

WIDTH, LAYERS = 64, 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.float().square().mean()


def counted(rank, world, stage, places):
    """Bytes by tier with gradients there."""
    import dsx

    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **{key: {"device": "cpu"} for key in places}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
    }
    engine = dsx.initialize(model=Net(), config=config)[0]
    for step in range(2):
        engine.backward(engine(torch.ones(1, WIDTH).bfloat16()))
        found = engine.optimizer.state_bytes_by_tier()
        engine.step()
    engine.destroy()
    tiers = {"device": 0, "host": 0}
    for kind in ("params", "grads", "master", "optimizer"):
        for tier, nbytes in found[kind].items():
            tiers[tier] += nbytes
    return tiers


P = sum(p.numel() for p in Net().parameters())
L = WIDTH * WIDTH + WIDTH


@pytest.mark.parametrize("world", [1, 2])
def test_the_formulas_against_counted_bytes(world):
    """The part of the formulas that is model state; a margin of 3 % is for padding. The watch over edits of parameters
    takes an eighth of a word for each 64 bytes of them.
    """
    import dsx_zero

    two, three = dsx_zero.estimate_zero2_model_states_mem_needs, dsx_zero.estimate_zero3_model_states_mem_needs
    watch = P * 2 / 16

    def close(got, expected, slack=0.0):
        assert expected <= got <= 1.03 * expected + slack, (got, expected)

    # Stage 3: the formula's device bytes are those of the largest layer, and 18 for each parameter of the rank's share.
    for places, offload, params in (
        ((), False, False),
        (("offload_optimizer",), True, False),
        (("offload_optimizer", "offload_param"), True, True),
    ):
        needs = three(P, L, world, 1, offload, params, True, 1.0)
        rows = run_ranks(counted, world, 3, places)
        close(max(row["device"] for row in rows), needs.gpu - needs.largest_layer)
        close(sum(row["host"] for row in rows), needs.cpu if offload else 0)
    # Stage 2: the formula counts the 16-bit parameters twice, whole and in the share.
    cpu, gpu = two(P, world, 1, False, 1.0)
    assert cpu == 4 * P * world
    if world > 1:
        close(max(row["device"] for row in run_ranks(counted, world, 2, ())), gpu - 2 * P / world, watch)
    cpu, gpu = two(P, world, 1, True, 1.0)
    rows = run_ranks(counted, world, 2, ("offload_optimizer",))
    close(max(row["device"] for row in rows), gpu, watch)
    close(sum(row["host"] for row in rows), cpu)


def test_tables_are_printed(capsys):
    import dsx

    model = Net()
    for call, lines in (
        (lambda: dsx.zero.estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=2), 4),
        (lambda: dsx.zero.estimate_zero2_model_states_mem_needs_all_cold(P, 2, 1), 4),
        (lambda: dsx.zero.estimate_zero3_model_states_mem_needs_all_live(model, 2, 1, additional_buffer_factor=1.5), 8),
        (lambda: dsx.zero.estimate_zero3_model_states_mem_needs_all_cold(P, L, 2, 1), 8),
    ):
        text = call()
        assert capsys.readouterr().out == text + "\n" and len(text.splitlines()) == lines
        assert f"{P:,} parameters" in text and "per host" in text and "offload_optimizer=cpu" in text
