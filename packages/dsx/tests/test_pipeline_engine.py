"""Pipelines under the engine: every schedule and ZeRO stage gives the losses and norms of one process."""

import json
import logging

import dsx
import pytest
import torch
from dsx.engine.errors import EngineArgumentError, EngineError
from dsx_testkit import RankError, run_ranks
from torch import nn

dsx_pipe = pytest.importorskip("dsx_pipe")

MICRO_BATCHES, UPDATES = 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 8) * 0.3)

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight)


def head(embedding, x):
    return x @ embedding.weight.T


def token_loss(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_layers(tied):
    torch.manual_seed(0)
    embedding, blocks = Embedding(), [Block() for _ in range(4)]
    last = None if tied else nn.Linear(8, 11, bias=False)
    return embedding, blocks, last


def specs(tied):
    """The same layers, with the same numbers, for a pipeline."""
    if not tied:
        embedding, blocks, last = plain_layers(False)
        return [embedding, *blocks, last]
    values = plain_layers(True)

    def made():
        return values[0]

    return [
        dsx_pipe.TiedLayerSpec("embedding", made),
        *values[1],
        dsx_pipe.TiedLayerSpec("embedding", made, forward_fn=head),
    ]


def micro_batches(count, seed=7):
    draw = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, 11, (2, 5), generator=draw) for _ in range(count)]
    return [(t, t.roll(1, 1)) for t in tokens]


def config(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def engine_of(stages, stage, *, tied=False, schedule="1f1b", **more):
    module = dsx_pipe.PipelineModule(
        specs(tied), num_stages=stages, loss_fn=token_loss, schedule=schedule, partition_method="uniform"
    )
    return dsx.initialize(model=module, config=config(stage, **more))[0]


def train(engine, updates=range(UPDATES)):
    data = engine.module.grid.data
    per_update, found = MICRO_BATCHES * data.size, []
    batches = micro_batches(per_update * (max(updates) + 1))
    for update in updates:
        mine = batches[update * per_update : (update + 1) * per_update][data.rank :: data.size]
        loss = float(engine.train_batch(iter(mine)))
        found.append((loss, engine.last_step.grad_norm))
    return found


def one_process(replicas, tied):
    embedding, blocks, last = plain_layers(tied)
    modules = nn.ModuleList([embedding, *blocks, *([] if tied else [last])])
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-2, weight_decay=0.01)
    per_update, found = MICRO_BATCHES * replicas, []
    batches = micro_batches(per_update * UPDATES)
    for update in range(UPDATES):
        total = 0.0
        for tokens, labels in batches[update * per_update : (update + 1) * per_update]:
            x = embedding(tokens)
            for block in blocks:
                x = block(x)
            loss = token_loss(head(embedding, x) if tied else last(x), labels) / per_update
            loss.backward()
            total += loss.item()
        norm = float(nn.utils.clip_grad_norm_(modules.parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm))
    return found


def _train(rank, world_size, stages, stage, tied, schedule):
    return train(engine_of(stages, stage, tied=tied, schedule=schedule))


def check(world_size, stages, stage, tied=False, schedule="1f1b"):
    expected = one_process(world_size // stages, tied)
    for found in run_ranks(_train, world_size, stages, stage, tied, schedule, timeout=120):
        assert found == [pytest.approx(pair, rel=2e-4) for pair in expected]


@pytest.mark.parametrize(
    ("world_size", "stages", "stage", "tied", "schedule"),
    [(2, 2, 0, False, "1f1b"), (2, 2, 2, True, "zb-h1"), (4, 2, 1, True, "1f1b"), (4, 2, 3, False, "1f1b")],
)
def test_losses_and_norms_are_those_of_one_process(world_size, stages, stage, tied, schedule):
    check(world_size, stages, stage, tied, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zbv", "interleaved"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world_size", "stages"), [(2, 2), (4, 2), (3, 3)])
def test_every_schedule_stage_and_split(world_size, stages, stage, tied, schedule):
    if stages * 2 > 6 and schedule in ("zbv", "interleaved"):
        pytest.skip("six layers are fewer than the stages")
    if schedule == "interleaved" and MICRO_BATCHES % stages:
        pytest.skip("interleaved takes a multiple of the stages (test_pipe_schedules)")
    check(world_size, stages, stage, tied, schedule)


def _one_rank_in_bf16(rank, world_size, tied):
    """The same layers in one stage: what bfloat16 rounds is rounded there too."""
    return train(engine_of(1, 0, tied=tied, bf16={"enabled": True}))


def _train_in_bf16(rank, world_size, stages, stage, tied, schedule):
    return train(engine_of(stages, stage, tied=tied, schedule=schedule, bf16={"enabled": True}))


BF16 = [(2, 2, 1, True, "1f1b"), (2, 2, 3, False, "zb-h1")]
MATRIX = [
    pytest.param(stages, stages, stage, tied, schedule, marks=pytest.mark.slow)
    for stages in (2, 3, 4) for stage in range(4) for tied in (False, True)
    for schedule in ("gpipe", "1f1b", "zb-h1", *(("zbv", "interleaved") if stages == 2 else ()))
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "stages", "stage", "tied", "schedule"), [*BF16, *MATRIX])
def test_losses_in_bf16_are_those_of_one_stage(world_size, stages, stage, tied, schedule):
    expected = run_ranks(_one_rank_in_bf16, 1, tied, timeout=60)[0]
    for found in run_ranks(_train_in_bf16, world_size, stages, stage, tied, schedule, timeout=180):
        assert found == [pytest.approx(pair, rel=2e-2) for pair in expected]


