"""`unwrap_model_for_generation`: a model is whole for a while, and ranks may call it as often as they like."""

import copy

import pytest
import torch
from dsx_testkit import run_ranks, tiny


def work(rank, world, stage):
    import dsx_comm
    import dsx_zero

    oracle = tiny.TinyGPT()
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1)
    model, optimizer = dsx_zero.shard(
        copy.deepcopy(oracle), lambda p: torch.optim.SGD(p, lr=0.1), stage=stage,
        config={"stage3_param_persistence_threshold": 0},
    )  # fmt: skip
    tokens, targets = oracle.example(2)
    for step in range(4):  # the third follows a frozen order of collectives
        model.loss(tokens, targets).backward(), oracle.loss(tokens, targets).backward()
        optimizer.step(), reference.step()
        optimizer.zero_grad(), reference.zero_grad()
        with dsx_comm.count_traffic() as traffic, dsx_zero.unwrap_model_for_generation(model) as whole:
            entered = traffic.sent_bytes()
            assert type(model.blocks[0].up.weight) is torch.nn.Parameter
            for _ in range(1 + 2 * rank + step):  # ranks differ
                with torch.no_grad():
                    torch.testing.assert_close(whole(tokens), oracle(tokens), rtol=1e-4, atol=1e-5)
            assert not whole(tokens).requires_grad
            torch.testing.assert_close(whole.blocks[0].up.weight, oracle.blocks[0].up.weight, rtol=1e-4, atol=1e-5)
            assert traffic.sent_bytes() == entered
        assert isinstance(model.blocks[0].up.weight, dsx_zero.PartitionedParameter) == (stage == 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_generate_at_their_own_pace_between_steps(stage):
    run_ranks(work, 2, stage)


def test_an_engine_is_unwrapped_by_its_module():
    import dsx_zero

    class Engine:
        module = torch.nn.Linear(2, 2)

    with dsx_zero.unwrap_model_for_generation(Engine) as same:
        assert same is Engine and not torch.is_grad_enabled()
