"""Sections on data efficiency in an engine: they take effect, at every stage alike, and go on from a checkpoint."""

import logging

import dsx
import pytest
import torch
from dsx import DsxConfigError
from dsx.data import (
    CurriculumSampler,
    DataAnalyzer,
    ProgressiveLayerDrop,
    RandomLTDScheduler,
    SequenceLength,
    convert_to_layer_drop,
    convert_to_random_ltd,
    save_without_random_ltd,
)
from dsx.engine.errors import EngineArgumentError, EngineError
from dsx_data.batching.plan import lengths_from
from dsx_testkit import run_ranks
from torch import nn


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden, attention_mask=None):
        return hidden + self.out(torch.tanh(self.mix(self.norm(hidden))))


class Model(nn.Module):
    """A model of tokens; says with which lengths it was called."""

    def __init__(self, layers=4):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(16, 32)
        self.lengths = []

    def forward(self, tokens):
        self.lengths.append(tokens.shape[1])
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def config(**sections):
    return {
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": 0, "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **sections,
    }  # fmt: skip


def engine_of(model=None, data=None, **sections):
    torch.manual_seed(0)
    model = Model() if model is None else model
    return dsx.initialize(model=model, training_data=data, config=config(**sections))[0]


def train(engine, steps, batch=None):
    losses = []
    for step in range(steps):
        tokens = torch.arange(32).view(2, 16) + step if batch is None else batch
        loss = engine(tokens % 32)
        engine.backward(loss)
        engine.step()
        losses.append(round(float(loss.detach()), 5))
    return losses


SCHEDULE = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 4}}
CURRICULUM = {"curriculum_learning": {"enabled": True, "min_difficulty": 4, "max_difficulty": 16, **SCHEDULE}}
LAYERS = {"progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 1.0}}
TOKENS = {
    "total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2], "enabled": True,
    "random_ltd_schedule": {
        "min_value": 4, "max_value": 16, "schedule_config": {"require_steps": 6, "seq_per_step": 4},
    },
}  # fmt: skip


def routing(**changes):
    return {
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {**TOKENS, **changes}}}
    }


# - Sequence lengths


def test_sequences_have_the_length_of_the_step_and_evaluations_are_whole():
    engine = engine_of(**CURRICULUM)
    train(engine, 6)
    assert engine.module.lengths == [4, 8, 12, 16, 16, 16], "floor(t/4 * 12 + 4), down to a multiple of 4"
    again = engine_of(**CURRICULUM)
    again.eval()
    again(torch.zeros(2, 16, dtype=torch.int64))
    assert again.module.lengths == [16]


def test_a_model_that_names_the_argument_cuts_by_itself():
    class Cuts(Model):
        def forward(self, tokens, curriculum_seqlen=None):
            return super().forward(tokens[:, :curriculum_seqlen])

    engine = engine_of(Cuts(), **CURRICULUM)
    train(engine, 3)
    assert engine.module.lengths == [4, 8, 12]


def test_a_custom_schedule_is_asked():
    section = {"curriculum_learning": {**CURRICULUM["curriculum_learning"], "schedule_type": "custom"}}
    engine = engine_of(**section)
    with pytest.raises(ValueError, match="set_custom_curriculum_learning_schedule"):
        train(engine, 1)
    engine.set_custom_curriculum_learning_schedule(lambda step: 2 * step)
    train(engine, 3)
    assert engine.module.lengths == [2, 4, 6]
    with pytest.raises(EngineArgumentError, match="has no curriculum"):
        engine_of().set_custom_curriculum_learning_schedule({"seqlen": len})


# - Layer dropping and token dropping


def prepared(kind):
    model = Model()
    if kind == "layers":
        convert_to_layer_drop(model, Block, schedule=ProgressiveLayerDrop(), seed=3)
        return model, LAYERS
    convert_to_random_ltd(model, Block)
    return model, routing()


def losses(rank, world, kind, stage, steps=5):
    torch.manual_seed(0)
    model, section = prepared(kind)
    engine = engine_of(model, **section, zero_optimization={"stage": stage})
    torch.manual_seed(7)
    return train(engine, steps)


@pytest.mark.parametrize("kind", ["layers", "tokens"])
def test_all_stages_give_the_same_losses_on_two_ranks(kind):
    alone = losses(0, 1, kind, 0)
    for stage in (0, 2, 3):
        found = run_ranks(losses, 2, kind, stage)
        assert found[0] == pytest.approx(alone, abs=2e-5) and found[1] == pytest.approx(alone, abs=2e-5)


