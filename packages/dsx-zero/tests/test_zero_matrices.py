"""Muon on equal slices: the matrices are brought together at the step, and training has the bits of the plain
optimizer's, whatever the stage, the number of ranks, accumulation and clipping.

Gradients here are small whole numbers, so that their sums, their means and the norm have no rounding that depends on an
order.
"""

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

dsx_ops = pytest.importorskip("dsx_ops")


class Model(nn.Module):
    """Matrices of several forms, a stack of them, a tensor of queries, keys and values, and vectors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(12, 20) for _ in range(3))
        self.qkv = nn.Parameter(torch.randn(20, 9))
        self.experts = nn.Parameter(torch.randn(5, 4, 6))
        self.tall = nn.Parameter(torch.randn(33, 2))
        self.scale = nn.Parameter(torch.randn(7))

    def forward(self, seeds):
        total = 0.0
        for seed in seeds:
            generator = torch.Generator().manual_seed(int(seed))
            for block in self.blocks:
                total = total + block(torch.randint(-2, 3, (12,), generator=generator).float()).dot(
                    torch.randint(-1, 2, (20,), generator=generator).float()
                )
            for parameter in (self.qkv, self.experts, self.tall, self.scale):
                numbers = torch.randint(-2, 3, parameter.shape, generator=generator).float()
                total = total + (parameter * numbers).sum()
        return total / 2  # two seeds


def torchs(model):
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    groups = [{"params": matrices[:2], "adjust_lr_fn": "match_rms_adamw"}, {"params": matrices[2:], "nesterov": False}]
    return torch.optim.Muon(groups, lr=0.02, weight_decay=0.25, momentum=0.75, ns_steps=4)


def ours(model, **settings):
    named = dict(model.named_parameters())
    own = {"qkv": {"split_rows": [8, 6, 6]}, "experts": {"stacked": True, "split_columns": 2}, "tall": {}}
    rest = [p for name, p in named.items() if name not in own]
    groups = [{"params": [named[name]], **more} for name, more in own.items()]
    return dsx_ops.Muon([*groups, {"params": rest}], lr=0.03, weight_decay=0.25, momentum=0.75, **settings)


MAKERS = {
    "torch": torchs,
    "ours": ours,
    "ours in bf16": lambda model: ours(model, ns_dtype="bfloat16", decay="cautious", adjust_lr_fn="unit_rms_norm"),
    "gram": lambda model: ours(model, ns_method="gram", nesterov=False),
}
STEPS = 3


def plain(make, accumulation, clip):
    model = Model()
    optimizer = MAKERS[make](model)
    for step in range(STEPS):
        for micro in range(accumulation):
            (model([2 * step + micro, 100 + micro]) / accumulation).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def sharded(rank, world, make, stage, accumulation, clip, config=None):
    import dsx_zero

    model = Model()
    optimizer = MAKERS[make](model)
    model, optimizer = dsx_zero.shard(
        model, optimizer, config={"stage": stage, "stage3_param_persistence_threshold": 0, **(config or {})}
    )
    for step in range(STEPS):
        for micro in range(accumulation):
            (model([2 * step + micro, 100 + micro]) / accumulation).backward()
        optimizer.step(max_norm=clip)
        optimizer.zero_grad()
    return {n: (p.full_tensor() if stage == 3 else p).detach().clone() for n, p in model.named_parameters()}


def same_bits(make, world, stage, accumulation=1, clip=None, config=None):
    wanted = plain(make, accumulation, clip)
    for found in run_ranks(sharded, world, make, stage, accumulation, clip, config):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("make", "world", "stage", "accumulation", "clip"),
    [
        ("torch", 1, 3, 1, None), ("torch", 2, 1, 4, 2.0), ("torch", 3, 2, 1, None), ("torch", 4, 3, 4, 2.0),
        ("torch", 2, 0, 1, 2.0),
        ("ours", 1, 2, 1, 2.0), ("ours", 2, 3, 4, None), ("ours", 3, 1, 1, 2.0), ("ours", 4, 2, 1, None),
        ("ours", 2, 0, 1, None),
        ("ours in bf16", 2, 3, 1, None), ("ours in bf16", 4, 1, 1, 2.0), ("gram", 3, 3, 1, 2.0),
    ],
)  # fmt: skip
def test_training_has_the_bits_of_the_plain_optimizer(make, world, stage, accumulation, clip):
    same_bits(make, world, stage, accumulation, clip)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 2.0])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("make", MAKERS)
def test_everywhere(make, stage, world, accumulation, clip):
    same_bits(make, world, stage, accumulation, clip)


# - what went wrong elsewhere, silently --------------------------------------------------------------------------------


def test_states_on_the_host_have_the_same_bits():
    same_bits("ours", 2, 2, clip=2.0, config={"offload_optimizer": {"device": "cpu"}})


def clipped_by_hand(rank, world, stage):
    """Parameters made inside of `Init`, several micro-batches, and clipping by torch's function before the step."""
    import dsx_zero

    config = {"stage": stage, "stage3_param_persistence_threshold": 0}
    with dsx_zero.Init():
        model = Model()
    model, optimizer = dsx_zero.shard(model, ours(model), config=config)
    for step in range(STEPS):
        for micro in range(2):
            (model([2 * step + micro, 100 + micro]) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()
    fired = sum("momentum_buffer" in s.states for s in optimizer.slices())
    assert fired, "no matrix has momentum: they were stepped by another rule"
    return {n: (p.full_tensor() if stage == 3 else p).detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 3])
