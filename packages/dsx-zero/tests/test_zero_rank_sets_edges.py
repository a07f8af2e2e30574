"""Rank sets at their edges: one of a kind of its own, experts without tokens, edits, overflow, and what is refused."""

import logging
import math

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn
from torch.nn import functional as F

WIDTH, STEPS = 8, 3
CONFIG = {"stage3_param_persistence_threshold": 0}
STAGES = (0, 1, 2, 3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Net(nn.Module):
    """A dense layer, and one that only some ranks hold (`own`), used where `uses(step)` says so."""

    def __init__(self, seed=0, marks=None, uses=lambda step: True):
        super().__init__()
        torch.manual_seed(5)
        self.dense = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(seed)
        self.own = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.own[1].running_mean.fill_(seed)
        for parameter in self.own.parameters() if marks is not None else ():
            parameter.allreduce, parameter.group_name = False, marks
        self.uses, self.step = uses, 0

    def forward(self, x):
        x = torch.tanh(self.dense(x))
        return x + self.own(x) if self.uses(self.step) else x


def batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def train(model, optimizer, rank, steps=STEPS, start=0):
    norms = []
    for step in range(start, start + steps):
        model.step = step
        x, y = batch(rank, step)
        F.mse_loss(model(x), y).backward()
        norms.append(optimizer.step(max_norm=0.3).grad_norm)
        optimizer.zero_grad()
    return norms


def values(model, optimizer):
    import dsx_zero

    return {n: dsx_zero.safe_get_full_fp32_param(n, optimizer=optimizer) for n, _ in model.named_parameters()}


def oracle(uses, divisor):
    """Two copies of `own`, one for ranks 0 and 2, one for 1 and 3; their gradients are sums divided by `divisor`."""
    nets = [Net(seed=seed, uses=uses) for seed in (1, 2)]
    nets[1].dense = nets[0].dense
    parameters = [*nets[0].parameters(), *nets[1].own.parameters()]
    optimizer, norms = sgd(parameters), []
    for step in range(STEPS):
        for rank in range(4):
            net = nets[rank % 2]
            net.step = (step, rank)
            x, y = batch(rank, step)
            F.mse_loss(net(x), y).backward()
        for parameter in parameters:
            own = all(parameter is not p for p in nets[0].dense.parameters())
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad /= divisor if own else 4
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, [{n: p.detach() for n, p in net.named_parameters()} for net in nets]


def check(results, expected_norms, expected):
    for rank, by_stage in enumerate(results):
        for stage, (norms, got, mean) in by_stage.items():
            assert norms == pytest.approx(expected_norms, rel=1e-4), stage
            for name, value in got.items():
                torch.testing.assert_close(value, expected[rank % 2][name], rtol=1e-4, atol=1e-6)
            assert mean == pytest.approx(1 + rank % 2)  # of its own first rank, not of rank 0


# - a kind of rank set that dsx does not know --------------------------------------------------------------------------


def train_a_kind_of_its_own(rank, world):
    import dsx_comm
    import dsx_zero

    groups = [dsx_comm.new_group([0, 2]), dsx_comm.new_group([1, 3])]
    data = dsx_comm.RankSet.over()
    mine = dsx_comm.RankSet(groups[rank % 2], rank // 2, 2, norm_groups=data.norm_groups, kind="personal")
    found = {}
    for stage in STAGES:
        model, optimizer = dsx_zero.shard(
            Net(seed=1 + rank % 2 if rank < 2 else 77),
            sgd,
            stage=stage,
            config=CONFIG,
            ranks_of=lambda info: mine if info.name.startswith("own") else data,
        )
        mean = model.own[1].running_mean[0].item()
        found[stage] = train(model, optimizer, rank), values(model, optimizer), mean
        optimizer.release()
    return found


def test_a_new_kind_of_rank_set_is_a_value():
    check(run_ranks(train_a_kind_of_its_own, 4), *oracle(lambda step: True, divisor=2))


# - experts that get no tokens -----------------------------------------------------------------------------------------


def reached(step_and_rank):
    """Rank 0's expert gets tokens in every step, rank 2's never, those of ranks 1 and 3 in step 1 only."""
    step, rank = step_and_rank
    return rank == 0 or (rank % 2 == 1 and step == 1)


def train_uneven_experts(rank, world, backend):
    import dsx_comm
    import dsx_zero

    dsx_comm.parallel_groups.create_expert_and_data_parallel(2)
    found = {}
    for stage in STAGES:
        net = Net(seed=1 + rank % 2, marks="ep_size_2", uses=lambda step: reached((step, rank)))
        model, optimizer = dsx_zero.shard(net, sgd, stage=stage, config=CONFIG)
        mean = model.own[1].running_mean[0].item()
        found[stage] = train(model, optimizer, rank), values(model, optimizer), mean
        optimizer.release()
    return found


@pytest.mark.parametrize("backend", ["gloo", "dsx"])
def test_ranks_whose_expert_got_no_token_join_with_zeros(backend):
    import dsx_comm  # noqa: F401  knows the backend "dsx"

    check(run_ranks(train_uneven_experts, 4, backend, backend=backend), *oracle(reached, divisor=4))


def experts_on_every_rank(rank, world):
    """As many experts as ranks: each is held by one rank, and averaged over all."""
    import dsx_comm
    import dsx_zero

    dsx_comm.parallel_groups.create_expert_and_data_parallel(2)
    found = []
    for stage in STAGES:
        model, optimizer = dsx_zero.shard(Net(seed=rank, marks="ep_size_2"), sgd, stage=stage, config=CONFIG)
        x, y = batch(rank, 0)
        F.mse_loss(model(x), y).backward()
        found.append(dsx_zero.safe_get_full_grad("own.0.weight", optimizer=optimizer))
        optimizer.release()
    plain = Net(seed=rank)
    F.mse_loss(plain(x), y).backward()
    return found, plain.own[0].weight.grad / 2


def test_an_expert_of_one_rank_is_averaged_over_all():
    for found, expected in run_ranks(experts_on_every_rank, 2):
        for grad in found:
            torch.testing.assert_close(grad, expected)


class Expert(nn.Module):
    def __init__(self):
        import dsx_zero

        super().__init__()
        with dsx_zero.Init.paused():
            self.inner = nn.Linear(WIDTH, WIDTH)
        for parameter in self.parameters():
            parameter.allreduce, parameter.group_name = False, "ep_size_2"


def experts_built_in_parts(rank, world):
    import dsx_comm
    import dsx_zero

    dsx_comm.parallel_groups.create_expert_and_data_parallel(2)
    found = []
    for stage in (1, 3):
        torch.manual_seed(rank % 2)
        with dsx_zero.Init():
            net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Expert().inner))
        divided = type(net[1][0].weight).__name__
        model, optimizer = dsx_zero.shard(net, sgd, stage=stage, config=CONFIG)
        found.append((divided, values(model, optimizer)["1.0.weight"]))
        optimizer.release()
    torch.manual_seed(rank % 2)
    nn.Linear(WIDTH, WIDTH)
    return found, nn.Linear(WIDTH, WIDTH).weight.detach()