def test_layers_are_skipped_and_the_engine_drives_the_schedule():
    torch.manual_seed(0)
    model, section = prepared("layers")
    runs = []
    for number, layer in enumerate(model.layers):
        layer.mix.register_forward_hook(lambda *_, number=number: runs.append(number))
    engine = engine_of(model, **section)
    train(engine, 3)
    runs.clear()
    kept = [number for number in range(4) if model.layers[number]._layer_drop.keeps(number)]
    train(engine, 1)
    assert runs == kept and len(kept) < 4
    part = engine._parts.checkpointer.live.parts["progressive_layer_drop"]
    assert part.state_dict() == {"step": 4, "seed": 3}
    assert model.layers[0]._layer_drop.schedule.get_theta() == pytest.approx(0.7 * 2.718281828**-4 + 0.3)


def test_a_model_that_names_the_arguments_drops_by_itself():
    class Drops(Model):
        seen = ()

        def forward(self, tokens, progressive_layer_drop=False, pld_theta=None):
            self.seen += ((progressive_layer_drop, round(pld_theta, 3)),)
            return super().forward(tokens)

    engine = engine_of(Drops(), **LAYERS)
    train(engine, 2)
    assert engine.module.seen == ((True, 1.0), (True, 0.558))

    class TakesAll(Model):
        seen = ()

        def forward(self, tokens, **kwargs):
            self.seen += (tuple(sorted(kwargs.items())),)
            return super().forward(tokens)

    engine = engine_of(TakesAll(), **LAYERS)
    train(engine, 2)
    assert [dict(seen)["progressive_layer_drop"] for seen in engine.module.seen] == [True, True]
    assert [round(dict(seen)["pld_theta"], 3) for seen in engine.module.seen] == [1.0, 0.558]
    with pytest.raises(EngineArgumentError, match=r"convert_to_layer_drop\(model, LayerClass, schedule=...\)"):
        engine_of(**LAYERS)


def test_tokens_are_dropped_and_counted():
    engine = engine_of(**routing())
    with pytest.raises(EngineError, match=r"convert_to_random_ltd\(engine, LayerClass\)"):
        train(engine, 1)
    convert_to_random_ltd(engine, Block)
    widths = []
    for layer in engine.module.layers:
        layer.mix.register_forward_hook(lambda _, args, __: widths.append(args[0].shape[1]))
    train(engine, 4)
    assert widths == [16, 4, 4, 16, 16, 4, 4, 16, 16, 8, 8, 16, 16, 8, 8, 16]
    assert engine.random_ltd_scheduler.consumed_layer_tokens == 2 * sum(2 * kept + 2 * 16 for kept in (4, 4, 8, 8))
    assert list(save_without_random_ltd(engine)) == list(Model().state_dict())
    with pytest.raises(ValueError, match="total_layer_num: got 4, expected 3"):
        convert_to_random_ltd(engine_of(Model(3), **routing()), Block)


def test_layers_with_a_schedule_that_the_engine_would_not_advance_are_refused():
    def converted():
        model = Model()
        convert_to_random_ltd(model, Block, config=RandomLTDScheduler(TOKENS))
        return model

    with pytest.raises(ValueError, match="the layers have got a schedule of their own"):
        engine_of(converted(), **routing())
    train(engine_of(converted()), 1)  # the caller advances it, no engine does
    with pytest.raises(ValueError, match="the layers have got a schedule of their own"):
        convert_to_random_ltd(engine_of(**routing()), Block, config=RandomLTDScheduler(TOKENS))


def test_layers_of_an_earlier_engine_follow_the_next_one():
    torch.manual_seed(0)
    model, section = prepared("tokens")
    first = engine_of(model, **section)
    train(first, 4)
    first.destroy()
    second = engine_of(model, **section)
    widths = []
    model.layers[1].mix.register_forward_hook(lambda _, args, __: widths.append(args[0].shape[1]))
    train(second, 4)
    assert widths == [4, 4, 8, 8]


@pytest.mark.parametrize("before, after", [(0, 3), (3, 0)])
def test_a_checkpoint_goes_on_with_the_same_losses(tmp_path, before, after):
    def fresh(stage):
        torch.manual_seed(0)
        model, section = prepared("layers")
        sections = {**section, **CURRICULUM, "zero_optimization": {"stage": stage}}
        return engine_of(model, **sections)

    one = fresh(before)
    train(one, 2)
    one.save_checkpoint(str(tmp_path))
    expected = train(one, 4)
    other = fresh(after)
    other.load_checkpoint(str(tmp_path))
    assert train(other, 4) == pytest.approx(expected, abs=2e-5)
    assert other.module.lengths == [12, 16, 16, 16]