def test_init_accumulation_and_clipping_by_hand(stage):
    wanted = plain("ours", 2, 2.0)
    for found in run_ranks(clipped_by_hand, 2, stage):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


# - messages -----------------------------------------------------------------------------------------------------------


def counted(rank, world, stage, make):
    import dsx_comm
    import dsx_zero

    sent, plain_all_to_all = [], dsx_comm.all_to_all_single

    def all_to_all(output, source, receive, send, **options):
        sent.append((source.nbytes, source.numel(), sum(n for r, n in enumerate(send) if r != rank)))
        return plain_all_to_all(output, source, receive, send, **options)

    dsx_comm.all_to_all_single = all_to_all
    try:
        model = Model()
        config = {"stage": stage, "stage3_param_persistence_threshold": 0}
        model, optimizer = dsx_zero.shard(model, MAKERS[make](model), config=config)
        model([1, 2]).backward()
        optimizer.step()
    finally:
        dsx_comm.all_to_all_single = plain_all_to_all
    states = {s.name: s.states for s in optimizer.slices()}
    momentum = sum(found["momentum_buffer"].numel() for found in states.values() if "momentum_buffer" in found)
    return sent, momentum


@pytest.mark.parametrize(("make", "itemsize"), [("torch", 2), ("ours", 4), ("ours in bf16", 2)])
def test_each_element_travels_once_in_each_direction(make, itemsize):
    found = run_ranks(counted, 3, 3, make)
    elements = sum(p.numel() for name, p in Model().named_parameters() if p.dim() > 1)
    if make == "torch":
        elements = sum(p.numel() for p in Model().parameters() if p.dim() == 2)
    assert sum(momentum for _, momentum in found) == elements
    for sent, momentum in found:
        assert sum(numel for _, numel, _ in sent) <= 2 * elements  # what it owns comes back from it
        assert all(nbytes == itemsize * numel for nbytes, numel, _ in sent)
    assert sum(numel for sent, _ in found for _, numel, _ in sent) == 2 * elements
    assert sum(away for sent, _ in found for _, _, away in sent) < 2 * elements  # its own pieces do not leave a rank


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0)])
def test_nothing_is_sent_where_a_rank_has_whole_matrices(world, stage):
    assert all(not sent for sent, _ in run_ranks(counted, world, stage, "ours"))


# - states, settings, hooks, frozen parameters -------------------------------------------------------------------------


def first_steps(rank, world, make, stage):
    import dsx_zero

    model = Model()
    model, optimizer = dsx_zero.shard(
        model, MAKERS[make](model), config={"stage": stage, "stage3_param_persistence_threshold": 0}
    )
    for step in range(2):
        model([2 * step, 100]).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: (p.full_tensor() if stage == 3 else p).detach().clone() for n, p in model.named_parameters()}
    return weights, dsx_zero.full_state_dict(optimizer)


def go_on(rank, world, make, stage, weights, states):
    import dsx_zero

    model = Model()
    made = MAKERS[make](model)
    model.load_state_dict(weights)
    model, optimizer = dsx_zero.shard(model, made, config={"stage": stage, "stage3_param_persistence_threshold": 0})
    dsx_zero.load_full_state_dict(optimizer, states)
    model([4, 100]).backward()
    optimizer.step()
    return {n: (p.full_tensor() if stage == 3 else p).detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("make", "before", "after"), [("torch", (2, 3), (3, 1)), ("ours", (3, 2), (1, 3))])
def test_states_go_on_with_another_number_of_ranks(make, before, after):
    weights, states = run_ranks(first_steps, before[0], make, before[1])[0]
    wanted = plain(make, 1, None)
    for found in run_ranks(go_on, after[0], make, after[1], weights, states):
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


def around_a_step(rank, world):
    import dsx_zero

    model = Model()
    inner = ours(model)
    calls = []
    inner.register_step_pre_hook(lambda *_: calls.append("before"))
    inner.register_step_post_hook(lambda *_: calls.append("after"))
    model, optimizer = dsx_zero.shard(model, inner, stage=2)
    model([1, 2]).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert calls == ["before", "after"]

    before = model.experts.detach().clone(), model.tall.detach().clone()
    model.experts.requires_grad_(False)  # its matrices drop out of the plan, on all ranks
    model([3, 4]).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(model.experts, before[0]) and not torch.equal(model.tall, before[1])
    model.experts.requires_grad_(True)
    model([3, 4]).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(model.experts, before[0])

    model([5, 6]).backward()
    optimizer.param_groups[0]["split_rows"] = 1
    with pytest.raises(dsx_zero.ZeroOptimizerError, match=r"param_groups\[0\] of Muon was changed.*3 of \(8, 9\)"):
        optimizer.step()
    optimizer.param_groups[0]["split_rows"] = [8, 6, 6]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    now = model.tall.detach().clone()
    optimizer.step()
    assert torch.equal(model.tall, now)


