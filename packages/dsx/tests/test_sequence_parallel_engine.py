"""`sequence_parallel_size` in an engine: losses, norms and weights are those of plain torch with whole sequences, at
every ZeRO stage, with offload, recomputation, tiles, slices, experts, LoRA, accumulation, evaluation and checkpoints.
"""

import random

import dsx
import dsx_activations
import pytest
import torch
from dsx.engine.errors import EngineArgumentError
from dsx.utils import groups
from dsx_comm import GroupRegistry, Mpu, ProcessTopology, parallel_groups
from dsx_testkit import RankError, run_ranks
from torch import nn
from torch.nn import functional as F

pytest.importorskip("dsx_activations")

WIDTH, WORDS, STEPS, CLIP = 16, 24, 2, 0.5


class Block(nn.Module):
    def __init__(self, tiles=0):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH),
        )
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.tiles = tiles

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).split([WIDTH, 8, 8], -1)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + (dsx_activations.run_in_tiles(self.mlp, x, tiles=self.tiles) if self.tiles else self.mlp(x))


class Lora(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Model(nn.Module):
    """A small GPT whose forward gives the sum of the losses of its tokens."""

    def __init__(self, how=""):
        super().__init__()
        torch.manual_seed(0)
        self.recomputes = how == "recomputed"
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(tiles=3 if how == "tiled" else 0) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        if how == "lora":
            self.requires_grad_(False)
            for block in self.blocks:
                block.qkv = Lora(block.qkv)

    def forward(self, tokens, targets, positions):
        x = self.embed(tokens) + self.place(positions)
        for block in self.blocks:
            x = dsx_activations.checkpoint(block, x) if self.recomputes else block(x)
        return dsx_activations.linear_cross_entropy(
            x, self.head.weight, targets, bias=self.head.bias, chunk=8, reduction="sum"
        )


def batches(number, length=13, per_batch=2):
    """Tokens and targets; different numbers of targets count in each sample."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(number):
        tokens = torch.randint(0, WORDS, (per_batch, length + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[:, : int(torch.randint(1, length, (), generator=generator))] = -100
        found.append((tokens[:, :-1], targets))
    return found


def one_process(how, replicas, accumulation):
    """Loss, norm of each update, and the weights in the end."""
    model = Model(how)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    found, data = [], iter(batches(STEPS * replicas * accumulation))
    for _ in range(STEPS):
        losses = []
        for _ in range(accumulation):
            micro = [next(data) for _ in range(replicas)]
            counted = sum((targets != -100).sum() for _, targets in micro)
            loss = sum(model(x, y, torch.arange(13)[None]) for x, y in micro) / counted
            (loss / accumulation).backward()
            losses.append(loss.item())
        norm = float(nn.utils.clip_grad_norm_(trained, CLIP))
        optimizer.step()
        optimizer.zero_grad()
        found.append((sum(losses) / accumulation, norm))
    return found, {name: p.detach().clone() for name, p in model.named_parameters()}


def config(size, stage, accumulation=1, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "sequence_parallel_size": size,
        **more,
    }


def train(engine, replicas, accumulation):
    """Losses and norms of the same updates."""
    sp = engine.sequence_parallel
    replica, found, data = groups.get_data_parallel_rank(), [], iter(batches(STEPS * replicas * accumulation))
    for _ in range(STEPS):
        losses = []
        for _ in range(accumulation):
            tokens, targets = [next(data) for _ in range(replicas)][replica]
            mine = sp.shard(targets)
            loss = sp.token_mean(engine(sp.shard(tokens), mine, sp.positions(13)), (mine != -100).sum())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append((sum(losses) / accumulation, engine.get_global_grad_norm()))
    return found


def trained(rank, world, size, how, accumulation, settings):
    engine, *_ = dsx.initialize(model=Model(how), config=settings)
    assert engine.train_batch_size() == 2 * accumulation * (world // size)
    found = train(engine, world // size, accumulation)
    with dsx.zero.GatheredParameters(list(engine.module.parameters())):
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    with torch.no_grad():
        sp = engine.eval().sequence_parallel
        tokens, targets = batches(1)[0]
        mine = sp.shard(targets)
        score = sp.token_mean(engine(sp.shard(tokens), mine, sp.positions(13)), (mine != -100).sum()).item()
    engine.destroy()
    return found, weights, score


def check(world, size, stage, how="", accumulation=1, **more):
    settings = config(size, stage, accumulation, **more)
    expected, right = one_process(how, world // size, accumulation)
    for found, weights, score in run_ranks(trained, world, size, how, accumulation, settings):
        for (loss, norm), (wanted, its_norm) in zip(found, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-5)
            assert norm == pytest.approx(its_norm, rel=1e-4)
        for name, one in weights.items():
            torch.testing.assert_close(one, right[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert score < 4


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_every_stage(stage):
    check(2, 2, stage, sequence_parallel={"order": "zigzag"})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(24))
def test_random_engines(seed):
    """Stages, numbers of ranks, orders, teams, chunks on the host, recomputation, tiles and LoRA by chance."""
    draw = random.Random(random.randrange(10**9))
    size = draw.choice([2, 2, 3, 4])
    world = size * draw.choice([1, 2] if size == 2 else [1])
    options = {
        "order": draw.choice(["plain", "zigzag"]), "overlap": draw.choice([1, 2]),
        "team": draw.choice([None, *(n for n in range(1, size + 1) if size % n == 0)]),
        "length": draw.choice([None, 13]), "kernel": draw.choice(["auto", "pieces"]),
    }  # fmt: skip
    if options["team"] in (None, size):
        options["host_chunks"] = draw.choice([None, 2])
    how = draw.choice(["", "recomputed", "tiled", "lora"])
    check(world, size, draw.randrange(4), how, draw.choice([1, 2]), sequence_parallel=options)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_beside_data_parallel_ranks_with_accumulation(stage):
    check(4, 2, stage, accumulation=2)


def test_three_ranks_with_a_ring():
    check(3, 3, 2, sequence_parallel={"order": "zigzag", "length": 13})


@pytest.mark.parametrize(
    "how, stage", [("recomputed", 3), pytest.param("tiled", 2, marks=pytest.mark.slow), ("lora", 3)]
)
def test_recomputation_tiles_and_lora(how, stage):
    check(2, 2, stage, how, sequence_parallel={"overlap": 2})


def test_offload():
    offload = {"device": "cpu"}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": offload, "stage3_param_persistence_threshold": 0}
    check(2, 2, 3, zero_optimization=zero)


def resumed(rank, world, folder):
    """A checkpoint of two ranks on one sequence is read by two data-parallel ranks, and the other way round."""
    engine, *_ = dsx.initialize(model=Model(), config=config(2, 2))
    train(engine, 1, 1)
    engine.save_checkpoint(folder, "cut")
    whole, *_ = dsx.initialize(model=Model("recomputed"), config=config(1, 3))
    whole.load_checkpoint(folder, "cut")
    assert whole.sequence_parallel is None
    assert whole.global_steps == STEPS
    for one in (engine, whole):
        with dsx.zero.GatheredParameters(list(one.module.parameters())):
            yield {name: p.detach().clone() for name, p in one.module.named_parameters()}


def read_by_others(rank, world, folder):
    first, second = resumed(rank, world, folder)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_checkpoints_do_not_know_of_it(tmp_path):
    run_ranks(read_by_others, 2, str(tmp_path))


def by_mesh(rank, world):
    """`mesh_param` is the same as the key; the groups have DeepSpeed's names."""
    engine, *_ = dsx.initialize(model=Model(), config=config(1, 1), mesh_param=(1, 2))
    assert engine.sequence_parallel.size == 2
    assert groups._get_sequence_parallel_world_size() == 2
    assert groups._get_sequence_parallel_rank() == rank
    assert groups.get_data_parallel_world_size() == 1
    assert groups._get_sequence_data_parallel_world_size() == 2
    return train(engine, 1, 1)


def test_the_mesh_of_the_call():
    expected, _ = one_process("", 1, 1)
    for found in run_ranks(by_mesh, 2):
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-5)