# - Batches


def lengths_of(data, path):
    DataAnalyzer(
        data, batch_size=8, metric_names=["seqlen"], metric_functions=[SequenceLength()], metric_dtypes=["int64"],
        metric_types=["single_value_per_sample"], save_path=path, collate_fn=list,
    ).run_map_reduce()  # fmt: skip


def sampling(**sections):
    return {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, **sections}}}


class Rows(nn.Module):
    """Keeps what it was called with; a linear model, whose update shows the learning rate."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen = []

    def forward(self, batch):
        self.seen.append([len(row) for row in batch])
        return self.weight.sum()


@pytest.mark.parametrize("method, power", [("linear", 1.0), ("sqrt", 0.5), ("none", 0.0)])
def test_token_batches_scale_the_learning_rate_and_count_samples(tmp_path, method, power):
    data = [torch.ones(n, dtype=torch.int64) for n in (3, 3, 4, 9, 1, 1, 1, 1)]
    lengths_of(data, tmp_path)
    section = sampling(
        dynamic_batching={"enabled": True, "max_tokens": 10, "metrics_path": str(tmp_path), "lr_scaling_method": method}
    )
    torch.manual_seed(0)
    made = dsx.initialize(model=Rows(), training_data=data, collate_fn=list, config=config(**section))
    engine, loader = made[0], made[2]
    before, rates, expected = 0.0, [], []
    for batch in loader:
        engine.backward(engine(batch))
        engine.step()
        rates.append(before - float(engine.module.weight.detach()))
        before = float(engine.module.weight.detach())
        expected.append(0.1 * (len(batch) / 2) ** power)
        assert engine.last_step.samples == len(batch) and engine.get_lr() == [0.1]
    assert engine.module.seen == [[3, 3, 4], [9, 1], [1, 1, 1]]
    assert rates == pytest.approx(expected) and engine.global_samples == 8
    with pytest.raises(EngineError, match="used no batch of the engine's loader"):
        engine.backward(engine(data))


class Means(nn.Module):
    """The loss is a mean over all tokens of the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows):
        x = torch.cat(list(rows))
        return (self.layer(x) - x.square()).square().mean()


def sequences(count=24):
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        made.append(torch.randn(1 + (5 * number) % 9, 4, generator=generator))
    return made


def weighted(rank, world, folder, stage, precision, by="tokens", steps=3, fetch="before forward"):
    """Weights after some updates, and the samples of each; two micro-batches for each rank and update."""
    torch.manual_seed(0)
    section = sampling(dynamic_batching={
        "enabled": True, "max_tokens": 12, "metrics_path": folder, "lr_scaling_method": "none", "loss_weighting": by,
    })  # fmt: skip
    settings = {**config(**section, **precision), "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
                "zero_optimization": {"stage": stage}}  # fmt: skip
    engine, _, loader, _ = dsx.initialize(model=Means(), training_data=sequences(), collate_fn=list, config=settings)
    dtype = torch.bfloat16 if precision else torch.float32
    samples, batches = [], iter(loader)
    batch = next(batches)
    while True:
        loss = engine([row.to(dtype) for row in batch])
        if fetch == "before backward":
            batch = next(batches)
        if fetch == "between two losses":
            engine.backward(loss / 2, retain_graph=True)
            batch = next(batches)
            loss = loss / 2
        engine.backward(loss)
        if fetch == "before step":
            batch = next(batches)
        engine.step()
        if len(samples) < engine.global_steps:
            samples.append(engine.last_step.samples)
            if len(samples) == steps:
                break
        if fetch == "before forward":
            batch = next(batches)
    weights = {name: value.float().clone() for name, value in save_without_random_ltd(engine).items()}
    return weights, samples, [round(engine.last_step.outcome.grad_norm, 6)]


def one_batch(folder, world, steps=3):
    """The same updates, each made of one batch of all its samples: what weights by tokens stand for."""
    plan = dsx.data.TokenBudget(lengths_from(folder), 12).plan()
    torch.manual_seed(0)
    model, data = Means(), sequences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        samples = [i for number in range(2 * world) for i in plan[2 * world * step + number].tolist()]
        optimizer.zero_grad()
        model([data[i] for i in samples]).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return dict(model.state_dict()), [round(float(norm), 6)]