def test_hooks_frozen_parameters_and_changed_settings():
    run_ranks(around_a_step, 2)


class WithOwnStep(torch.optim.Muon):
    """Its step is not the one that dsx knows."""

    def step(self, closure=None):
        super().step(closure)
        self.called = True


def of_a_subclass(rank, world):
    import dsx_zero

    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 5, bias=False))
    inner = WithOwnStep(model.parameters(), lr=0.1)
    model, optimizer = dsx_zero.shard(model, inner, stage=2)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert inner.called
    assert all(tuple(s.shape) for s in optimizer.slices())
    assert [s.stop - s.start for s in optimizer.slices() if s.stop > s.start] in ([24], [20])  # whole tensors


def test_a_subclass_with_a_step_of_its_own_gets_whole_tensors():
    run_ranks(of_a_subclass, 2)


# - slices of tensors --------------------------------------------------------------------------------------------------


class Cut(nn.Module):
    """Matrices cut by rows, by columns, by rows in three fused parts, a stack cut by columns, and whole tensors."""

    DIMS = {"up": (0, 1), "down": (1, 1), "fused": (0, 3), "experts": (2, 1)}

    def __init__(self, rank=0, size=1):
        super().__init__()
        torch.manual_seed(0)
        shapes = {
            "up": (12, 10),
            "down": (10, 12),
            "fused": (24, 5),
            "experts": (3, 4, 8),
            "plain": (9, 7),
            "bias": (9,),
        }
        for name, shape in shapes.items():
            parameter = nn.Parameter(self.own(name, torch.randn(shape), rank, size).contiguous())
            if size > 1 and name in self.DIMS:
                parameter.tensor_model_parallel = True
                parameter.partition_dim, parameter.partition_stride = self.DIMS[name]
            setattr(self, name, parameter)
        self.rank, self.size = rank, size

    @classmethod
    def own(cls, name, whole, rank, size):
        if name not in cls.DIMS:
            return whole
        dim, parts = cls.DIMS[name]
        return torch.cat([part.chunk(size, dim)[rank] for part in whole.chunk(parts, dim)], dim)

    def forward(self, seed):
        generator, total = torch.Generator().manual_seed(seed), 0.0
        whole = {
            "up": (12, 10),
            "down": (10, 12),
            "fused": (24, 5),
            "experts": (3, 4, 8),
            "plain": (9, 7),
            "bias": (9,),
        }
        for name, parameter in self.named_parameters():
            numbers = torch.randint(-2, 3, whole[name], generator=generator).float()
            total = total + (parameter * self.own(name, numbers, self.rank, self.size)).sum()
        return total


def muon_of(model):
    fused = {"params": [model.fused], "split_rows": 3, "stacked": None}
    rest = {"params": [p for p in model.parameters() if p is not model.fused], "stacked": True}
    return dsx_ops.Muon([fused, rest], lr=0.05, weight_decay=0.25, momentum=0.75)


def train_cut(rank, world, stage):
    import dsx_comm
    import dsx_zero

    registry = dsx_comm.GroupRegistry(dsx_comm.ProcessTopology(("data", "model"), (world // 2, 2)))
    dsx_comm.parallel_groups.use(registry)
    part = registry.axis("model").rank
    model = Cut(part, 2)
    model, optimizer = dsx_zero.shard(
        model, muon_of(model), config={"stage": stage, "stage3_param_persistence_threshold": 0}
    )
    for step in range(2):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return part, {n: (p.full_tensor() if stage == 3 else p).detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (4, 0), (4, 1), (4, 3)])
def test_slices_are_joined_to_whole_matrices(world, stage):
    model = Cut()
    optimizer = muon_of(model)
    for step in range(2):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for part, found in run_ranks(train_cut, world, stage):
        for name, value in model.named_parameters():
            assert torch.equal(found[name], Cut.own(name, value.detach(), part, 2)), name


def after_a_failure(rank, world):
    """As in a pipeline, whose stages agree behind the step: a rank that has failed must not keep the others waiting."""
    import dsx_zero

    model = Model()
    model, optimizer = dsx_zero.shard(model, ours(model), stage=2)
    optimizer.control.defer_failures()
    model([1, 2]).backward()
    if rank == 1:

        def fail(*arguments):
            raise ValueError("the masters of rank 1")

        optimizer.update.edits.take_over = fail
        with pytest.raises(ValueError, match="rank 1"):
            optimizer.step()
    else:
        optimizer.step()


def test_a_rank_that_has_failed_takes_part_in_the_messages():
    run_ranks(after_a_failure, 2)
