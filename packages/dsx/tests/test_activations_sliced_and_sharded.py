"""Activation checkpointing on model-parallel ranks under ZeRO: the losses and the dropout of a model without it, at
every stage, inputs divided or not.
"""

import dsx_activations
import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from dsx_testkit.recomputed_models import Axes


def build(call, mpu):
    """A model whose blocks are cut over the model-parallel ranks, as Megatron's are."""
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional as F

    group = mpu.get_model_parallel_group()

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
            return grad

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x = x.clone()
            dist.all_reduce(x, group=group)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Block(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(100 * mpu.get_model_parallel_rank() + seed)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
            for parameter in self.parameters():
                parameter.tensor_model_parallel = True

        def forward(self, x):
            y = torch.tanh(self.up(Enter.apply(x)))
            with dsx_activations.get_cuda_rng_tracker().fork():  # this rank's part: a mask of its own
                y = F.dropout(y, 0.25)
            return x + F.dropout(Leave.apply(self.down(y)), 0.25)  # alike on all ranks

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block(n) for n in range(3))

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = call(block, x)
            return x

    return Model()


def losses(call, stage, mpu, data_rank):
    model, optimizer = dsx_zero.shard(build(call, mpu), lambda p: torch.optim.AdamW(p, lr=0.01), stage=stage, mpu=mpu)
    dsx_activations.model_parallel_cuda_manual_seed(100 + data_rank)
    found = []
    for step in range(3):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + data_rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    optimizer.release()
    return torch.stack(found)


POLICIES = [
    {},
    {"partition_activations": True},
    {"partition_activations": True, "checkpoint_in_cpu": True},
    {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 3},
]


def stages(rank, world, model, which, policies):
    mpu = Axes(rank, world, model)
    data_rank = mpu.get_data_parallel_rank()
    for stage in which:
        expected = losses(lambda block, x: block(x), stage, mpu, data_rank)
        for policy in policies:
            for reentrant in (False, True):
                dsx_activations.configure(mpu, **policy)

                def call(block, x, reentrant=reentrant):
                    return dsx_activations.checkpoint(block, x, use_reentrant=reentrant)

                got = losses(call, stage, mpu, data_rank)
                assert torch.equal(got, expected), (stage, policy, reentrant, got, expected)


@pytest.mark.parametrize("world", [1, 2])
def test_two_ranks_all_stages(world):
    run_ranks(stages, world, world, (0, 1, 2, 3), POLICIES[1:2])


def test_two_by_two_ranks_at_stage_3():
    run_ranks(stages, 4, 2, (3,), POLICIES[1:])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_policies_at_all_stages(world):
    run_ranks(stages, world, min(world, 2), (0, 1, 2, 3), POLICIES)