@pytest.mark.parametrize("world, stage", [(1, 0), (2, 0), (2, 2), (2, 3)])
def test_losses_weigh_by_tokens_as_in_one_batch(tmp_path, world, stage):
    lengths_of([torch.ones(len(row), dtype=torch.int64) for row in sequences()], tmp_path)
    expected, norm = one_batch(tmp_path, world, steps=2)
    for found, samples, found_norm in run_ranks(weighted, world, str(tmp_path), stage, {}, "tokens", 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert found_norm == pytest.approx(norm, rel=1e-4) and len(set(samples)) > 1
    if world == 1:
        alike = weighted(0, 1, str(tmp_path), 0, {}, "none", 2)[0]
        assert not torch.allclose(alike["layer.weight"], expected["layer.weight"], rtol=1e-3)


@pytest.mark.parametrize("by", ["tokens", "samples", "none"])
@pytest.mark.parametrize("fetch", ["before backward", "before step", "between two losses"])
def test_the_next_batch_may_be_taken_at_any_point_after_the_forward(tmp_path, fetch, by):
    lengths_of([torch.ones(len(row), dtype=torch.int64) for row in sequences()], tmp_path)
    expected = run_ranks(weighted, 2, str(tmp_path), 1, {}, by, 2)
    found = run_ranks(weighted, 2, str(tmp_path), 1, {}, by, 2, fetch)
    for rank in range(2):
        torch.testing.assert_close(found[rank][0], expected[rank][0])
        assert found[rank][1:] == expected[rank][1:]
    if by == "tokens":
        torch.testing.assert_close(found[0][0], one_batch(tmp_path, 2, steps=2)[0], rtol=1e-5, atol=1e-6)


def test_weights_hold_with_a_loss_scale_and_in_half_precision(tmp_path):
    lengths_of([torch.ones(len(row), dtype=torch.int64) for row in sequences()], tmp_path)
    expected, _ = one_batch(tmp_path, 1, steps=2)
    found, _, _ = weighted(0, 1, str(tmp_path), 0, {"bf16": {"enabled": True}}, "tokens", 2)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_loss_whose_batch_is_not_known_is_refused(tmp_path):
    data = sequences()
    lengths_of([torch.ones(len(row), dtype=torch.int64) for row in data], tmp_path)
    section = sampling(dynamic_batching={"enabled": True, "max_tokens": 12, "metrics_path": str(tmp_path)})
    made = dsx.initialize(model=Means(), training_data=data, collate_fn=list, config=config(**section))
    engine, batches = made[0], iter(made[2])
    first, second = next(batches), next(batches)
    with pytest.raises(EngineError, match="2 batches were taken from the loader since the last backward"):
        engine.backward(engine(first))
    del second
    engine.forget_micro_batches()
    engine.backward(engine(next(batches)))
    engine.step()
    with pytest.raises(EngineError, match=r"not with engine\.module\(batch\)"):
        engine.backward(engine.module(next(batches)))
    engine.forget_micro_batches()
    with pytest.raises(EngineError, match=r"call engine\.backward\(loss\)"):
        engine(next(batches)).backward()


def curriculum(path, **changes):
    metric = {
        "index_to_sample_path": f"{path}/seqlen/seqlen_index_to_sample", "difficulty_type": "value",
        "index_to_metric_path": f"{path}/seqlen/seqlen_index_to_metric", "clustering_type": "schedule_based",
        "min_difficulty": 2, "max_difficulty": 20, "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 1}, **changes,
    }  # fmt: skip
    return sampling(curriculum_learning={"enabled": True, "curriculum_metrics": {"seqlen": metric}})


def drawn(rank, world, path, steps, load=None):
    data = [torch.full((n % 20 + 1,), n) for n in range(60)]
    torch.manual_seed(0)
    section = {**config(**curriculum(path)), "train_micro_batch_size_per_gpu": 6 // world}
    engine, _, loader, _ = dsx.initialize(model=Rows(), training_data=data, collate_fn=list, config=section)
    assert isinstance(loader.sampler, CurriculumSampler)
    if load is not None:
        engine.load_checkpoint(load)
    rows = []
    engine.set_data_post_process_func(lambda batch, state: (batch, state["current_difficulties"]["seqlen"]))
    for (batch, difficulty), _ in zip(loader, range(steps)):
        engine.backward(engine(batch))
        engine.step()
        assert max(len(row) for row in batch) <= difficulty
        rows.append(([int(row[0]) for row in batch], difficulty))
        if load is None and len(rows) == 4:
            engine.save_checkpoint(f"{path}/ckpt{world}")
    return rows


def test_a_curriculum_draws_by_difficulty_and_resumes_on_another_number_of_ranks(tmp_path):
    data = [torch.full((n % 20 + 1,), n) for n in range(60)]
    lengths_of(data, tmp_path)
    alone = drawn(0, 1, str(tmp_path), 12)
    assert [difficulty for _, difficulty in alone] == [4, 6, 8, 10, 12, 14, 16, 18, 20, 20, 20, 20]

    def merged(found):
        return [sorted(i for rows, _ in step for i in rows) for step in zip(*found)]

    whole = [sorted(rows) for rows, _ in alone]
    assert merged(run_ranks(drawn, 2, str(tmp_path), 12)) == whole
    assert merged(run_ranks(drawn, 3, str(tmp_path), 8, f"{tmp_path}/ckpt2")) == whole[4:]


def test_what_cannot_be_is_refused_with_the_way():
    for sections, text in (
        ({"curriculum_learning": {"enabled": True}}, r"curriculum_learning\.min_difficulty"),
        (sampling(dynamic_batching={"enabled": True}), r"dynamic_batching\.max_tokens"),
        (sampling(curriculum_learning={"enabled": True}), r"curriculum_metrics"),
        (routing(random_ltd_layer_id=[4]), r"random_ltd_layer_id"),
        (routing(layer_token_lr_schedule={"enabled": True}), r"layer_token_lr_schedule[\s\S]*NotImplementedError"),
        ({"curriculum_learning": {"enabled": True, "curriculum_type": "rarity"}}, "curriculum_type"),
    ):
        with pytest.raises(DsxConfigError, match=text):
            engine_of(**sections)
    with pytest.raises(EngineArgumentError, match="has no loader"):
        engine_of().set_data_post_process_func(max)


def test_a_second_engine_on_the_same_model_starts_plain(caplog):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=32, n_positions=16))
    kinds = [type(block) for block in model.transformer.h]
    with caplog.at_level(logging.INFO, logger="dsx"):
        first = engine_of(model, **routing(), **LAYERS)
    assert [type(block) for block in model.transformer.h] != kinds
    second = engine_of(model)
    assert [type(block) for block in model.transformer.h] == kinds and first is not second


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)

    def forward(self, tokens):
        return self.embed(tokens)


