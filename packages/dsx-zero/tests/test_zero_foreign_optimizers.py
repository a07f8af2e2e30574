"""Optimizers of other packages: whether ranks may divide their step is found out by a trial, training is that of one
process, and checkpoints go on at another stage and number of ranks.

Classes of packages are tried where the packages are installed. Classes written here have the same kinds of rules and
states, so that the mechanism is tested without them.
"""

import contextlib
import importlib
import random
import tempfile

import dsx_checkpoint
import dsx_zero
import numpy
import pytest
import torch
from dsx_testkit import run_ranks
from dsx_zero.errors import ZeroOptimizerError
from dsx_zero.step.masters import needs_whole_tensors
from dsx_zero.step.trial import check_divisible
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

CONFIG = {"stage3_param_persistence_threshold": 0}
LAYOUTS = [((2, 3), (4, 1)), ((4, 2), (1, 3)), ((1, 0), (2, 2)), ((2, 1), (2, 0))]
"""(ranks, stage) before and after; with powers of two the mean of equal gradients is exact, which Shampoo's inverses
need.
"""


class Rule(torch.optim.Optimizer):
    """Base of the classes here; `update` gives what is taken from a parameter."""

    def __init__(self, params, **settings):
        super().__init__(params, {"lr": 0.05, **settings})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * self.update(p, p.grad, self.state[p], group))

    def update(self, p, grad, state, group):
        raise NotImplementedError


class ByElement(Rule):
    def update(self, p, grad, state, group):
        return state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(grad)


class Trust(Rule):
    """The step of a tensor has its norms, as LARS and LAMB: a slice would have others, without an error."""

    def update(self, p, grad, state, group):
        buffer = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(grad)
        return buffer * (p.norm() / (buffer.norm() + 1e-6))


class Projector:
    """As GaLore's: singular vectors that are computed anew after some steps, in an object."""

    def __init__(self, rank, gap):
        self.rank, self.gap, self.vectors, self.count, self.kind = rank, gap, None, 0, "right"

    def low(self, grad):
        if self.count % self.gap == 0:
            self.vectors = torch.linalg.svd(grad, full_matrices=False).Vh[: self.rank].clone()
        self.count += 1
        return grad @ self.vectors.T


class Projected(Rule):
    """Adam in a space of low rank where a group says `rank`, as GaLore's class, which is called AdamW."""

    def update(self, p, grad, state, group):
        low = grad
        if "rank" in group:
            low = state.setdefault("projector", Projector(group["rank"], group["gap"])).low(grad)
        state["step"] = state.get("step", 0) + 1
        first = state.setdefault("exp_avg", torch.zeros_like(low)).lerp_(low, 0.1)
        second = state.setdefault("exp_avg_sq", torch.zeros_like(low)).lerp_(low.square(), 0.01)
        found = first / (1 - 0.9 ** state["step"]) / ((second / (1 - 0.99 ** state["step"])).sqrt() + 1e-8)
        return found @ state["projector"].vectors if "rank" in group else found


class Nested(Rule):
    """Tensors in a tuple in a dictionary, beside what is no number (SOAP, ScalableShampoo, Kron have such ones)."""

    def update(self, p, grad, state, group):
        buffer = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(grad)
        if grad.dim() != 2:
            return buffer
        if "sides" not in state:
            state["sides"] = {"both": tuple(torch.eye(n) * 0.1 for n in grad.shape), "names": ("left", "right")}
        left, right = state["sides"]["both"]
        left.add_(grad @ grad.T)
        right.add_(grad.T @ grad)
        return torch.linalg.solve(left, buffer) @ torch.linalg.inv(right)


class Coupled(Rule):
    """One step size from all gradients, as Prodigy's and D-Adaptation's."""

    def update(self, p, grad, state, group):
        every = [q.grad.norm() for q in group["params"] if q.grad is not None]
        return grad / (sum(every) + 1e-6)


def with_rank(params, **more):
    params = list(params)
    matrices = [p for p in params if p.dim() == 2]
    return [{"params": matrices, "rank": 3, **more}, {"params": [p for p in params if p.dim() != 2]}]