def own_attention(rank, world):
    """`convert: false`: the model does it by itself, and the engine gives the groups."""
    engine, *_ = dsx.initialize(model=Model(), config=config(2, 1, sequence_parallel={"convert": False}))
    assert engine.sequence_parallel is None
    return groups.get_sequence_parallel_world_size(), engine.train_batch_size()


def test_a_model_that_does_it_by_itself():
    assert run_ranks(own_attention, 2) == [(2, 2), (2, 2)]


class Sliced(nn.Module):
    """Hugging Face's, whose attention is cut into slices of heads and run over sequence shards at once."""

    def __init__(self):
        super().__init__()
        import transformers

        torch.manual_seed(0)
        self.gpt = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=32, max_position_embeddings=64,
            )
        )  # fmt: skip

    def forward(self, tokens, targets):
        logits = self.gpt(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def sliced(rank, world):
    model = Sliced()
    settings = config(2, 1, tensor_parallel={"autotp_size": 2})
    engine, *_ = dsx.initialize(model=model.gpt, config=settings)
    sp, found = engine.sequence_parallel, []
    for tokens, targets in batches(STEPS):
        mine = sp.shard(targets)
        logits = engine(input_ids=sp.shard(tokens), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), mine.flatten(), reduction="sum")
        loss = sp.token_mean(loss, (mine != -100).sum())
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    return found


