"""Experts on several ranks inside DistributedDataParallel and FSDP2: refused, or left out and averaged separately."""

import dsx_moe
import pytest
import torch
from dsx_moe import MoE, PackedExperts
from dsx_moe.errors import MoEConfigError
from dsx_testkit import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 6


class Net(nn.Module):
    def __init__(self, ep_size=1, packed=False):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        expert = PackedExperts(4, WIDTH, 8) if packed else lambda i: nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, expert, 4, ep_size, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)

    def forward(self, x):
        out, l_aux, _ = self.moe(self.first(x))
        return out.square().mean() + 0.1 * l_aux


class Block(nn.Module):
    """A router and a list of experts, as earlier Hugging Face models have them."""

    top_k = 2

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        weights, chosen = torch.softmax(self.gate(x), -1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        picked = outputs.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, WIDTH))
        return (picked * weights.unsqueeze(-1)).sum(-2)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.block = Block()
        assert dsx_moe.apply_expert_parallel(self, 2) == ["block"]

    def forward(self, x):
        return self.block(x).square().mean()


def batch(rank):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(rank))


def refused(rank, world):
    from torch.distributed.fsdp import fully_shard

    for made in (Net(2), Net(2, packed=True), Listed()):
        model = DistributedDataParallel(made)
        for _ in range(2):  # not only the first time
            with pytest.raises(MoEConfigError, match=r"ignore_experts_in_ddp\(model\) before"):
                model(batch(rank))
        with torch.no_grad(), pytest.raises(MoEConfigError, match="overwritten its experts"):
            model(batch(rank))
    for made in (Net(2), Net(2, packed=True), Listed()):
        fully_shard(made)
        with pytest.raises(MoEConfigError, match="ignored_params="):
            made(batch(rank))


def test_experts_of_several_ranks_are_refused_inside_ddp_and_fsdp2():
    run_ranks(refused, 2, backend="gloo")


def named_gradients(model, rank):
    """By the names of a model on one process."""
    found = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        head, mark, tail = name.partition("moe.experts.")
        if mark:
            number, _, rest = tail.partition(".")
            name = f"{head}{mark}{int(number) + 2 * rank}.{rest}"
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def left_out(rank, world, wrapper):
    model = Net(2)
    if wrapper == "ddp":
        names = dsx_moe.ignore_experts_in_ddp(model)
        assert names == [f"moe.{name}" for name, _ in model.moe.named_parameters() if name.startswith("experts.")]
        model = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, ignored_params={p for p in model.parameters() if dsx_moe.is_moe_param(p)})
    for _ in range(2):
        model.zero_grad()
        model(batch(rank)).backward()
        dsx_moe.average_gradients(model, experts_only=True)
    return named_gradients(model, rank)


def everyone_has_all(rank, world):
    """Experts that all ranks have may be averaged by DDP."""
    model = DistributedDataParallel(Net(1))
    model(batch(rank)).backward()
    return named_gradients(model, 0)


def expected():
    model = Net(1)
    (sum(model(batch(rank)) for rank in range(2)) / 2).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "ddp of whole experts"])
def test_experts_that_are_left_out_get_the_gradients_of_one_process(wrapper):
    whole, want = wrapper.endswith("whole experts"), expected()
    found = run_ranks(everyone_has_all, 2, backend="gloo") if whole else run_ranks(left_out, 2, wrapper, backend="gloo")
    seen = set()
    for gradients in found:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, want[name], rtol=1e-5, atol=1e-7, msg=name)
        seen |= set(gradients)
    assert seen == set(want)
