"""QK-clip behind the step of a sharded optimizer, against the published rule written out over heads on whole weights.

Gradients are small whole numbers where bits are compared, so that their means over ranks have no rounding.
"""

import math

import pytest
import torch
from dsx_testkit import run_ranks
from dsx_zero.qk_clip import QKClip, largest_logits
from torch import nn

dsx_ops = pytest.importorskip("dsx_ops")

HEADS, SIZE, WIDTH = 6, 5, 7
CONFIG = {"stage3_param_persistence_threshold": 0}


class Separate(nn.Module):
    """Projections of their own; `keys` heads of keys, with a bias on the queries."""

    def __init__(self, keys=HEADS):
        super().__init__()
        self.num_heads = HEADS
        self.q_proj = nn.Linear(WIDTH, HEADS * SIZE)
        self.k_proj = nn.Linear(WIDTH, keys * SIZE, bias=False)


class Fused(nn.Module):
    def __init__(self, keys=HEADS):
        super().__init__()
        self.num_heads, self.num_key_value_heads = HEADS, keys
        self.qkv_proj = nn.Linear(WIDTH, (HEADS + 2 * keys) * SIZE, bias=False)


class Latent(nn.Module):
    """As DeepSeek-V3: per head queries without and with position, keys without position, and values."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = HEADS, 4, 3, 2
        self.q_b_proj = nn.Linear(WIDTH, HEADS * 7, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(WIDTH, 5 + 3, bias=False)
        self.kv_b_proj = nn.Linear(5, HEADS * 6, bias=False)


class Model(nn.Module):
    """Not attention itself: its gradients are whole numbers, and logits are handed in."""

    KINDS = {"separate": Separate, "grouped": lambda: Separate(2), "fused": lambda: Fused(3), "latent": Latent}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleDict({name: make() for name, make in self.KINDS.items()})
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, seed):
        generator, total = torch.Generator().manual_seed(seed), 0.0
        for parameter in self.parameters():
            total = total + (parameter * torch.randint(-2, 3, parameter.shape, generator=generator).float()).sum()
        return total


def logits(kind, step, rank, micro=0):
    """Some below the threshold, some above, other ones on each rank and in each micro-batch."""
    seed = 1000 * list(Model.KINDS).index(kind) + 100 * step + 10 * micro + rank
    return torch.rand(HEADS, generator=torch.Generator().manual_seed(seed)) * 8


def factors(kind, step, world, threshold, micros):
    largest = torch.stack([logits(kind, step, r, m) for r in range(world) for m in range(micros)]).amax(0)
    keys = {"separate": HEADS, "grouped": 2, "fused": 3, "latent": HEADS}[kind]
    for group in range(keys):
        heads = slice(group * HEADS // keys, (group + 1) * HEADS // keys)
        largest[heads] = largest[heads].max()
    return [min(1.0, threshold / s.item()) for s in largest], keys


def published(model, step, world, threshold, alpha, micros=1):
    """The rule on whole weights, head by head, in float64."""
    for kind, block in model.blocks.items():
        gammas, keys = factors(kind, step, world, threshold, micros)
        named = dict(block.named_parameters())
        rows = {name: p.detach().double() for name, p in named.items()}
        for head, gamma in enumerate(gammas):
            key = head * keys // HEADS
            first = head == key * (HEADS // keys)  # a shared key is clipped once
            if kind in ("separate", "grouped"):
                for name in ("q_proj.weight", "q_proj.bias"):
                    rows[name][head * SIZE : (head + 1) * SIZE] *= gamma**alpha
                if first:
                    rows["k_proj.weight"][key * SIZE : (key + 1) * SIZE] *= gamma ** (1 - alpha)
            elif kind == "fused":
                rows["qkv_proj.weight"][head * SIZE : (head + 1) * SIZE] *= gamma**alpha
                if first:
                    at = HEADS + key
                    rows["qkv_proj.weight"][at * SIZE : (at + 1) * SIZE] *= gamma ** (1 - alpha)
            else:
                rows["q_b_proj.weight"][7 * head : 7 * head + 4] *= gamma**alpha
                rows["q_b_proj.weight"][7 * head + 4 : 7 * head + 7] *= gamma
                rows["kv_b_proj.weight"][6 * head : 6 * head + 4] *= gamma ** (1 - alpha)
        for name, parameter in named.items():
            parameter.data.copy_(rows[name])


OPTIMIZERS = {
    "muon": lambda params: dsx_ops.Muon(params, lr=0.05),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "fused": lambda params: dsx_ops.FusedAdam(params, lr=0.05),  # writes low-precision copies itself
}
STEPS, THRESHOLD = 3, 5.0


def whole(model):
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for n, p in model.named_parameters()}  # fmt: skip


def plain(make, world, alpha, micros):
    model = Model()
    optimizer = OPTIMIZERS[make](model.parameters())
    for step in range(STEPS):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        published(model, step, world, THRESHOLD, alpha, micros)
    return whole(model)


def sharded(rank, world, make, stage, alpha, micros, config=None, dtype=None):
    import dsx_zero

    model = Model() if dtype is None else Model().to(dtype)
    model, optimizer = dsx_zero.shard(model, OPTIMIZERS[make], config={"stage": stage, **CONFIG, **(config or {})})
    clip = QKClip(optimizer, threshold=THRESHOLD, alpha=alpha)
    assert clip.layers == tuple(f"blocks.{kind}" for kind in Model.KINDS)
    for step in range(STEPS):
        for micro in range(micros):
            (model(step) / micros).backward()
            for kind, block in model.blocks.items():
                layer = block if micro else f"blocks.{kind}"  # by module or by name
                optimizer.qk_clip.observe(layer, logits(kind, step, rank, micro))
        optimizer.step()
        optimizer.zero_grad()
        assert not clip.largest()
    return whole(model)


@pytest.mark.parametrize(
    ("make", "world", "stage", "alpha", "micros"),
    [("muon", 1, 0, 0.5, 1), ("muon", 1, 3, 0.25, 2), ("muon", 2, 0, 0.5, 2), ("muon", 2, 1, 0.5, 1),
     ("muon", 3, 2, 0.0, 1), ("muon", 4, 3, 0.5, 2), ("adamw", 2, 3, 1.0, 1), ("fused", 2, 2, 0.5, 1)],
)  # fmt: skip
def test_heads_are_clipped_as_published(make, world, stage, alpha, micros):
    wanted = plain(make, world, alpha, micros)
    for found in run_ranks(sharded, world, make, stage, alpha, micros):
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name], value, rtol=2e-5, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("make", ["muon", "fused"])
def test_bits_do_not_depend_on_stage_and_place(make):
    """Two ranks each time, because their logits are a part of the result."""
    reference = run_ranks(sharded, 2, make, 0, 0.5, 1)[0]
    for stage, config in ((1, None), (2, None), (3, None), (2, {"offload_optimizer": {"device": "cpu"}})):
        for found in run_ranks(sharded, 2, make, stage, 0.5, 1, config):
            for name, value in reference.items():
                assert torch.equal(found[name], value), (stage, config, name)


def test_weights_in_16_bits_are_those_of_clipped_masters():
    found = run_ranks(compare_with_masters, 2)
    assert all(found)


def compare_with_masters(rank, world):
    import dsx_zero

    model, optimizer = dsx_zero.shard(Model().bfloat16(), OPTIMIZERS["fused"], config={"stage": 2})
    QKClip(optimizer, threshold=1e-3)
    for kind in Model.KINDS:
        optimizer.qk_clip.observe(f"blocks.{kind}", logits(kind, 0, rank))
    before = model.blocks["separate"].q_proj.weight.detach().float().clone()
    model(0).backward()
    optimizer.step()
    after = model.blocks["separate"].q_proj.weight.detach().float()
    assert after.norm() < 0.1 * before.norm()  # clipped by far
    return all(torch.equal(dsx_zero.safe_get_full_fp32_param(p).to(p.dtype), p) for p in model.parameters())


# - what is observed ---------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, keys, by_hand):
        super().__init__()
        self.num_heads, self.keys, self.by_hand = 4, keys, by_hand
        self.q_proj, self.k_proj = nn.Linear(16, 4 * 8, bias=False), nn.Linear(16, keys * 8, bias=False)
        self.v_proj, self.o_proj = nn.Linear(16, keys * 8, bias=False), nn.Linear(4 * 8, 16, bias=False)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.by_hand:
            k, v = (t.repeat_interleave(4 // self.keys, 1) for t in (k, v))
            scores = q @ k.mT / math.sqrt(8)
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
            self.max_logits = scores.detach().amax((0, 2, 3))
            out = scores.softmax(-1) @ v
        else:
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.keys != 4)
        return x + self.o_proj(out.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, by_hand, keys=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(keys, by_hand) for _ in range(2))
        for layer in self.layers:
            for p in (layer.q_proj.weight, layer.k_proj.weight):
                p.data *= 6.0
        self.recompute = False

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x.square().mean()


def rows(step, rank):
    return torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(100 * step + rank)) * 2


def watched(rank, world, stage, by_hand, recompute=False, compiled=False):
    import dsx_zero

    model = Net(by_hand)
    model.recompute = recompute
    model, optimizer = dsx_zero.shard(model, OPTIMIZERS["muon"], config={"stage": stage, **CONFIG})
    clip = QKClip(optimizer, threshold=3.0)
    seen = []
    for step in range(3):
        model(rows(step, rank)).backward()
        seen.append(torch.stack(list(clip.largest().values())))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    model(rows(9, rank))
    assert not clip.largest()  # an evaluation is not observed
    return seen, whole(model)


def by_the_rule(world):
    """Plain training on the rows of all ranks, with the logits of every head written out."""
    model = Net(True)
    optimizer, seen = OPTIMIZERS["muon"](model.parameters()), []
    for step in range(3):
        largest = []
        for rank in range(world):
            (model(rows(step, rank)) / world).backward()
            largest.append(torch.stack([layer.max_logits for layer in model.layers]))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(largest)
        for layer, found in zip(model.layers, torch.stack(largest).amax(0)):
            for head, logit in enumerate(found):
                if logit > 3.0:
                    for p in (layer.q_proj.weight, layer.k_proj.weight):
                        p.data[8 * head : 8 * head + 8] *= torch.sqrt(3.0 / logit)
    return seen, whole(model)


@pytest.mark.parametrize(
    ("world", "stage", "by_hand", "recompute"),
    [(1, 0, False, False), (2, 3, False, False), (2, 2, True, False), (2, 3, True, True), (2, 1, False, True)],
)
def test_attention_is_watched_and_trains_as_by_the_rule(world, stage, by_hand, recompute):
    seen, wanted = by_the_rule(world)
    assert any((part > 3.0).any() for step in seen for part in step)
    for rank, (observed, found) in enumerate(run_ranks(watched, world, stage, by_hand, recompute)):
        for step, logit in enumerate(observed):
            torch.testing.assert_close(logit, seen[step][rank], rtol=1e-4, atol=1e-5)
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("keys", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_largest_logits_are_those_of_the_whole_matrix(keys, causal, monkeypatch):
    monkeypatch.setattr("dsx_zero.qk_clip._AT_ONCE", 100)  # in pieces
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 9, 8, dtype=torch.float64), torch.randn(2, keys, 11, 8, dtype=torch.float64)
    scores = q @ k.repeat_interleave(4 // keys, 1).mT * 0.3
    if causal:
        scores = scores.masked_fill(~torch.ones(9, 11, dtype=torch.bool).tril(), -math.inf)
    found = largest_logits(q, k, causal=causal, scale=0.3)
    torch.testing.assert_close(found, scores.amax((0, 2, 3)).float())
    mask = torch.rand(9, 11) < 0.3
    wanted = scores.masked_fill(~mask, -math.inf).amax((0, 2, 3)).float()
    torch.testing.assert_close(largest_logits(q, k, mask, causal=causal, scale=0.3), wanted)
    added = torch.where(mask, 5.0, -math.inf)
    torch.testing.assert_close(largest_logits(q, k, added, causal=causal, scale=0.3), wanted)
    assert largest_logits(q[:0], k[:0]).eq(-math.inf).all()


# - ugly cases ---------------------------------------------------------------------------------------------------------


def ugly(rank, world):
    import dsx_zero
    from dsx_zero.errors import ZeroOptimizerError

    def made(model, **options):
        return dsx_zero.shard(model, OPTIMIZERS["muon"], config={"stage": 2, **options})[1]

    optimizer = made(Model())
    for wrong, words in (
        ({"threshold": 0.0}, "threshold"), ({"threshold": math.nan}, "threshold"), ({"alpha": 2.0}, "alpha"),
        ({"layers": ["blocks.nothing"]}, "no module blocks.nothing"), ({"layers": ["head"]}, "expected a module with"),
        ({"heads": 7}, "expected 7 heads"), ({"heads": 0}, "number of query heads"),
    ):  # fmt: skip
        with pytest.raises(ZeroOptimizerError, match=words):
            QKClip(optimizer, **wrong)
        assert optimizer.qk_clip is None
    clip = QKClip(optimizer, layers=["blocks.fused"])
    with pytest.raises(ZeroOptimizerError, match="has one already"):
        QKClip(optimizer)
    with pytest.raises(ZeroOptimizerError, match=r"scores.detach\(\).amax"):
        clip.observe("blocks.fused", torch.zeros(HEADS - 1))
    with pytest.raises(ZeroOptimizerError, match=r"expected one of blocks\.fused"):
        clip.observe("blocks.latent", torch.zeros(HEADS))
    model = optimizer.runtime.model
    model(0).backward()
    with pytest.raises(ZeroOptimizerError, match="no logits were observed"):
        optimizer.step()

    optimizer = made(Model())
    model, clip = optimizer.runtime.model, QKClip(optimizer, threshold=1.0)
    twin = made(Model())
    for step in range(2):
        if rank == 0:  # one rank observes one layer only; not finite ones do not count
            found = torch.full((HEADS,), 0.5)
            found[1], found[2] = math.inf, math.nan
            clip.observe("blocks.separate", found)
        else:
            clip.observe("blocks.latent", torch.full((HEADS,), -3.0))
        for each in (optimizer, twin):
            each.runtime.model(step).backward()
            each.step()
            each.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.runtime.model.parameters()))

    model.blocks["separate"].k_proj.weight.requires_grad_(False)  # queries alone are not clipped either
    clip.observe("blocks.separate", torch.full((HEADS,), 100.0))
    for each in (optimizer, twin):
        each.runtime.model(3).backward()
        each.step()
        each.zero_grad()
    assert torch.equal(model.blocks["separate"].q_proj.weight, twin.runtime.model.blocks["separate"].q_proj.weight)
    clip.close()
    assert optimizer.qk_clip is None
    model(4).backward()
    optimizer.step()  # nothing is asked for any more

    frozen = Model()
    frozen.blocks["fused"].qkv_proj.weight.requires_grad_(False)
    with pytest.raises(ZeroOptimizerError, match="does not train"):
        QKClip(made(frozen))
    with pytest.raises(ZeroOptimizerError, match="found no attention"):
        QKClip(made(nn.Linear(4, 4)))
    unsaid = Model()
    del unsaid.blocks["separate"].num_heads
    with pytest.raises(ZeroOptimizerError, match=r"does not say its heads.*heads=\.\.\."):
        QKClip(made(unsaid))
    late = dsx_zero.shard(
        Model(),
        OPTIMIZERS["adamw"],
        config={"stage": 2, "offload_optimizer": {"device": "cpu", "late_update_after": 1}},
    )[1]
    with pytest.raises(ZeroOptimizerError, match="late_update_after"):
        QKClip(late)


@pytest.mark.parametrize("world", [1, 2])
def test_ordinary_mistakes_have_a_name(world):
    run_ranks(ugly, world)


def skipped(rank, world):
    """A step that overflows changes nothing, and its logits count in the next one: the weights are the same."""
    import dsx_zero

    model, optimizer = dsx_zero.shard(Model().half(), OPTIMIZERS["adamw"], config={"stage": 2})
    clip = QKClip(optimizer, threshold=1.0, layers=["blocks.separate"])
    before = whole(model)
    clip.observe("blocks.separate", torch.full((HEADS,), 4.0))
    (model(0) * (math.inf if rank == 0 else 1.0)).backward()
    assert optimizer.step().overflow
    optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in whole(model).items())
    assert clip.largest()["blocks.separate"].eq(4.0).all()


def test_a_skipped_step_clips_nothing():
    run_ranks(skipped, 2)


def messages(rank, world):
    import dsx_comm
    import dsx_zero

    sent, plain_all_reduce = [], dsx_comm.all_reduce

    def all_reduce(tensor, op=dsx_comm.ReduceOp.SUM, **options):
        if op == dsx_comm.ReduceOp.MAX:
            sent.append(tensor.numel())
        return plain_all_reduce(tensor, op=op, **options)

    dsx_comm.all_reduce = all_reduce
    try:
        model, optimizer = dsx_zero.shard(Model(), OPTIMIZERS["muon"], config={"stage": 3, **CONFIG})
        clip = QKClip(optimizer)
        for kind in Model.KINDS:
            clip.observe(f"blocks.{kind}", logits(kind, 0, rank))
        model(0).backward()
        optimizer.step()
    finally:
        dsx_comm.all_reduce = plain_all_reduce
    return sent


def test_the_maxima_of_all_layers_are_one_message():
    assert run_ranks(messages, 2) == [[len(Model.KINDS) * HEADS]] * 2


def compiled(rank, world, how):
    """A layer in compiled code is not seen; its heads must not stay as they are without a word."""
    import dsx_zero
    from dsx_zero.errors import ZeroOptimizerError

    model = Net(False)
    if how == "wrapped":
        model.layers[1] = torch.compile(model.layers[1], backend="eager")
    model, optimizer = dsx_zero.shard(model, OPTIMIZERS["muon"], config={"stage": 2, **CONFIG})
    if how == "in place":
        model.layers[1].compile(backend="eager")
    clip = QKClip(optimizer, threshold=3.0)
    hidden = clip.layers[1]
    model(rows(0, rank)).backward()
    assert set(clip.largest()) == {"layers.0"}
    with pytest.raises(ZeroOptimizerError, match=rf"of {hidden}, which are compiled.*observe"):
        optimizer.step()
    optimizer.zero_grad()
    model(rows(0, rank)).backward()
    clip.observe(hidden, torch.ones(4))
    optimizer.step()


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_compiled_attention_is_refused_by_name_until_it_is_observed(how):
    run_ranks(compiled, 2, how, timeout=120)