def test_experts_are_built_in_parts_where_init_pauses():
    results = run_ranks(experts_built_in_parts, 4)
    for found, own in results:
        for divided, weight in found:
            assert divided == "PartitionedParameter"
            torch.testing.assert_close(weight, own)
    assert not torch.equal(results[0][1], results[1][1])


# - overflow, gradients, edits -----------------------------------------------------------------------------------------


def expert_net(rank, stage, **options):
    import dsx_comm
    import dsx_zero

    dsx_comm.parallel_groups.create_expert_and_data_parallel(2)
    return dsx_zero.shard(
        Net(seed=1 + rank % 2, marks="ep_size_2"),
        sgd,
        stage=stage,
        config={**CONFIG, **options.pop("config", {})},
        **options,
    )


def overflow_of_one_expert(rank, world):
    import dsx_zero

    found = []
    for stage in STAGES:
        model, optimizer = expert_net(rank, stage, precision=dsx_zero.Precision(check_overflow=True))
        x, y = batch(rank, 0)
        loss = F.mse_loss(model(x), y)
        (loss * (math.inf if rank == 3 else 1.0)).backward()
        before = values(model, optimizer)
        outcome = optimizer.step()
        after = values(model, optimizer)
        found.append((outcome.overflow, all(torch.equal(before[n], after[n]) for n in before)))
        optimizer.release()
    return found


def test_an_overflow_of_one_expert_skips_the_step_everywhere():
    assert run_ranks(overflow_of_one_expert, 4) == [[(True, True)] * len(STAGES)] * 4


