"""Layers of experts in pipeline stages, their experts spread over the data-parallel ranks of a stage."""

import dsx_comm
import dsx_moe
import dsx_moe.groups
import pytest
import torch
from dsx_comm import GroupRegistry, parallel_groups
from dsx_moe import MoE
from dsx_pipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from dsx_testkit import run_ranks
from torch import nn

WIDTH, MICRO = 6, 2


class Block(nn.Module):
    """(x, sum of balancing losses) to the same."""

    def __init__(self, ep_size):
        super().__init__()
        self.moe = MoE(
            WIDTH, lambda i: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)), 4, ep_size,
            k=2, drop_tokens=False, top2_2nd_expert_sampling=False,
        )  # fmt: skip

    def forward(self, carried):
        x, balance = carried
        out, l_aux, _ = self.moe(x)
        return x + out, balance + l_aux


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x)), x.new_zeros(())


def loss_of(carried, labels):
    x, balance = carried
    return nn.functional.mse_loss(x, labels) + 0.1 * balance


def specs(ep_size):
    return [LayerSpec(First), *(LayerSpec(Block, ep_size) for _ in range(3))]


def batch(data_rank):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(data_rank))


def train(rank, world, schedule):
    dsx_comm.init_distributed()
    topology = PipeDataParallelTopology(2, 2)
    parallel_groups.use(GroupRegistry(topology))
    dsx_moe.groups.expert_groups_of(2)  # on all ranks: a stage without experts would not make the groups
    module = PipelineModule(
        specs(2),
        topology=topology,
        loss_fn=loss_of,
        seed_layers=True,
        base_seed=5,
        partition_method="uniform",
        schedule=schedule,
    )
    data = parallel_groups.current().rank("data")
    loss = Pipeline(module, schedule, micro_batches=MICRO).step(batch(data), torch.zeros(8, WIDTH))
    dsx_moe.average_gradients(module)
    first = {m.first for m in module.modules() if isinstance(m, dsx_moe.Experts)}
    return float(loss), {name: p.grad for name, p in module.named_parameters()}, data, first


def oracle():
    built = []
    for index, layer in enumerate([First, *[lambda: Block(1)] * 3]):
        torch.manual_seed(5 + index)
        built.append(layer())
    losses = []
    for data in range(2):
        parts = zip(batch(data).chunk(MICRO), torch.zeros(8, WIDTH).chunk(MICRO))
        losses.append(sum(loss_of(nn.Sequential(*built)(x), y) for x, y in parts) / MICRO)
    (sum(losses) / 2).backward()
    return [loss.item() for loss in losses], {
        f"{i}.{name}": p.grad for i, layer in enumerate(built) for name, p in layer.named_parameters()
    }


@pytest.mark.parametrize(
    "schedule",
    ["1f1b", "zb-h1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zbv", "interleaved", "gpipe"))],
)
def test_stages_of_experts_give_the_gradients_of_one_process(schedule):
    losses, expected = oracle()
    seen = set()
    for loss, grads, data, first in run_ranks(train, 4, schedule):
        assert loss == pytest.approx(losses[data], rel=1e-4)
        assert first == {2 * data}
        for name, grad in grads.items():
            head, _, tail = name.partition(".moe.experts.")
            if tail:  # experts are numbered from 0 on every rank
                number, _, rest = tail.partition(".")
                name = f"{head}.moe.experts.{int(number) + 2 * data}.{rest}"
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)
            seen.add(name)
    assert seen == set(expected)
