"""Pipelines whose sequences are cut over ranks: losses, norms and weights are those of plain torch in one process with
whole sequences, for every schedule and ZeRO stage, and what cannot be is named.
"""

import dsx
import dsx_comm
import pytest
import torch
from dsx_comm import parallel_groups
from dsx_testkit import RankError, run_ranks
from torch import nn
from torch.nn import functional as F

dsx_pipe = pytest.importorskip("dsx_pipe")
dsx_activations = pytest.importorskip("dsx_activations")

WIDTH, WORDS, LENGTH, MICRO_BATCHES, UPDATES, LR = 16, 24, 13, 4, 2, 0.5


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.3)

    def forward(self, value):
        tokens, positions = value
        return F.embedding(tokens, self.weight), positions


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.3)

    def forward(self, value):
        x, positions = value
        return x + F.embedding(positions, self.weight)


class Block(nn.Module):
    """Four heads of queries and two of keys."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).split([WIDTH, 8, 8], -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x).relu()


def head(embedding, x):
    return x @ embedding.weight.T


def token_loss(logits, targets):
    """The mean over the tokens of all ranks; in one process, over all tokens."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    group = parallel_groups.get_sequence_data_parallel_group() if dsx_comm.is_initialized() else None
    return dsx_activations.token_mean(total, (targets != -100).sum(), group)


def layers():
    torch.manual_seed(0)
    return Embedding(), [Places(), *(Block() for _ in range(3))]


def micro_batches(count):
    """Tokens, positions and targets, of which another number counts in each micro-batch."""
    draw = torch.Generator().manual_seed(2)
    found = []
    for _ in range(count):
        tokens = torch.randint(0, WORDS, (2, LENGTH + 1), generator=draw)
        targets = tokens[:, 1:].clone()
        targets[:, : int(torch.randint(1, LENGTH, (), generator=draw))] = -100
        found.append((tokens[:, :-1], targets))
    return found


def one_process(replicas):
    """(loss, norm) of each update, and the weights in the end, under a pipeline's names."""
    embedding, blocks = layers()
    parts = {"tied_modules.words": embedding, **{str(i + 1): block for i, block in enumerate(blocks)}}
    model = {f"{key}.{name}": p for key, part in parts.items() for name, p in part.named_parameters()}
    optimizer, found = torch.optim.SGD(model.values(), lr=LR), []
    data = iter(micro_batches(UPDATES * MICRO_BATCHES * replicas))
    for _ in range(UPDATES):
        losses = []
        for _ in range(MICRO_BATCHES):
            together = [next(data) for _ in range(replicas)]
            tokens, targets = (torch.cat(parts) for parts in zip(*together))
            x = embedding((tokens, torch.arange(LENGTH)[None]))
            for block in blocks:
                x = block(x)
            logits = head(embedding, x)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.item())
        norm = float(torch.cat([p.grad.flatten() for p in model.values()]).norm())
        optimizer.step()
        optimizer.zero_grad()
        found.append((sum(losses) / MICRO_BATCHES, norm))
    return found, model


def config(size, stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "sequence_parallel_size": size,
        **more,
    }


