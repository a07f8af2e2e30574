"""Parameters that only some ranks hold: experts and slices of tensors train with the numbers of one process.

The oracle is always the same mathematical model in plain PyTorch on one process: all experts, the whole matrices.
"""

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn
from torch.nn import functional as F

WIDTH, EXPERTS, STEPS, CLIP = 8, 2, 4, 0.05
STAGES = (0, 1, 2, 3)
CONFIG = {"stage3_param_persistence_threshold": 0}


def data(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, WIDTH, generator=generator), torch.randn(3, WIDTH, generator=generator)


# - experts ------------------------------------------------------------------------------------------------------------


class Exchange(torch.autograd.Function):
    """An all-to-all of equal parts, whose backward is itself."""

    @staticmethod
    def forward(ctx, x, group):
        import dsx_comm

        ctx.group = group
        out = torch.empty_like(x)
        dsx_comm.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.group), None


class Block(nn.Module):
    """A dense layer, then experts: token t goes to expert t % EXPERTS. `group`: the ranks that share the experts
    out.
    """

    def __init__(self, experts, group=None, rank=0, size=1):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(experts[rank * len(experts) // size : (rank + 1) * len(experts) // size])
        self.group, self.size = group, size

    def forward(self, x):
        x = torch.tanh(self.dense(x))
        parts = torch.stack([x * (0.5 + i) for i in range(EXPERTS)])  # every expert sees all tokens, differently
        if self.size > 1:
            mine = Exchange.apply(parts, self.group)  # (sender, tokens, width) of this rank's expert
            out = Exchange.apply(torch.stack([self.experts[0](part) for part in mine]), self.group)
        else:
            out = torch.stack([expert(part) for expert, part in zip(self.experts, parts)])
        return x + out.sum(0)


class Moe(nn.Module):
    def __init__(self, mark=None, **place):
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            experts = [nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)) for _ in range(EXPERTS)]
            for parameter in nn.ModuleList(experts).parameters() if mark is not None else ():
                parameter.allreduce, parameter.group_name = False, mark
            self.blocks.append(Block(experts, **place))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=0.02)


def one_process(model, ranks, make=adamw):
    """Losses by step and rank, norms, and the parameters at the end."""
    optimizer = make(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        each = []
        for rank in range(ranks):
            x, y = data(rank, step)
            loss = F.mse_loss(model(x), y)
            (loss / ranks).backward()
            each.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(each)
    return losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()}


def whole_parameters(model, optimizer):
    import dsx_zero

    return {n: dsx_zero.safe_get_full_fp32_param(n, optimizer=optimizer) for n, _ in model.named_parameters()}


def train(model, optimizer, rank):
    losses, norms = [], []
    for step in range(STEPS):
        x, y = data(rank, step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norms.append(optimizer.step(max_norm=CLIP).grad_norm)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def train_experts(rank, world, make=adamw):
    import dsx_zero
    from dsx_comm import parallel_groups

    parallel_groups.create_expert_and_data_parallel(2)
    place = {
        "group": parallel_groups.get_expert_parallel_group("ep_size_2"),
        "rank": parallel_groups.get_expert_parallel_rank("ep_size_2"),
        "size": 2,
    }
    found = {}
    for stage in STAGES:
        model, optimizer = dsx_zero.shard(Moe("ep_size_2", **place), make, stage=stage, config=CONFIG)
        found[stage] = *train(model, optimizer, rank), whole_parameters(model, optimizer)
        optimizer.release()
    return found, place["rank"]


def muon(parameters):
    import dsx_ops

    return dsx_ops.Muon(parameters, lr=0.02)


@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (4, "dsx")])
def test_experts_whose_matrices_are_brought_together(ranks, backend):
    """Those of a group of experts among its ranks only; with two ranks one rank alone has each expert."""
    pytest.importorskip("dsx_ops")
    import dsx_comm  # noqa: F401  knows the backend "dsx"

    compare_experts(ranks, muon, backend)


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_experts_in_a_data_parallel_group_of_their_own(backend):
    import dsx_comm  # noqa: F401  knows the backend "dsx"

    compare_experts(4, adamw, backend)


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_whose_optimizer_needs_whole_tensors(ranks):
    """With two ranks an expert belongs to one rank alone, which then must not cut it either."""
    compare_experts(ranks, adafactor, "gloo")


