"""Whole parameters outside forward: reading, changing, registering with other modules, and what partitioned ones
refuse.
"""

import copy
import pickle

import pytest
import torch
from dsx_testkit import run_ranks, tiny
from torch import nn
from torch.nn import functional as F

EXACT = {"stage3_param_persistence_threshold": 0}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def _sharded(model, **config):
    import dsx_zero

    return dsx_zero.shard(model, sgd, stage=3, config={**EXACT, **config})


def test_reading_and_changing():
    def work(rank, world):
        import dsx_zero

        oracle = tiny.TinyGPT()
        model, optimizer = _sharded(copy.deepcopy(oracle))
        up = model.blocks[0].up.weight
        with dsx_zero.GatheredParameters([up, model.norm], modifier_rank=None):
            assert torch.equal(model.blocks[0].up.weight, oracle.blocks[0].up.weight)
            assert torch.equal(up[1:3], oracle.blocks[0].up.weight[1:3])  # the object from before works too
            assert up.sum().item() == oracle.blocks[0].up.weight.sum().item()
        with pytest.raises(dsx_zero.PartitionedParameterError, match=r"blocks\.0\.up\.weight"):
            up.sum()
        with dsx_zero.GatheredParameters(up, modifier_rank=1):
            if rank == 1:
                model.blocks[0].up.weight.data[:, 0] = 5
                up.data[0].fill_(3)
        want = oracle.blocks[0].up.weight.detach().clone()
        want[:, 0] = 5
        want[0] = 3
        assert torch.equal(up.full_tensor(), want)
        with pytest.raises(dsx_zero.UnownedEditError, match=r"blocks\.0\.up\.weight"):
            with dsx_zero.GatheredParameters(up):
                up.data.mul_(2)
        assert torch.equal(up.full_tensor(), want)
        with dsx_zero.GatheredParameters(up, enabled=False):
            with pytest.raises(dsx_zero.PartitionedParameterError):
                up.sum()
        with pytest.raises(ZeroDivisionError):
            with dsx_zero.GatheredParameters(up, modifier_rank=0):
                up.data.zero_()
                raise ZeroDivisionError
        assert torch.equal(up.full_tensor(), want)
        with torch.no_grad():
            oracle.blocks[0].up.weight.copy_(want)
        model.loss(*model.example(2)).backward()  # the change reaches masters and training
        oracle.loss(*model.example(2)).backward()
        optimizer.step(), sgd(oracle.parameters()).step()
        torch.testing.assert_close(up.full_tensor(), oracle.blocks[0].up.weight.detach(), rtol=1e-5, atol=1e-6)

    run_ranks(work, 2)


def test_changes_without_a_context_are_everybodys():
    def work(rank, world):
        model, _ = _sharded(tiny.TinyGPT())
        weight = model.blocks[1].qkv.weight
        torch.manual_seed(rank)
        nn.init.normal_(weight)
        weight.data.mul_(2)
        with torch.no_grad():
            weight.add_(1)
            weight[0] = 7
        with pytest.raises(RuntimeError, match="leaf Variable"):
            weight.add_(1)
        return weight.full_tensor(), rank, weight.local_shard.numel()

    results = run_ranks(work, 3)
    torch.manual_seed(0)
    want = (torch.empty(48, 16).normal_() * 2 + 1).index_fill(0, torch.tensor([0]), 7)
    assert all(torch.equal(got, want) for got, _, _ in results)
    assert sum(numel for *_, numel in results) == want.numel()


def test_parameters_of_init_can_be_gathered_before_sharding():
    def work(rank, world):
        import dsx_zero

        with dsx_zero.Init():
            model = nn.Sequential(nn.Linear(4, 4))
        with dsx_zero.GatheredParameters(model.parameters(), modifier_rank=0):
            if rank == 0:
                model[0].weight.data.fill_(2)
                model[0].bias.data[1:].zero_()
        assert torch.equal(model[0].weight.full_tensor(), torch.full((4, 4), 2.0))
        with pytest.raises(dsx_zero.UnownedEditError, match=r"Linear\.bias"):
            with dsx_zero.GatheredParameters(model.parameters()):
                model[0].bias.data.zero_()
                assert model[0].weight.sum() == 32

    run_ranks(work, 2)