def of_package(package, name, **settings):
    return lambda params: getattr(importlib.import_module(package), name)(params, **settings)


def galore(params):
    groups = with_rank(params, update_proj_gap=2, scale=1.0, proj_type="std")
    return of_package("galore_torch", "GaLoreAdamW", lr=0.02)(groups)


def apollo(params):
    more = {"update_proj_gap": 2, "scale": 1.0, "proj_type": "std", "proj": "random", "scale_type": "channel"}
    return of_package("apollo_torch", "APOLLOAdamW", lr=0.02)(with_rank(params, **more))


MAKERS = {
    "by element": lambda params: ByElement(params),
    "trust": lambda params: Trust(params),
    "projected": lambda params: Projected(with_rank(params, gap=2)),
    "nested": lambda params: Nested(params),
    "pytorch_optimizer SOAP": of_package("pytorch_optimizer", "SOAP", lr=0.02, precondition_frequency=2),
    "pytorch_optimizer Shampoo": of_package("pytorch_optimizer", "Shampoo", lr=0.02, momentum=0.9),
    "pytorch_optimizer ScalableShampoo": of_package(
        "pytorch_optimizer", "ScalableShampoo", lr=0.02, start_preconditioning_step=2, block_size=8
    ),
    "pytorch_optimizer SPlus": of_package("pytorch_optimizer", "SPlus", lr=0.02, inverse_steps=2),
    "pytorch_optimizer Lamb": of_package("pytorch_optimizer", "Lamb", lr=0.02),
    "pytorch_optimizer CAME": of_package("pytorch_optimizer", "CAME", lr=0.02),
    "torch_optimizer Shampoo": of_package("torch_optimizer", "Shampoo", lr=0.02, momentum=0.9),
    "galore_torch GaLoreAdamW": galore,
    "apollo_torch APOLLOAdamW": apollo,
}
WHOLE = [kind for kind in MAKERS if kind != "by element"]


def needs(kind):
    if " " in kind and kind != "by element":
        pytest.importorskip(kind.split()[0])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 12, bias=False), nn.Linear(12, 5)

    def forward(self, seed):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(16, 6, generator=draw)
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))).square().mean()


def train(model, optimizer, steps):
    for step in steps:
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model):
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for n, p in model.named_parameters()}  # fmt: skip


def plain(kind, steps):
    model = Model()
    optimizer = MAKERS[kind](list(model.parameters()))
    train(model, optimizer, range(steps))
    return model, optimizer


def sharded(kind, stage):
    model = Model()
    return dsx_zero.shard(model, MAKERS[kind](list(model.parameters())), config={"stage": stage, **CONFIG})