def compare_experts(ranks, make, backend):
    losses, norms, parameters = one_process(Moe(), ranks, make)
    for rank, (found, place) in enumerate(run_ranks(train_experts, ranks, make, backend=backend)):
        for stage, (got, got_norms, whole) in found.items():
            assert got == pytest.approx([each[rank] for each in losses], rel=1e-4), stage
            assert got_norms == pytest.approx(norms, rel=1e-4), stage
            for name, value in whole.items():
                expected = parameters[name.replace("experts.0", f"experts.{place}")]
                torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


# - slices of tensors --------------------------------------------------------------------------------------------------


class Copied(torch.autograd.Function):
    """The input of a column-parallel layer: its gradient is summed over the slices."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        import dsx_comm

        grad = grad.clone()
        dsx_comm.all_reduce(grad, group=ctx.group)
        return grad, None


class Summed(torch.autograd.Function):
    """The output of a row-parallel layer: a sum over the slices."""

    @staticmethod
    def forward(ctx, x, group):
        import dsx_comm

        out = x.clone()
        dsx_comm.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Sliced(nn.Module):
    """LayerNorm, a matrix cut by columns, one cut by rows."""

    def __init__(self, group=None, rank=0, size=1):
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(WIDTH)
        up, down = torch.randn(16, WIDTH) * 0.3, torch.randn(WIDTH, 16) * 0.3
        self.up, self.down = nn.Parameter(up.chunk(size)[rank].clone()), nn.Parameter(down.chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        if size > 1:
            self.up.tensor_model_parallel = self.down.tensor_model_parallel = True
        self.group, self.size = group, size

    def forward(self, x):
        x = self.norm(x)
        if self.size == 1:
            return torch.tanh(x @ self.up.T) @ self.down.T + self.bias
        hidden = torch.tanh(Copied.apply(x, self.group) @ self.up.T)
        return Summed.apply(hidden @ self.down.T, self.group) + self.bias


def lamb(parameters):
    import dsx_ops

    return dsx_ops.FusedLamb(parameters, lr=0.02)


class Slicing:
    """What an mpu tells, over axes made by hand: slices are neighbours."""

    def __init__(self):
        import dsx_comm

        self.registry = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), (2, 2)))

    def __getattr__(self, name):
        axis = self.registry.axis("model" if "model" in name else "data")
        return lambda: {"group": axis.group, "rank": axis.rank, "size": axis.size}[name.split("_")[-1]]

    def get_data_parallel_world_size(self):
        return self.registry.axis("data").size

    def get_model_parallel_world_size(self):
        return self.registry.axis("model").size


def train_slices(rank, world, stages, make, how):
    import dsx_comm
    import dsx_zero

    mpu, found = Slicing(), {}
    given = {"mpu": mpu} if how == "mpu" else {}
    if how == "parallel_groups":
        dsx_comm.parallel_groups.use(mpu.registry)
    for stage in stages:
        model = Sliced(mpu.get_model_parallel_group(), mpu.get_model_parallel_rank(), 2)
        model, optimizer = dsx_zero.shard(model, make, stage=stage, config=CONFIG, **given)
        found[stage] = *train(model, optimizer, mpu.get_data_parallel_rank()), whole_parameters(model, optimizer)
        optimizer.release()
    return found


@pytest.mark.parametrize(
    ("make", "how", "stages"), [(adamw, "mpu", STAGES), (lamb, "parallel_groups", (0, 2))], ids=["adamw", "lamb"]
)
def test_a_pair_of_slices_beside_two_data_parallel_ranks(make, how, stages):
    """With Lamb the norms of whole tensors span the slices too."""
    losses, norms, parameters = one_process(Sliced(), 2, make)
    for rank, found in enumerate(run_ranks(train_slices, 4, stages, make, how)):
        place, part = divmod(rank, 2)
        slices = {"up": parameters["up"].chunk(2)[part], "down": parameters["down"].chunk(2, 1)[part]}
        for stage, (got, got_norms, whole) in found.items():
            assert got == pytest.approx([each[place] for each in losses], rel=1e-4), stage
            assert got_norms == pytest.approx(norms, rel=1e-4), stage
            for name, value in whole.items():
                torch.testing.assert_close(value, {**parameters, **slices}[name], rtol=1e-4, atol=1e-5)