def gradients_and_edits(rank, world, stage):
    import dsx_zero

    model, optimizer = expert_net(rank, stage)
    weight = model.get_parameter("own.0.weight")
    with dsx_zero.GatheredParameters(weight, modifier_rank=1):  # the second rank that holds this expert
        weight.data.fill_(rank)
    edited = values(model, optimizer)["own.0.weight"]
    train(model, optimizer, rank, 1)
    x, y = batch(rank, 1)
    F.mse_loss(model(x), y).backward()
    norm = weight.grad.norm().item()
    whole = dsx_zero.safe_get_full_grad("own.0.weight", optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad()
    if stage < 3:
        with torch.no_grad():
            model.own[0].bias.fill_(10.0 + rank % 2)  # alike on the ranks that hold it: no mistake
    train(model, optimizer, rank, 1, start=2)
    message = ""
    if stage < 3:
        with torch.no_grad():
            model.own[0].bias.fill_(float(rank))
        with pytest.raises(dsx_zero.ZeroStateError) as raised:
            train(model, optimizer, rank, 1, start=3)
        message = str(raised.value)
    return edited.unique().tolist(), norm, whole.norm().item(), message


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_and_edits_of_experts(stage):
    for rank, (edited, norm, whole, message) in enumerate(run_ranks(gradients_and_edits, 4, stage)):
        assert edited == [2.0 + rank % 2]
        assert norm == pytest.approx(whole, rel=1e-5)
        assert "own.0.bias (written on rank 0, 2)" in message or stage == 3


def unused_expert(rank, world):
    import dsx_zero

    found = []
    for never in ((2,), (1, 3)):  # one of two holders gets no tokens; both get none
        net_options = {"ignore_unused_parameters": False}
        model, optimizer = expert_net(rank, 2, config=net_options)
        model.uses = lambda step, never=never: rank not in never
        try:
            train(model, optimizer, rank, 1)
            found.append("")
        except dsx_zero.ZeroStateError as error:
            found.append(str(error))
        optimizer.release()
    return found


def test_an_unused_expert_is_one_that_no_rank_used():
    for one, both in run_ranks(unused_expert, 4):
        assert one == ""
        assert "own.0.weight (rank 1, 3)" in both and "dense" not in both


# - refusals -----------------------------------------------------------------------------------------------------------


def refused(rank, world):
    import dataclasses

    import dsx_comm
    import dsx_zero

    logging.disable(logging.WARNING)
    data = dsx_comm.RankSet.over()
    cases = {
        "no group": {},
        "sum": {"ranks_of": lambda info: data if "dense" in info.name else dataclasses.replace(data, norm_groups=())},
        "other ranks": {"ranks_of": lambda info: dsx_comm.RankSet(data.group, (rank + 1) % 2, 2)},
        "twice": {"mpu": object(), "process_group": dsx_comm.get_world_group()},
    }
    found = {}
    for name, arguments in cases.items():
        net = Net(marks="ep_size_2" if name == "no group" else None)
        try:
            dsx_zero.shard(net, sgd, stage=1, **arguments)
        except (dsx_zero.ZeroError, dsx_comm.errors.TopologyError) as error:
            found[name] = str(error)
    dsx_comm.parallel_groups.create_expert_and_data_parallel(2)
    try:
        dsx_zero.shard(Net(marks="ep_size_2"), lambda p: dsx_comm.OneBitAdam(p, lr=0.1, freeze_step=2), stage=0)
    except dsx_zero.ZeroOptimizerError as error:
        found["1-bit"] = str(error)
    with dsx_zero.Init():
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    net[1].weight.allreduce, net[1].weight.group_name = False, "ep_size_2"
    for stage in (1, 3):
        try:
            dsx_zero.shard(net, sgd, stage=stage)
        except dsx_zero.ZeroModelError as error:
            found[f"marked late {stage}"] = str(error)
    return found


def test_what_cannot_be_is_refused_by_name():
    for found in run_ranks(refused, 2):
        assert "ep_size_2" in found["no group"] and "create_expert_and_data_parallel" in found["no group"]
        assert "norm_groups" in found["sum"]
        assert "its process group has the ranks [0, 1]" in found["other ranks"]
        assert "give one" in found["twice"]
        assert "experts" in found["1-bit"]
        for stage in (1, 3):
            late = found[f"marked late {stage}"]
            assert "1.weight" in late and "Init.paused" in late