class Borrower(nn.Module):
    """A block that computes with the weight of another one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        class Uses(nn.Module):
            def __init__(self, other):
                super().__init__()
                self.own = nn.Linear(4, 4)
                self.other = [other]

            def forward(self, x):
                return self.own(F.linear(x, self.other[0].weight))

        self.blocks.append(Uses(self.blocks[1]))

    def forward(self, x):
        return self.blocks[2](torch.tanh(self.blocks[0](x))).square().mean()


def in_the_order_of_a_set(rank, world, when):
    import dsx_zero

    if when == "divided":
        with dsx_zero.Init():
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    else:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    if when == "sharded":
        model, _ = _sharded(model)
    model.register_buffer("mean", torch.zeros(4))
    chosen = [*model.parameters(), model.mean]
    for round_ in range(2):
        wanted = [torch.full(p.shape, 10.0 * round_ + number) for number, p in enumerate(chosen)]
        with dsx_zero.GatheredParameters(chosen[:: 1 if rank else -1], modifier_rank=0):
            for parameter, value in zip(chosen, wanted) if rank == 0 else ():
                parameter.data.copy_(value)
        with dsx_zero.GatheredParameters(chosen):
            assert all(torch.equal(p.detach(), value) for p, value in zip(chosen, wanted))


@pytest.mark.parametrize("when", ["plain", "divided", "sharded"])
def test_ranks_may_give_parameters_in_different_orders(when):
    run_ranks(in_the_order_of_a_set, 2, when)


@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_external_parameters(when):
    def work(rank, world):
        import dsx_zero

        model, oracle = Borrower(), Borrower()
        if when == "before":
            dsx_zero.register_external_parameter(model.blocks[2], model.blocks[1].weight)
        model, optimizer = _sharded(model)
        if when == "after":
            dsx_zero.register_external_parameter(model.blocks[2], model.blocks[1].weight)
        reference = sgd(oracle.parameters())
        x = torch.linspace(-1, 1, 12).view(3, 4)
        for _ in range(3):
            model(x).backward(), oracle(x).backward()
            optimizer.step(), reference.step()
            optimizer.zero_grad(), reference.zero_grad()
        for (name, got), want in zip(model.named_parameters(), oracle.parameters()):
            torch.testing.assert_close(got.full_tensor(), want.detach(), rtol=1e-5, atol=1e-6, msg=name)
        dsx_zero.unregister_external_parameter(model.blocks[2], model.blocks[1].weight)
        model(x).backward()

    run_ranks(work, 2)


def test_what_a_partitioned_parameter_is_and_refuses():
    def work(rank, world):
        import dsx_zero

        model, _ = _sharded(tiny.TinyGPT())
        p = model.blocks[0].up.weight
        assert isinstance(p, nn.Parameter) and p.shape == (64, 16) and p.numel() == 1024 and p.dtype == torch.float32
        assert p.grad is None and p.is_leaf and p.requires_grad and len(p) == 64 and hash(p) == hash(p)
        assert repr(p).startswith("PartitionedParameter('blocks.0.up.weight', shape=(64, 16)")
        assert torch.equal(torch.zeros_like(p), torch.zeros(64, 16)) and p.new_ones(2).sum() == 2
        refused = [
            p.data_ptr, p.numpy, p.tolist, p.clone, p.sum, p.untyped_storage, p.half, lambda: p.to(torch.float64),
            lambda: p[0], lambda: p + 1, lambda: p == p, lambda: float(p), lambda: p.detach().cpu().numpy(),
            lambda: copy.deepcopy(p), lambda: pickle.dumps(p), lambda: torch.stack([p, p]),
            lambda: setattr(p, "data", torch.ones(2)), lambda: model.half(), lambda: copy.deepcopy(model),
            lambda: F.linear(torch.ones(16), p), lambda: p.resize_(3), lambda: p.__dlpack__(),
        ]  # fmt: skip
        for number, call in enumerate(refused):
            try:
                call()
            except dsx_zero.PartitionedParameterError as error:
                assert "up.weight" in str(error) or "partitioned" in str(error)
            else:
                raise AssertionError(f"number {number} was not refused")
        model.requires_grad_(True).train().zero_grad()

    run_ranks(work, 2)


def test_an_optimizer_built_over_partitioned_parameters_is_refused():
    def work(rank, world):
        import dsx_zero

        model, _ = _sharded(tiny.MLP())
        late = torch.optim.Adam(model.parameters())
        late.step()  # without gradients it does nothing, as any optimizer
        model.loss(*model.example(2)).backward()
        with pytest.raises(
            dsx_zero.ZeroStateError, match=r"update parameters with the optimizer that dsx_zero\.shard returned"
        ):
            late.step()

    run_ranks(work, 2)


def test_edits_reach_the_masters_and_unedited_ones_keep_their_digits():
    """In bf16 the master has digits that the parameter lacks: an edit sets it, reading or keeping must not round it."""

    def work(rank, world, stage):
        import dsx_zero

        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 4)]).to(torch.bfloat16)
        model.forward = lambda x: model[1](model[0](x))
        model, optimizer = dsx_zero.shard(model, sgd, stage=stage, config=EXACT)
        model(torch.ones(2, 6, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        masters = [dsx_zero.safe_get_full_fp32_param(layer.weight) for layer in model]
        with dsx_zero.GatheredParameters([layer.weight for layer in model], modifier_rank=0):
            if rank == 0:
                model[1].weight.data[0, 0] = 9
        kept, edited = (dsx_zero.safe_get_full_fp32_param(layer.weight) for layer in model)
        assert torch.equal(kept, masters[0]), stage
        assert not torch.equal(kept, kept.bfloat16().float()), "the masters have no digits to lose: the test is blind"
        assert edited[0, 0] == 9, stage
        optimizer.step()  # without gradients: parameters become what the masters say
        with dsx_zero.GatheredParameters(model[1].weight):
            assert model[1].weight[0, 0].item() == 9, stage

    for world in (1, 2):
        for stage in (0, 1, 2, 3):
            run_ranks(work, world, stage)


def test_whole_parameters_of_one_group_of_ranks_stay_its_own():
    """Below stage 3: `modifier_rank` counts within the model's group, and other groups hear nothing of it."""

    def work(rank, world):
        import dsx_comm
        import dsx_zero

        groups = [dsx_comm.new_group(members) for members in ([0, 2], [1, 3])]
        mine = groups[rank % 2]
        model, _ = dsx_zero.shard(nn.Linear(2, 2), sgd, stage=1, process_group=mine)
        with dsx_zero.GatheredParameters(model.weight, modifier_rank=1):
            model.weight.data.fill_(rank)
        return model.weight.detach().unique().tolist()

    assert run_ranks(work, 4) == [[2.0], [3.0], [2.0], [3.0]]