def close(model, expected):
    for name, value in whole(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def as_one_process(rank, world, kind, stage):
    model, optimizer = sharded(kind, stage)
    train(model, optimizer, range(5))
    close(model, whole(plain(kind, 5)[0]))
    return needs_whole_tensors(optimizer.inner)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", MAKERS)
def test_training_is_that_of_one_process(kind, stage):
    needs(kind)
    assert run_ranks(as_one_process, 2, kind, stage) == [kind != "by element"] * 2


# - checkpoints --------------------------------------------------------------------------------------------------------


def save(rank, world, folder, kind, stage):
    model, optimizer = sharded(kind, stage)
    train(model, optimizer, range(3))
    dsx_checkpoint.save(folder, "here", module=model, slices=optimizer.slices(), state={})
    return [{k: v for k, v in g.items() if k in ("step", "update_counter")} for g in optimizer.param_groups]


def go_on(rank, world, folder, kind, stage, counters):
    model, optimizer = sharded(kind, stage)
    train(model, optimizer, range(world % 2))  # something to be replaced, or no states yet
    assert dsx_checkpoint.load(folder, "here", module=model, optimizer=optimizer) is not None
    for group, counter in zip(optimizer.param_groups, counters):  # which an engine's checkpoint has
        group.update(counter)
    train(model, optimizer, range(3, 6))
    close(model, whole(plain(kind, 6)[0]))


@pytest.mark.parametrize(("source", "target"), LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", WHOLE)
def test_a_checkpoint_goes_on_at_another_stage_and_number_of_ranks(tmp_path, kind, source, target):
    needs(kind)
    counters = run_ranks(save, source[0], str(tmp_path), kind, source[1])[0]
    run_ranks(go_on, target[0], str(tmp_path), kind, target[1], counters)


def test_tensors_and_numbers_in_objects_have_names_in_a_checkpoint(tmp_path):
    run_ranks(save, 2, str(tmp_path), "projected", 2)
    model, optimizer = plain("projected", 3)
    reader = dsx_checkpoint.open_checkpoint(tmp_path, "here")
    held = optimizer.state[model.second.weight]["projector"]
    torch.testing.assert_close(reader.stored("optimizer", "projector.vectors/second.weight"), held.vectors)
    assert reader.state("projector.count", "second.weight", 0, 96) == held.count == 3


# - what the trial says ------------------------------------------------------------------------------------------------


def refused(rank, world):
    model = Model()
    with pytest.raises(ZeroOptimizerError, match=r"Coupled.*depends on the others.*stage 0.*needs_whole_tensors"):
        dsx_zero.shard(model, Coupled(model.parameters()), config={"stage": 2})
    said = Coupled(model.parameters())
    said.needs_whole_tensors = False
    dsx_zero.shard(model, said, config={"stage": 2})
    model = Model()
    dsx_zero.shard(model, Coupled(model.parameters()), config={"stage": 0})


def test_a_step_that_depends_on_other_tensors_is_refused():
    run_ranks(refused, 2)
    run_ranks(one_rank_steps_all, 1)


def one_rank_steps_all(rank, world):
    model, optimizer = dsx_zero.shard(Model(), Coupled, config={"stage": 2})
    train(model, optimizer, range(3))
    expected = Model()
    train(expected, Coupled(expected.parameters()), range(3))
    close(model, whole(expected))


class OwnList(ByElement):
    """Steps the parameters that it was built with: those that take their places would stay as they are."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params)
        self.list = params

    @torch.no_grad()
    def step(self):
        for p in (p for p in self.list if p.grad is not None):
            p.sub_(0.1 * p.grad)


def test_an_optimizer_that_steps_its_own_list_is_refused():
    model = Model()
    with pytest.raises(ZeroOptimizerError, match=r"OwnList: 6 trial steps changed nothing .*lists of parameters"):
        dsx_zero.shard(model, OwnList, stage=1)
    train(model, OwnList(model.parameters()), range(1))  # the model is still a plain one


def test_a_learning_rate_of_zero_hides_nothing():
    for make, whole_tensors in ((Trust, True), (ByElement, False)):
        model = Model()
        optimizer = make(model.parameters())
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # warm-up: 0 now
        assert optimizer.param_groups[0]["lr"] == 0.0
        _, sharded_one = dsx_zero.shard(model, optimizer, config={"stage": 1})
        assert needs_whole_tensors(sharded_one.inner) == whole_tensors
        assert optimizer.param_groups[0]["lr"] == 0.0


class Trusting(torch.optim.SGD):
    """A class below one of torch's, with another step (LARS is often written so)."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(0.01 * p.grad * p.norm() / (p.grad.norm() + 1e-6))


class Subclass(torch.optim.SGD):
    """One that keeps the step."""


def test_a_class_below_torchs_with_a_step_of_its_own_is_tried():
    for make, known in ((Trusting, False), (Subclass, True), (torch.optim.SGD, True)):
        _, optimizer = dsx_zero.shard(Model(), lambda params, make=make: make(params, lr=0.1), stage=1)
        assert needs_whole_tensors(optimizer.inner) != known


class Drawing(Rule):
    """A step of random size for each tensor: slices would have two sizes."""

    def update(self, p, grad, state, group):
        return grad * torch.rand(())


class Touching(Rule):
    """Counts its steps in lists, draws random numbers of all kinds, and calls what it was given."""

    def __init__(self, params, log):
        super().__init__(params)
        self.counts, self.log = [0], log

    def update(self, p, grad, state, group):
        self.counts[0] += 1
        self.log.append(random.random() + numpy.random.rand() + float(torch.rand(())))
        return grad * 1.0


def test_steps_that_draw_random_numbers_get_whole_tensors():
    _, optimizer = dsx_zero.shard(Model(), Drawing, stage=1)
    assert needs_whole_tensors(optimizer.inner)


def test_a_trial_leaves_no_trace():
    model, log, calls = Model(), [], []
    optimizer = Touching(model.parameters(), log)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append(2))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    drawn = torch.random.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    check_divisible(optimizer, ranks=2)
    everywhere.remove()
    assert not calls and not log and optimizer.counts == [0] and not optimizer.state
    assert torch.equal(torch.random.get_rng_state(), drawn[0]) and random.getstate() == drawn[1]
    assert numpy.random.get_state()[1].tolist() == drawn[2]
    assert all(torch.equal(p, before[n]) and bool((p.grad == 1).all()) for n, p in model.named_parameters())
    assert len(optimizer.param_groups) == 1 and len(optimizer.param_groups[0]["params"]) == 5


class Strange(Rule):
    """Cannot be tried: its step wants something, so it gets whole tensors."""

    def step(self, wanted):
        raise NotImplementedError


def test_what_cannot_be_tried_gets_whole_tensors():
    _, optimizer = dsx_zero.shard(Model(), Strange, config={"stage": 1})
    assert needs_whole_tensors(optimizer.inner)


# - a group that comes later -------------------------------------------------------------------------------------------


def later(rank, world):
    models = [Model(), Model()]
    optimizers = []
    for model in models:
        optimizer = Projected([p for p in model.parameters() if p.dim() == 1])
        optimizers.append(dsx_zero.shard(model, optimizer, config={"stage": 2})[1] if model is models[0] else optimizer)
    for model, optimizer in zip(models, optimizers):
        train(model, optimizer, range(2))
        matrices = [p for p in model.parameters() if p.dim() == 2]
        optimizer.add_param_group({"params": matrices, "rank": 3, "gap": 2})
        train(model, optimizer, range(2, 5))
    assert needs_whole_tensors(optimizers[0].inner)
    close(models[0], whole(models[1]))


def test_a_group_of_another_rule_gets_whole_tensors_when_it_comes():
    run_ranks(later, 2)


# - states in codes ----------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Large enough for torchao's codes: it leaves states of fewer than 4096 elements as they are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(96, 128), nn.Linear(128, 96)

    def forward(self, seed):
        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(seed))
        return self.second(torch.tanh(self.first(x))).square().mean()


