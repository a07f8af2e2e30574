"""Models whose parameters are DTensors of torch's tensor parallelism, sharded over the data-parallel ranks.

The oracles are the same model in one plain process, and FSDP2 on the same mesh.
"""

import copy
import tempfile

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn
from torch.nn import functional as F

WIDTH, WORDS, LENGTH, STEPS, CLIP = 8, 12, 4, 3, 0.05
STAGES = (0, 1, 2, 3)
CONFIGS = {stage: {} for stage in STAGES} | {3: {"stage3_param_persistence_threshold": 0}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A small language model: embedding, blocks, norm, head."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def data(index, step):
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randint(WORDS, (2, LENGTH + 1), generator=generator)


def loss_of(model, index, step):
    tokens = data(index, step)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def parallelized(mesh, tied=False, frozen=()):
    """Embedding by rows, norms over parts of the sequence, linear layers by columns and rows, as torchtitan does it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = Net(tied)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in range(len(model.blocks)):
        plan[f"blocks.{index}"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),),
                                                     use_local_output=True)  # fmt: skip
        plan[f"blocks.{index}.norm"] = SequenceParallel()
        plan[f"blocks.{index}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{index}.down"] = RowwiseParallel(output_layouts=Shard(1))
    model = parallelize_module(model, mesh, plan)
    if tied:
        model.head.weight = model.embed.weight
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def meshes(data_ranks, tensor_ranks):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (data_ranks, tensor_ranks), mesh_dim_names=("dp", "tp"))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, foreach=False)


def one_process(ranks, tied=False, frozen=(), steps=STEPS):
    """Losses by step and rank, norms, parameters and first moments at the end."""
    model = Net(tied)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    losses, norms = [], []
    for step in range(steps):
        each = [loss_of(model, index, step) for index in range(ranks)]
        (sum(each) / ranks).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    moments = {n: optimizer.state[p]["exp_avg"].clone() for n, p in model.named_parameters() if p.requires_grad}
    return losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()}, moments


def train(model, optimizer, index, steps=range(STEPS)):
    losses, norms = [], []
    for step in steps:
        loss = loss_of(model, index, step)
        loss.backward()
        norms.append(optimizer.step(max_norm=CLIP).grad_norm)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def sharded(rank, world, data_ranks, tied, frozen):
    import dsx_zero

    mesh, found = meshes(data_ranks, world // data_ranks), {}
    for stage in STAGES:
        model, optimizer = dsx_zero.shard(
            parallelized(mesh["tp"], tied, frozen), adamw, stage=stage, mesh=mesh["dp"], config=CONFIGS[stage]
        )
        losses = train(model, optimizer, mesh["dp"].get_local_rank())
        state = dsx_zero.full_state_dict(optimizer, rank0_only=False)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        masters = {n: dsx_zero.safe_get_full_fp32_param(n, optimizer=optimizer) for n in names}
        moments = {n: dsx_zero.safe_get_full_optimizer_state(n, "exp_avg", optimizer=optimizer) for n in names}
        found[stage] = *losses, state["model"], masters, moments
        optimizer.release()
    return found


@pytest.mark.parametrize(
    ("ranks", "data_ranks", "tied", "frozen"),
    [(4, 2, False, ()), (2, 1, False, ()), (2, 2, True, ()), (4, 2, True, ("blocks.0.up.weight", "norm.weight"))],
    ids=["2x2", "1x2", "2x1-tied", "2x2-tied-frozen"],
)
def test_a_tensor_parallel_model_trains_with_the_numbers_of_one_process(ranks, data_ranks, tied, frozen):
    losses, norms, values, moments = one_process(data_ranks, tied, frozen)
    for rank, found in enumerate(run_ranks(sharded, ranks, data_ranks, tied, frozen, timeout=180)):
        index = rank // (ranks // data_ranks)
        for stage, (got_losses, got_norms, model, masters, got_moments) in found.items():
            expected = [each[index] for each in losses]
            torch.testing.assert_close(got_losses, expected, rtol=0, atol=1e-6, msg=f"stage {stage}: losses")
            torch.testing.assert_close(got_norms, norms, rtol=1e-5, atol=1e-6, msg=f"stage {stage}: norms")
            for name, value in values.items():
                torch.testing.assert_close(model[name], value, rtol=0, atol=1e-5, msg=f"stage {stage}: {name}")
            assert masters.keys() == moments.keys()
            for name in masters:
                torch.testing.assert_close(masters[name], values[name], rtol=0, atol=1e-5)
                torch.testing.assert_close(got_moments[name], moments[name], rtol=0, atol=1e-6)
