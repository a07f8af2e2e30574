"""Converted experts that are sliced over tensor-parallel ranks: outputs and gradients equal one process, and full state
dicts and restored models have the layout of Hugging Face.
"""

import copy

import dsx_comm
import pytest
import torch
from dsx_comm import GroupRegistry, ProcessTopology, parallel_groups
from dsx_moe import apply_expert_parallel, full_state_dict, restore_experts
from dsx_moe.config import ExpertParallelConfig, apply_config
from dsx_moe.errors import ConversionError, MoEConfigError
from dsx_moe.state import expert_slices
from dsx_testkit import run_ranks
from torch import nn

HIDDEN, INNER, EXPERTS = 8, 12, 4


class Packed(nn.Module):
    """The form of Hugging Face's experts."""

    def __init__(self, inner=INNER):
        super().__init__()
        self.num_experts, self.hidden_dim, self.act_fn = EXPERTS, HIDDEN, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * inner, HIDDEN) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, inner) * 0.3)

    def forward(self, tokens, chosen, weights):
        gate, up = torch.einsum("tkij,tj->tki", self.gate_up_proj[chosen], tokens).chunk(2, -1)
        return torch.einsum("tkij,tkj,tk->ti", self.down_proj[chosen], self.act_fn(gate) * up, weights)


class Model(nn.Module):
    def __init__(self, inner=INNER):
        super().__init__()
        torch.manual_seed(3)
        self.gate, self.experts = nn.Linear(HIDDEN, EXPERTS), Packed(inner)

    def forward(self, x):
        weights, chosen = torch.softmax(self.gate(x), -1).topk(2)
        return x + self.experts(x, chosen, weights)


def tokens_of(data_rank):
    return torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(data_rank))


def piece(weight, dim, parts, rank, size):
    return torch.cat([part.chunk(size, dim)[rank] for part in weight.chunk(parts, dim)], dim)


def _convert_and_train(rank, world, by_config):
    dsx_comm.init_distributed()
    parallel_groups.use(GroupRegistry(ProcessTopology(("data", "model"), (world // 2, 2))))
    group = parallel_groups.current().axis("model").group
    data_rank, model_rank = rank // 2, rank % 2
    model, whole = Model(), Model()
    if by_config:
        section = ExpertParallelConfig(enabled=True, autoep_size=2, expert_tensor_parallel_size=2)
        assert apply_config(model, section) == ["experts"]
    else:
        apply_expert_parallel(model, 2, tensor_group=group, slice_experts=True)
    first = model.experts.first
    for name, parts, dim in (("gate_up_proj", 2, 1), ("down_proj", 1, 2)):
        own, expected = model.experts.get_parameter(name), getattr(whole.experts, name)[first : first + 2]
        assert torch.equal(own, piece(expected, dim, parts, model_rank, 2))
        assert own.tensor_model_parallel and (own.partition_dim, own.partition_stride) == (dim, parts)
        assert own.allreduce is False
    x = tokens_of(data_rank).requires_grad_()
    out = model(x)
    out.square().sum().backward()
    both = [tokens_of(r).requires_grad_() for r in range(2)]
    outs = [whole(one) for one in both]
    sum(one.square().sum() for one in outs).backward()
    torch.testing.assert_close(out, outs[data_rank], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, both[data_rank].grad, rtol=1e-4, atol=1e-5)
    for name, parts, dim in (("gate_up_proj", 2, 1), ("down_proj", 1, 2)):
        expected = getattr(whole.experts, name).grad[first : first + 2]
        torch.testing.assert_close(
            model.experts.get_parameter(name).grad, piece(expected, dim, parts, model_rank, 2), rtol=1e-4, atol=1e-5
        )
    full = full_state_dict(model)
    for name, value in whole.state_dict().items():
        assert torch.equal(full[name], value), name
    with torch.no_grad():
        for parameter in model.experts.parameters():
            parameter.zero_()
    model.load_state_dict(full)
    torch.testing.assert_close(model(x), out)
    copied = copy.deepcopy(model)
    assert copied.experts.down_proj.partition_dim == 2
    boxes = {name: (found.shape, found.offset) for name, found in expert_slices(model).items()}
    assert boxes == {"experts.down_proj": ((EXPERTS, HIDDEN, INNER), (first, 0, model_rank * INNER // 2))}
    restore_experts(model)
    assert type(model.experts) is Packed
    for name, value in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("by_config", [False, True])
def test_slices_of_converted_experts_are_those_of_one_process(by_config):
    run_ranks(_convert_and_train, 4, by_config)


class OtherForm(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts, self.hidden_dim = EXPERTS, HIDDEN
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))

    def forward(self, tokens, chosen, weights):
        return torch.einsum("tkij,tj,tk->ti", self.weight[chosen], tokens, weights)


def _refused(rank, world):
    dsx_comm.init_distributed()
    group = dsx_comm.get_world_group()
    odd, other = Model(inner=3), Model()
    other.experts = OtherForm()
    with pytest.raises(MoEConfigError, match=r"experts.gate_up_proj: got an inner size of 3, expected a multiple of 2"):
        apply_expert_parallel(odd, 1, tensor_group=group, slice_experts=True)
    with pytest.raises(ConversionError, match="cannot be sliced"):
        apply_expert_parallel(other, 1, tensor_group=group, slice_experts=True)
    with pytest.raises(MoEConfigError, match="got no tensor_group"):
        apply_expert_parallel(odd, 1, slice_experts=True)
    assert type(odd.experts) is Packed and type(other.experts) is OtherForm
    section = ExpertParallelConfig(enabled=True, expert_tensor_parallel_size=2)
    with pytest.raises(MoEConfigError, match="expected 1, or the 1 ranks"):
        apply_config(Model(), section)


def test_what_cannot_be_sliced_is_refused_and_left_as_it_is():
    run_ranks(_refused, 2)