def test_tensor_slices():
    pytest.importorskip("transformers")
    pytest.importorskip("dsx_pipe")
    model, expected = Sliced(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens, targets in batches(STEPS):
        loss = model(tokens, targets) / (targets != -100).sum()
        loss.backward()
        expected.append((loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))))
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(sliced, 4):
        for (loss, norm), (wanted, its_norm) in zip(found, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-4)
            assert norm == pytest.approx(its_norm, rel=1e-3)


class Experts(Model):
    """The same with experts over all ranks in the place of the second block's MLP."""

    def __init__(self):
        super().__init__()
        from dsx.moe import MoE

        expert = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.moe = MoE(WIDTH, expert, num_experts=4, ep_size=2, k=1, capacity_factor=8.0, eval_capacity_factor=8.0,
                       min_capacity=64, use_rts=False)  # fmt: skip

    def forward(self, tokens, targets, positions):
        x = self.embed(tokens) + self.place(positions)
        for block in self.blocks:
            x = block(x)
        x = x + self.moe(x)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")


def with_experts(rank, world, size):
    settings = config(size, 1)
    if size > 1:  # the layers of experts are built for groups that are there before them
        parallel_groups.use(Mpu(GroupRegistry(ProcessTopology(("data", "sequence"), (1, 2)))))
    engine, *_ = dsx.initialize(model=Experts(), config=settings)
    found = []
    for tokens, targets in batches(STEPS):
        sp = engine.sequence_parallel
        if sp is None:  # the samples are dealt out instead
            mine = targets[rank : rank + 1]
            summed = engine(tokens[rank : rank + 1], mine, torch.arange(13)[None])
        else:
            mine = sp.shard(targets)
            summed = engine(sp.shard(tokens), mine, sp.positions(13))
        loss = dsx_activations.token_mean(summed, (mine != -100).sum())
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    return found


def test_experts():
    pytest.importorskip("dsx_moe")
    by_samples, by_tokens = (run_ranks(with_experts, 2, size)[0] for size in (1, 2))
    for (loss, norm), (wanted, its_norm) in zip(by_tokens, by_samples, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert norm == pytest.approx(its_norm, rel=1e-4)


def refused(rank, world, settings, mesh):
    dsx.initialize(model=Model(), config=settings, mesh_param=mesh)


@pytest.mark.parametrize(
    "size, mesh, match",
    [
        (3, None, "got 3 on 2 ranks"),
        (1, (2, 2), r"mesh_param \(2, 2\) on 2 ranks"),
        (2, (2, 1), "expected sequence_parallel_size=2"),
        (1, (2,), "expected two numbers"),
    ],
)
def test_ranks_that_cannot_be_divided(size, mesh, match):
    with pytest.raises(RankError, match=match):
        run_ranks(refused, 2, config(size, 0), mesh)


def test_mistakes_in_the_configuration():
    with pytest.raises(EngineArgumentError, match="got 2 on 1 ranks"):
        dsx.initialize(model=Model(), config=config(2, 0))
    with pytest.raises(dsx.DsxConfigError, match="sequence_parallel_size"):
        dsx.initialize(model=Model(), config=config(0, 0))
    with pytest.raises(dsx.DsxConfigError, match="order"):
        dsx.initialize(model=Model(), config=config(1, 0, sequence_parallel={"order": "stripes"}))


def attention_not_found(rank, world):
    class NoAttention(nn.Linear):
        pass

    engine, *_ = dsx.initialize(model=NoAttention(4, 4), config=config(2, 0))
    engine(torch.ones(1, 4))


def test_a_model_without_attention_is_named():
    with pytest.raises(RankError, match="no attention was found in NoAttention"):
        run_ranks(attention_not_found, 2)
