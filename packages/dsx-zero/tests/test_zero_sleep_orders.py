"""Sleep and wake (`offload_states`, `reload_states`) in any order with everything else a post-training loop calls.

Two equal models run side by side. One sleeps and wakes; the other never does, and repeats the calls that the first one
did not refuse. Results and, at the end, all values must be bitwise identical. A refusal has to name the way out, and
nothing may have changed by it.
"""

from __future__ import annotations

import random

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

WIDTH = 24


class Net(nn.Module):
    """Three blocks, a tied weight, a frozen bias; with `lora` everything but the adapters is frozen."""

    def __init__(self, dtype, lora):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.down = self.up = None
        if lora:
            self.requires_grad_(False)
            self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(3))
            self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in range(3))
        self.to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            more = 0 if self.down is None else self.up[i](self.down[i](x))
            x = x + torch.tanh(block(x) + more) * self.scale
        return torch.log_softmax(self.head(x).float(), -1)


class Player:
    """A sharded model and the calls of a post-training loop on it, by name."""

    def __init__(self, rank, stage, dtype, lora):
        self.model, self.optimizer = dsx_zero.shard(
            Net(dtype, lora),
            lambda members: torch.optim.AdamW([p for p in members if p.requires_grad], lr=1e-2),
            config={"stage": stage, "stage3_param_persistence_threshold": 30},
        )
        generator = torch.Generator().manual_seed(rank + 7)
        self.tokens = torch.randint(0, 11, (4, 6), generator=generator)

    def step(self):
        self.model(self.tokens).mean().backward()
        self.optimizer.step(max_norm=0.3)
        self.optimizer.zero_grad()

    def log_probs(self):
        with torch.no_grad():
            return self.model(self.tokens)

    def generate(self):
        with dsx_zero.unwrap_model_for_generation(self.model) as model:
            tokens = self.tokens
            for _ in range(3):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        return tokens

    def gather(self):
        with dsx_zero.GatheredParameters(self.model):
            return [p.detach().clone() for p in self.model.parameters()]

    def write(self):
        """Rank 0 writes a parameter on all ranks."""
        with dsx_zero.GatheredParameters(self.model.blocks[1].weight, modifier_rank=0), torch.no_grad():
            self.model.blocks[1].weight.data[0, 0] = 0.25

    def push(self):
        """The weights, as a generator gets them."""
        found = {}
        for bucket in dsx_zero.export.weight_buckets(self.optimizer, bucket_bytes=3000):
            found |= {name: value.clone() for name, value in bucket.items()}
        return found

    def save(self):
        found = []
        for part in self.optimizer.slices():
            found += [part.param, part.master, *part.states.values()]
        return [t.detach().clone() for t in found if isinstance(t, torch.Tensor)]

    def state(self):
        return [values["param"].clone() for values in self.optimizer.state_dict()["slices"].values()]

    def model_state(self):
        found = self.model.state_dict()
        return {name: None if self.optimizer.runtime.stage == 3 else value.clone() for name, value in found.items()}

    def full_state(self):
        return dsx_zero.full_state_dict(self.optimizer)

    def sleep(self):
        self.optimizer.offload_states()

    def sleep_states(self):
        self.optimizer.offload_states(["optim_states", "hp_params", "lp_grads", "contiguous_grad_buffer"])

    def sleep_parameters(self):
        self.optimizer.offload_states(["lp_params"], non_blocking=True)

    def wake_parameters(self):
        self.optimizer.reload_states(include=["lp_params"])

    def wake(self):
        self.optimizer.reload_states()

    def empty_cache(self):
        self.optimizer.free_gathered()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def bare_step(self):
        self.optimizer.step()

    def synchronize(self):
        self.optimizer.synchronize()

    def reload(self):
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def master(self):
        parameter = [p for p in self.model.parameters() if p.requires_grad][-1]
        return dsx_zero.safe_get_full_fp32_param(parameter)


ORDER = ("sleep", "push", "log_probs", "generate", "gather", "save", "state", "wake", "step", "full_state")
MORE = (
    "sleep_states", "sleep_parameters", "wake_parameters", "write", "model_state", "empty_cache", "zero_grad",
    "bare_step", "synchronize", "reload", "master",
)  # fmt: skip
SLEEPING = {"sleep", "sleep_states", "sleep_parameters", "wake_parameters", "wake"}


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def play(sleeper, waker, calls):
    """Returns the calls as they went, a refused one with "!"."""
    went = []
    for name in calls:
        try:
            found = getattr(sleeper, name)()
        except dsx_zero.ZeroStateError as error:
            assert "call reload_states() on every rank first" in str(error), (went, name, str(error))
            went.append(f"{name}!")
            continue
        went.append(name)
        if name not in SLEEPING:
            assert same(found, getattr(waker, name)()), went
    return went


def played(rank, world, stage, dtype, lora, orders):
    sleeper, waker = Player(rank, stage, dtype, lora), Player(rank, stage, dtype, lora)
    went = [play(sleeper, waker, ("step", *calls, "wake", "step", "save", "gather")) for calls in orders]
    assert same(sleeper.full_state(), waker.full_state())
    return went


def orders_of(names, seed, count):
    source, found = random.Random(seed), []
    for _ in range(count):
        calls = list(names)
        source.shuffle(calls)
        found.append(tuple(calls))
    return found


ORDERS = orders_of(ORDER, 44, 30)
CASES = [
    (stage, world, dtype, lora)
    for stage in range(4)
    for world in (1, 2)
    for dtype in (torch.float32, torch.bfloat16)
    for lora in (False, True)
]
SAMPLE = {(0, 1, torch.float32, False), (1, 2, torch.bfloat16, True), (2, 2, torch.bfloat16, False),
          (3, 2, torch.bfloat16, True), (3, 2, torch.float32, False)}  # fmt: skip


def test_the_orders_differ():
    assert len(set(ORDERS)) == 30


@pytest.mark.parametrize(
    ("stage", "world", "dtype", "lora"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow) for case in CASES],
)
def test_thirty_orders_have_the_bits_of_a_run_without_sleep(stage, world, dtype, lora):
    went = run_ranks(played, world, stage, dtype, lora, ORDERS)
    assert all(one == went[0] for one in went)  # every rank refuses the same
    asleep = [calls[calls.index("sleep") : calls.index("wake")] for calls in went[0] if "sleep" in calls]
    done = {name for calls in asleep for name in calls}
    assert {"push", "save", "state", "log_probs!", "generate!", "gather!", "step!", "full_state!"} <= done
    assert not done & {"push!", "save!", "state!", "log_probs", "generate", "gather", "step", "full_state"}


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_random_calls_have_the_bits_of_a_run_without_sleep(stage, world, seed):
    source = random.Random(seed)
    calls = [[source.choice(ORDER + MORE) for _ in range(12)] for _ in range(12)]
    run_ranks(played, world, stage, torch.bfloat16, bool(seed % 2), calls)