def pipeline_layers():
    torch.manual_seed(0)
    return [Tokens(), Block(), Block(), nn.Linear(16, 32)]


def token_loss(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def piped(rank, world, steps=5):
    import dsx_pipe

    module = dsx_pipe.PipelineModule(pipeline_layers(), num_stages=2, loss_fn=token_loss, partition_method="uniform")
    settings = {**config(**CURRICULUM), "gradient_accumulation_steps": 2}
    engine = dsx.initialize(model=module, config=settings)[0]
    found = []
    for step in range(steps):
        tokens = (torch.arange(32).view(2, 16) + step) % 32
        found.append(float(engine.train_batch(iter([(tokens, tokens), (tokens, tokens)]))))
    found.append(float(engine.eval_batch(iter([(tokens, tokens), (tokens, tokens)]))))
    return found


def test_a_pipeline_cuts_inputs_and_labels():
    pytest.importorskip("dsx_pipe")
    model = nn.Sequential(*pipeline_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for step, length in enumerate((4, 8, 12, 16, 16)):
        tokens = (torch.arange(32).view(2, 16) + step) % 32
        loss = token_loss(model(tokens[:, :length]), tokens[:, :length])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    expected.append(token_loss(model(tokens), tokens).item())
    for found in run_ranks(piped, 2, timeout=120):
        assert found == pytest.approx(expected, rel=1e-4)


def refused_in_stages(rank, world, sections, text):
    import dsx_pipe

    module = dsx_pipe.PipelineModule(pipeline_layers(), num_stages=2, loss_fn=token_loss)
    with pytest.raises(EngineArgumentError, match=text):
        dsx.initialize(model=module, config=config(**sections))


@pytest.mark.parametrize("sections, text", [
    (LAYERS, "convert_to_layer_drop before PipelineModule"),
    (routing(), r"random_ltd: got enabled with a pipeline"),
    (sampling(dynamic_batching={"enabled": True, "max_tokens": 4, "metrics_path": "x"}), "read no batches"),
])  # fmt: skip
def test_what_stages_cannot_do_is_refused(sections, text):
    pytest.importorskip("dsx_pipe")
    run_ranks(refused_in_stages, 2, sections, text)


def test_verify_refuses_what_has_nothing_to_compare_with():
    with pytest.raises(ValueError, match="progressive_layer_drop changes what is computed from step to step"):
        dsx.verify(Model, config(**LAYERS), lambda step: torch.zeros(2, 16, dtype=torch.int64))