def module_over(stages, sequence, schedule="1f1b", interval=0, more=()):
    embedding, blocks = layers()
    world = dsx_comm.get_world_size()
    return dsx_pipe.PipelineModule(
        [
            dsx_pipe.TiedLayerSpec("words", lambda: embedding),
            *blocks, *more,
            dsx_pipe.TiedLayerSpec("words", lambda: embedding, forward_fn=head),
        ],
        topology=dsx_comm.ProcessTopology(
            ("pipe", "data", "sequence"), (stages, world // stages // sequence, sequence)
        ),
        loss_fn=token_loss, schedule=schedule, partition_method="uniform", activation_checkpoint_interval=interval,
    )  # fmt: skip


def cut_for(engine):
    """What a user writes: the samples of the loader become the tokens of this rank."""
    sp = engine.sequence_parallel

    def cut(item):
        tokens, targets = item
        positions = sp.positions(LENGTH).expand(len(tokens), -1)
        return (sp.shard(tokens), positions), sp.shard(targets)

    return cut


def train(engine):
    data, found = engine.module.grid.data, []
    per_update = MICRO_BATCHES * data.size
    batches = micro_batches(UPDATES * per_update)
    engine.set_batch_fn(cut_for(engine))
    for update in range(UPDATES):
        mine = batches[update * per_update : (update + 1) * per_update][data.rank :: data.size]
        found.append((engine.train_batch(iter(mine)).item(), engine.last_step.grad_norm))
    return found


def _trained(rank, world, stages, size, stage, schedule, interval, options):
    settings = config(size, stage, sequence_parallel=options)
    engine, *_ = dsx.initialize(model=module_over(stages, size, schedule, interval), config=settings)
    found = train(engine)
    engine.set_batch_fn(None)
    item = cut_for(engine)(micro_batches(1)[0])
    score = engine.eval_batch(iter([item]), num_micro_batches=1).item()
    with dsx.zero.GatheredParameters(list(engine.module.parameters())):
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return found, weights, score


def check(world, stages, size, stage, schedule="1f1b", interval=0, **options):
    expected, right = one_process(world // stages // size)
    seen = set()
    for found, weights, score in run_ranks(_trained, world, stages, size, stage, schedule, interval, options,
                                           timeout=200):  # fmt: skip
        for (loss, norm), (wanted, its_norm) in zip(found, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-6)
            assert norm == pytest.approx(its_norm, rel=2e-6)
        for name, value in weights.items():
            torch.testing.assert_close(value, right[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        seen |= set(weights)
        assert 0 < score < 5
    assert seen == set(right)


@pytest.mark.parametrize(
    ("stage", "schedule", "interval", "options"),
    [
        (0, "1f1b", 0, {"order": "zigzag"}),
        (1, "zb-h1", 1, {}),
        (3, "1f1b", 1, {"order": "zigzag", "team": 1}),
    ],
)
def test_losses_and_gradients_are_those_of_one_process(stage, schedule, interval, options):
    check(4, 2, 2, stage, schedule, interval, **options)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zbv", "interleaved"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_schedule_and_stage(schedule, stage):
    check(4, 2, 2, stage, schedule, interval=stage % 2, overlap=1 + stage % 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("world", "stages", "size", "stage"), [(8, 2, 2, 1), (8, 2, 2, 3), (6, 2, 3, 2), (6, 3, 2, 0), (2, 1, 2, 2)]
)
def test_beside_data_parallel_ranks_and_on_odd_numbers(world, stages, size, stage):
    check(world, stages, size, stage, order="zigzag")


class Loss(nn.Module):
    """The last layer of a model that the configuration cuts: targets come with the activations."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, value):
        x, targets = value
        return token_loss(self.out(x), targets)


class Beside(nn.Module):
    """A layer beside the targets."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, value):
        *given, targets = value
        return self.layer(tuple(given) if len(given) > 1 else given[0]), targets


def whole():
    torch.manual_seed(0)
    return nn.Sequential(Beside(nn.Sequential(Embedding(), Places())), *(Beside(Block()) for _ in range(3)), Loss())


def _cut_by_configuration(rank, world, folder):
    """Weights after two updates, also as a job without cut sequences reads them from a checkpoint."""
    engine, *_ = dsx.initialize(model=whole(), config=config(2, 1, pipeline={"stages": 2}))
    assert engine.train_batch_size() == 2 * MICRO_BATCHES
    cut = cut_for(engine)

    def with_targets(item):
        (tokens, positions), targets = cut(item)
        return (tokens, positions, targets), None

    engine.set_batch_fn(with_targets)
    data = iter(micro_batches(UPDATES * MICRO_BATCHES))
    found = [(engine.train_batch(data).item(), engine.last_step.grad_norm) for _ in range(UPDATES)]
    engine.save_checkpoint(folder, "cut")
    other, *_ = dsx.initialize(model=whole(), config=config(1, 2))
    other.load_checkpoint(folder, "cut")
    with dsx.zero.GatheredParameters(list(other.module.parameters())):
        return found, {name: p.detach().clone() for name, p in other.module.named_parameters()}


def test_a_model_that_the_configuration_cuts_and_its_checkpoint(tmp_path):
    model, expected = whole(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    data = iter(micro_batches(UPDATES * MICRO_BATCHES))
    for _ in range(UPDATES):
        total = 0.0
        for _ in range(MICRO_BATCHES):
            tokens, targets = next(data)
            loss = model((tokens, torch.arange(LENGTH)[None], targets)) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        expected.append((total, float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())))
        optimizer.step()
        optimizer.zero_grad()
    right = dict(model.named_parameters())
    for found, weights in run_ranks(_cut_by_configuration, 4, str(tmp_path)):
        assert found == [pytest.approx(pair, rel=2e-6) for pair in expected]
        for name, value in weights.items():
            torch.testing.assert_close(value, right[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def llama():
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=32, max_position_embeddings=64, initializer_range=0.2,
        )
    )  # fmt: skip


def padded(item):
    """(tokens, mask, targets): the first sample ends in padding."""
    tokens, targets = item
    mask, targets = torch.ones_like(tokens), targets.clone()
    mask[0, LENGTH - 3 :], targets[0, LENGTH - 3 :] = 0, -100
    return tokens, mask, targets


def _hugging_face(rank, world):
    """Positions are those of the whole sequence without a word of them; padding is a mask that is cut."""
    topology = dsx_comm.ProcessTopology(("pipe", "data", "sequence"), (2, 1, 2))
    module = dsx_pipe.PipelineModule(llama(), topology=topology, loss_fn=token_loss, activation_checkpoint_interval=1)
    engine, *_ = dsx.initialize(model=module, config=config(2, 1, sequence_parallel={"order": "zigzag"}))
    sp = engine.sequence_parallel

    def cut(item):
        tokens, mask, targets = padded(item)
        return {"input_ids": sp.shard(tokens), "attention_mask": sp.shard(mask)}, sp.shard(targets)

    engine.set_batch_fn(cut)
    data = iter(micro_batches(MICRO_BATCHES))
    return engine.train_batch(data).item(), engine.last_step.grad_norm


def test_a_hugging_face_model():
    pytest.importorskip("transformers")
    model, total = llama(), 0.0
    for tokens, mask, targets in map(padded, micro_batches(MICRO_BATCHES)):
        logits = model(input_ids=tokens, attention_mask=mask).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICRO_BATCHES
        loss.backward()
        total += loss.item()
    norm = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    for loss, its_norm in run_ranks(_hugging_face, 4):
        assert loss == pytest.approx(total, rel=1e-5)
        assert its_norm == pytest.approx(norm, rel=1e-4)


class Quiet(nn.Linear):
    """A layer without attention."""


def _mistakes(rank, world):
    """One process group for all of them: each is named on every rank before anything is trained."""
    told = []

    def note(function):
        try:
            function()
        except Exception as error:
            told.append(str(error))

    no_axis = dsx_pipe.PipelineModule([Quiet(4, 4), Quiet(4, 4)], num_stages=2, loss_fn=lambda x, y: x.mean())
    note(lambda: dsx.initialize(model=no_axis, config=config(2, 0)))
    note(lambda: dsx.initialize(model=whole(), config=config(3, 0, pipeline={"stages": 2})))
    note(lambda: dsx.initialize(model=llama(), config=config(2, 0, pipeline={"stages": 2})))
    quiet = dsx_pipe.PipelineModule(
        [Quiet(4, 4), Quiet(4, 4)], loss_fn=lambda x, y: x.mean(), partition_method="uniform",
        topology=dsx_comm.ProcessTopology(("pipe", "data", "sequence"), (2, 1, 2)),
    )  # fmt: skip
    engine, *_ = dsx.initialize(model=quiet, config=config(2, 0))
    data = [(torch.ones(2, 3, 4), torch.ones(1))] * MICRO_BATCHES
    before = [p.detach().clone() for p in engine.module.parameters()]
    note(lambda: engine.train_batch(iter(data)))
    assert all(torch.equal(p, old) for p, old in zip(engine.module.parameters(), before, strict=True))
    note(lambda: engine.sequence_parallel.describe(length=6))
    return told


def test_what_cannot_be_is_named():
    pytest.importorskip("transformers")
    texts = run_ranks(_mistakes, 4)
    assert all(one == texts[0] for one in texts)
    expected = (
        "PipelineModule whose grid has 1 ranks for each sequence",
        r"got 3 on 4 ranks, expected that 6",
        "give PipelineModule a loss_fn",
        "no attention was found in the 2 stages of PipelineModule",
        "describe(): PipelineModule is a stage of a pipeline",
    )
    for text, words in zip(texts[0], expected, strict=True):
        assert words in text


class FailsOnOneRank(Block):
    def forward(self, x):
        if dsx_comm.get_rank() == 3:
            raise ArithmeticError("planted")
        return super().forward(x)


def _one_fails(rank, world):
    module = module_over(2, 2, more=[FailsOnOneRank()])
    engine, *_ = dsx.initialize(model=module, config=config(2, 0))
    engine.set_batch_fn(cut_for(engine))
    engine.train_batch(iter(micro_batches(MICRO_BATCHES)))


def test_a_stage_that_fails_on_one_rank_of_a_sequence_is_named():
    """Its neighbour waits for it in the exchange of heads, and ends with it."""
    with pytest.raises(RankError, match=r"StageError: stage 1 \(rank 3\), .*planted"):
        run_ranks(_one_fails, 4, timeout=60)