def _save(rank, world_size, folder, stages, stage):
    engine = engine_of(stages, stage)
    found = train(engine, range(2))
    engine.save_checkpoint(folder)
    return found + train(engine, range(2, 3))


def _resume(rank, world_size, folder, stages, stage):
    engine = engine_of(stages, stage)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    return train(engine, range(2, 3))


@pytest.mark.parametrize(("before", "after"), [((2, 2, 1), (3, 3, 0)), ((4, 2, 3), (2, 1, 2))])
def test_checkpoints_load_at_another_split(tmp_path, before, after):
    """(ranks, stages, ZeRO stage); the number of replicas stays, so that the data does."""
    saved = run_ranks(_save, before[0], str(tmp_path), *before[1:], timeout=120)[0]
    for found in run_ranks(_resume, after[0], str(tmp_path), *after[1:], timeout=120):
        assert found == [pytest.approx(saved[-1], rel=2e-4)]


def _calls(rank, world_size):
    engine = engine_of(2, 1)
    said = []
    for call in (lambda: engine(torch.zeros(1)), lambda: engine.backward(torch.zeros(1)), engine.step):
        with pytest.raises(EngineError, match="train_batch"):
            call()
        said.append(True)
    with pytest.raises(EngineArgumentError, match="no data_iter"):
        engine.train_batch()
    before = engine.global_steps
    loss = engine.eval_batch(iter(micro_batches(3)), num_micro_batches=3)
    assert engine.global_steps == before
    engine.set_dataloader(micro_batches(MICRO_BATCHES))
    first, second = float(engine.train_batch()), float(engine.train_batch())
    assert second < first and engine.micro_steps == 2 * MICRO_BATCHES
    engine.set_train_batch_size(2 * engine.train_batch_size())
    engine.set_dataiterator(iter(micro_batches(2 * MICRO_BATCHES)))
    engine.train_batch()
    assert engine.gradient_accumulation_steps() == 2 * MICRO_BATCHES
    heard: list[str] = []
    watch = logging.Handler()
    watch.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("dsx").addHandler(watch)
    engine.set_has_attention_mask(False)
    assert heard == []
    engine.set_has_attention_mask(True)
    assert ["set_has_attention_mask has no effect" in text for text in heard] == [True]
    return float(loss), engine.is_first_stage(), engine.is_last_stage()


def test_calls_of_a_pipeline_engine():
    (loss, *first), (other, *last) = run_ranks(_calls, 2, timeout=120)
    assert loss == other and first == [True, False] and last == [False, True]
    embedding, blocks, end = plain_layers(False)
    expected = 0.0
    with torch.no_grad():
        for tokens, labels in micro_batches(3):
            x = embedding(tokens)
            for block in blocks:
                x = block(x)
            expected += token_loss(end(x), labels).item() / 3
    assert loss == pytest.approx(expected, rel=1e-5)


def _overflow(rank, world_size):
    engine = engine_of(2, 2, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    with torch.no_grad():
        before = [p.detach().clone() for p in engine.module.parameters()]
    if rank == 1:  # on one stage only

        def spoil(grad):
            return grad * float("inf")

        for leaf in list(engine.optimizer.control.gradient_parameters())[:1]:
            handle = leaf.register_hook(spoil)
    batches = micro_batches(2 * MICRO_BATCHES)
    engine.train_batch(iter(batches[:MICRO_BATCHES]))
    skipped = engine.last_step.skipped, all(map(torch.equal, before, engine.module.parameters()))
    if rank == 1:
        handle.remove()
    engine.train_batch(iter(batches[MICRO_BATCHES:]))
    return skipped, engine.last_step.skipped, engine.loss_scale()


def test_an_overflow_on_one_stage_skips_the_step_on_all():
    assert run_ranks(_overflow, 2, timeout=120) == [((True, True), False, 8.0)] * 2


def _fails(rank, world_size):
    engine = engine_of(2, 1)
    batches = micro_batches(MICRO_BATCHES)
    wrong = [(tokens.float(), labels) for tokens, labels in batches]
    with pytest.raises(dsx_pipe.StageError, match=r"stage 0.*micro-batch 0"):
        engine.train_batch(iter(wrong))
    return float(engine.train_batch(iter(batches)))  # and goes on


def test_a_stage_that_fails_is_named_on_all_ranks_and_training_can_go_on():
    first, second = run_ranks(_fails, 2, timeout=120)
    assert first == second


def _traced(rank, world_size, folder, start):
    section = {"enabled": True, "output_path": folder, "start_step": start, "steps": 1}
    losses = train(engine_of(2, 1, timeline=section), range(3))
    with open(f"{folder}/trace.json") as file:
        found = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    return losses, {(e["pid"], e["cat"]) for e in found}


@pytest.mark.parametrize("start", [0, 1])
def test_a_timeline_begins_before_the_stages_wait_for_each_other(tmp_path, start):
    expected = run_ranks(_plainly, 2)
    for (losses, lanes), plain in zip(run_ranks(_traced, 2, str(tmp_path), start), expected):
        assert losses == plain and {(0, "compute"), (1, "compute")} <= lanes


def _plainly(rank, world_size):
    return train(engine_of(2, 1), range(3))


def _other_mpu(rank, world_size):
    module = dsx_pipe.PipelineModule(specs(False), num_stages=2, loss_fn=token_loss)
    dsx.initialize(model=module, config=config(0), mpu=dsx_pipe.RankGrid())


def test_another_mpu_beside_the_module_is_refused():
    with pytest.raises(RankError, match="beside a PipelineModule"):
        run_ranks(_other_mpu, 2)
