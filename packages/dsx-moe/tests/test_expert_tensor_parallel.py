"""Experts with tensor parallelism equal one process, where ranks hold whole experts and where they hold slices.

The ranks of a tensor-parallel group have the same tokens.
"""

import dsx_comm
import pytest
import torch
from dsx_comm import GroupRegistry, ProcessTopology, parallel_groups
from dsx_moe import MoE, PackedExperts, average_gradients, broadcast_parameters, clip_grad_norm_
from dsx_moe.errors import MoEConfigError
from dsx_testkit import run_ranks
from torch import nn

HIDDEN, FFN, EXPERTS = 8, 12, 4


def full_experts():
    torch.manual_seed(2)
    return PackedExperts(EXPERTS, HIDDEN, FFN, activation="silu", gated=True)


def layer_of(experts, ep_size=1, **options):
    torch.manual_seed(5)
    return MoE(HIDDEN, experts, EXPERTS, ep_size, k=2, drop_tokens=False, top2_2nd_expert_sampling=False, **options)


def tokens_of(data_rank):
    return torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(data_rank))


def sliced(group):
    """Experts with this rank's slice of the inner size, and the slice."""
    whole, rank, size = full_experts(), dsx_comm.get_rank(group), dsx_comm.get_world_size(group)
    own = PackedExperts(EXPERTS, HIDDEN, FFN, activation="silu", gated=True, tensor_group=group)
    inner = FFN // size
    span = slice(rank * inner, (rank + 1) * inner)
    with torch.no_grad():
        gate, up = whole.gate_up_proj.chunk(2, dim=1)
        own.gate_up_proj.copy_(torch.cat([gate[:, span], up[:, span]], 1))
        own.up_bias.copy_(torch.cat([part[:, span] for part in whole.up_bias.chunk(2, 1)], 1))
        own.down_proj.copy_(whole.down_proj[:, :, span])
        own.down_bias.copy_(whole.down_bias)
    return own, span


def oracle(data_ranks):
    """[(output, gradient of the tokens) of each data rank], and the layer with the gradients of the summed loss."""
    layer, found = layer_of(full_experts()), []
    for rank in range(data_ranks):
        x = tokens_of(rank).requires_grad_()
        out, l_aux, _ = layer(x)
        (out.square().sum() + l_aux).backward()
        found.append((out.detach(), x.grad))
    return found, layer


def _forward_and_backward(rank, world, is_sliced):
    dsx_comm.init_distributed()
    parallel_groups.use(GroupRegistry(ProcessTopology(("data", "model"), (world // 2, 2))))
    model = parallel_groups.current().axis("model")
    experts, span = sliced(model.group) if is_sliced else (full_experts(), slice(0, FFN))
    layer = layer_of(experts, world // 2, enable_expert_tensor_parallelism=is_sliced, overlap_chunks=2)
    assert parallel_groups.get_expert_model_parallel_world_size() == (2 if is_sliced else 1)
    data_rank = rank // 2
    x = tokens_of(data_rank).requires_grad_()
    with dsx_comm.count_traffic() as traffic:
        out, l_aux, _ = layer(x)
    sent = traffic.sent_bytes("all_to_all_single", group=layer.groups.expert.group)
    (out.square().sum() + l_aux).backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    first = layer.experts.first
    return out.detach(), x.grad, grads, (data_rank, first, span.start, span.stop), sent


@pytest.mark.parametrize("is_sliced", [True, False])
def test_outputs_and_gradients_equal_one_process(is_sliced):
    world = 4
    expected, layer = oracle(world // 2)
    results = run_ranks(_forward_and_backward, world, is_sliced)
    for out, grad, grads, (data_rank, first, start, stop), _ in results:
        torch.testing.assert_close(out, expected[data_rank][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grad, expected[data_rank][1], rtol=1e-4, atol=1e-5)
        own = slice(first, first + EXPERTS // 2)
        gate, up = layer.experts.gate_up_proj.grad[own].chunk(2, dim=1)
        torch.testing.assert_close(
            grads["experts.gate_up_proj"], torch.cat([gate[:, start:stop], up[:, start:stop]], 1), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            grads["experts.down_proj"], layer.experts.down_proj.grad[own][:, :, start:stop], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(grads["experts.down_bias"], layer.experts.down_bias.grad[own], rtol=1e-4, atol=1e-5)
    router = torch.stack([results[data_rank * 2][2]["gate.wg.weight"] for data_rank in range(world // 2)]).sum(0)
    torch.testing.assert_close(router, layer.gate.wg.weight.grad, rtol=1e-4, atol=1e-5)


def _clip(rank, world):
    dsx_comm.init_distributed()
    parallel_groups.use(GroupRegistry(ProcessTopology(("data", "model"), (world // 2, 2))))
    experts, span = sliced(parallel_groups.current().axis("model").group)
    layer = layer_of(experts, world // 2, enable_expert_tensor_parallelism=True)
    broadcast_parameters(layer)  # does not overwrite this rank's slice
    out, l_aux, _ = layer(tokens_of(rank // 2))
    (out.square().sum() + l_aux).backward()
    average_gradients(layer)
    norm = clip_grad_norm_(layer, 0.5)
    return norm, layer.gate.wg.weight.grad, layer.experts.down_proj.grad, layer.experts.first, span


@pytest.mark.parametrize("world", [2, 4])
def test_the_norm_counts_every_slice_once(world):
    _, layer = oracle(world // 2)
    for parameter in layer.parameters():
        parameter.grad /= world // 2
    expected = torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
    for norm, router, down, first, span in run_ranks(_clip, world):
        torch.testing.assert_close(norm.float(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(router, layer.gate.wg.weight.grad, rtol=1e-4, atol=1e-5)
        own = layer.experts.down_proj.grad[first : first + EXPERTS * 2 // world, :, span]
        torch.testing.assert_close(down, own, rtol=1e-4, atol=1e-5)


def test_a_token_travels_once_per_tensor_parallel_group():
    results = run_ranks(_forward_and_backward, 4, False)
    both = sum(sent for *_, sent in results)
    _, layer = oracle(2)
    counts = []
    for rank in range(2):
        layer(tokens_of(rank))
        counts.append(layer.stats.kept.view(2, -1).sum(1))
    away = int(counts[0][1] + counts[1][0])
    assert both == 2 * away * HIDDEN * 4  # there and back, once


def _refused(rank, world):
    dsx_comm.init_distributed()
    group = dsx_comm.get_world_group()
    with pytest.raises(MoEConfigError, match="not sliced"):
        layer_of(full_experts(), enable_expert_tensor_parallelism=True, tensor_group=group)
    with pytest.raises(MoEConfigError, match="multiple of 2"):
        PackedExperts(2, HIDDEN, 3, tensor_group=group)
    MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), 2, enable_expert_tensor_parallelism=True, tensor_group=group)
    experts, _ = sliced(group)  # sliced over ranks that are data-parallel in the topology
    layer = layer_of(experts, enable_expert_tensor_parallelism=True, tensor_group=group)
    weight = layer.experts.down_proj.detach().clone()
    for function in (broadcast_parameters, average_gradients, lambda model: clip_grad_norm_(model, 1.0)):
        with pytest.raises(MoEConfigError, match="sliced over 2 ranks, but the model axis of the topology has 1"):
            function(layer)
    assert torch.equal(layer.experts.down_proj, weight)


def test_slices_that_do_not_fit_are_refused():
    run_ranks(_refused, 2)