def set_inside(rank, world, dtype, local):
    import dsx_zero

    model, _ = _sharded(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(dtype))
    weight, other = model[0].weight, model[1].weight
    set_value = dsx_zero.safe_set_local_fp32_param if local else dsx_zero.safe_set_full_fp32_param
    want = torch.arange(36.0).view(6, 6) + 1
    own = dsx_zero.safe_get_local_fp32_param(weight).numel()
    before = world_before(rank, world, own)
    value = want.reshape(-1)[before : before + own] if local else want
    with dsx_zero.GatheredParameters([weight, other]):
        set_value(weight, value)
        assert torch.equal(weight.float(), want)
    assert torch.equal(weight.full_tensor().float(), want)
    assert torch.equal(dsx_zero.safe_get_full_fp32_param(weight), want)
    with pytest.raises(dsx_zero.UnownedEditError, match=r"0\.weight\. The"):  # an edit after it
        with dsx_zero.GatheredParameters(weight):
            set_value(weight, value)
            weight.data[0, 0] = 99
    with pytest.raises(dsx_zero.UnownedEditError, match=r"1\.weight\. The"):  # an edit of another parameter
        with dsx_zero.GatheredParameters([weight, other]):
            other.data[0, 0] = 99
            set_value(weight, value)
    with dsx_zero.GatheredParameters(weight, modifier_rank=0):
        set_value(weight, value)
        if rank == 0:
            weight.data[0, 0] = 99
    want[0, 0] = 99
    assert torch.equal(weight.full_tensor().float(), want)
    assert torch.equal(dsx_zero.safe_get_full_fp32_param(weight), want)


def world_before(rank, world, own):
    """Elements of the parameter on lower ranks."""
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(world)]
    if world == 1:
        return 0
    torch.distributed.all_gather(sizes, torch.tensor([own]))
    return int(sum(size.item() for size in sizes[:rank]))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_accessors_inside_a_context_for_reading(world):
    for dtype in (torch.float32, torch.bfloat16):
        for local in (False, True):
            run_ranks(set_inside, world, dtype, local)