def in_codes(rank, world, name, stage, other):
    make = of_package("torchao.optim", name, lr=0.01)
    torch.compiler.set_stance("force_eager")  # each step is compiled else, which takes minutes
    reference = Wide()
    stepped = make(reference.parameters())
    train(reference, stepped, range(4))
    config = {"stage": stage, **CONFIG}
    model, optimizer = dsx_zero.shard(Wide(), make, config=config)
    train(model, optimizer, range(4))
    close(model, whole(reference))
    kinds = {type(s["exp_avg"]).__name__ for p, s in optimizer.inner.state.items() if p.numel() >= 4096}
    assert kinds == {name.replace("AdamW", "OptimState")}
    with tempfile_of_ranks() as folder:
        dsx_checkpoint.save(folder, "here", module=model, slices=optimizer.slices(), state={})
        resumed, again = dsx_zero.shard(Wide(), make, config={**config, "stage": other})
        assert dsx_checkpoint.load(folder, "here", module=resumed, optimizer=again) is not None
    assert {type(s["exp_avg"]).__name__ for p, s in again.inner.state.items() if p.numel() >= 4096} == kinds
    close(resumed, whole(model))
    train(model, optimizer, range(4, 6))
    train(resumed, again, range(4, 6))
    close(resumed, whole(model))


@contextlib.contextmanager
def tempfile_of_ranks():
    """A folder that all ranks have."""
    found = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(found)
    yield found[0]


@pytest.mark.parametrize(
    ("name", "stage", "other"), [("AdamW8bit", 3, 1), ("AdamW8bit", 0, 3), ("AdamW4bit", 2, 3), ("AdamWFp8", 3, 3)]
)
def test_torchaos_states_in_codes_are_kept_on_shards_and_through_checkpoints(name, stage, other):
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    run_ranks(in_codes, 2, name, stage, other)
