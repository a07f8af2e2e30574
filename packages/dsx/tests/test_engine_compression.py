"""Compression under the engine: the same losses as a plain loop, in every ZeRO stage, and resumed in the middle."""

import copy

import dsx
import pytest
import torch
from dsx.engine.errors import EngineArgumentError
from dsx_compress import CompressionError, compression_report, init_compression
from dsx_compress.apply import techniques_of
from dsx_compress.techniques import WeightQuantizer
from dsx_testkit import run_ranks
from dsx_testkit.compression import Block, base_config, batches, train_engine, train_plain
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(8, 4)

    def forward(self, x, y):
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return functional.mse_loss(self.head(h).float(), y.float())


def compression():
    """Methods that all begin in the middle of a short run."""
    return {
        "weight_quantization": {
            "shared_parameters": {"enabled": True, "schedule_offset": 1, "quantize_weight_in_forward": True},
            "different_groups": {"w": {"params": {"start_bits": 8, "target_bits": 5, "quantization_period": 1}}},
        },
        "activation_quantization": {
            "shared_parameters": {"enabled": True, "schedule_offset": 3, "range_calibration": "static"},
            "different_groups": {"a": {"modules": ["down"]}},
        },
        "sparse_pruning": {
            "shared_parameters": {"enabled": True, "schedule_offset": 2},
            "different_groups": {"s": {"params": {"dense_ratio": 0.5}, "modules": ["down"]}},
        },
        "row_pruning": {
            "shared_parameters": {"enabled": True, "schedule_offset": 4, "method": "topk"},
            "different_groups": {"r": {"modules": ["up"], "related_modules": [["down"]]}},
        },
    }


def fresh():
    torch.manual_seed(0)
    return Model()


def build(stage=0, **more):
    torch.manual_seed(0)
    return dsx.initialize(model=fresh(), config=base_config(stage, **more))[0]


def steps(engine, count, rank=0, world=1, first=0):
    return train_engine(engine, ((x[rank::world], y[rank::world]) for x, y in batches(count, 4 * world, first)))


def plain(count):
    """The same training without an engine."""
    return train_plain(fresh(), compression(), count, max_norm=1.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_trains_as_a_plain_loop(stage):
    expected, model = plain(10)
    engine = build(stage, compression_training=compression())
    found = steps(engine, 10)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    own = {p.name: p.technique for p in techniques_of(engine.module) if p.technique.method == "sparse_pruning"}
    for placed in techniques_of(model):
        if placed.technique.method == "sparse_pruning":
            assert torch.equal(own[placed.name].mask, placed.technique.mask)
            assert placed.technique.mask.float().mean() == 0.5


def train(rank, world, stage):
    engine = build(stage, compression_training=compression())
    losses = steps(engine, 8, rank, world)
    masks = [t.technique.mask for t in techniques_of(engine.module) if t.technique.method == "sparse_pruning"]
    ranges = [
        t.technique.range for t in techniques_of(engine.module) if t.technique.method == "activation_quantization"
    ]
    bits = [t.technique.schedule.bits for t in techniques_of(engine.module) if isinstance(t.technique, WeightQuantizer)]
    return losses, torch.stack([m.float() for m in masks]), torch.cat(ranges), bits


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_two_ranks_have_the_same_masks_and_ranges(stage):
    (losses, masks, ranges, bits), (_, other_masks, other_ranges, _) = run_ranks(train, 2, stage)
    assert torch.equal(masks, other_masks) and masks.mean() == 0.5
    assert torch.equal(ranges, other_ranges) and (ranges != 0).all()
    assert set(bits) == {5}
    assert all(loss == loss for loss in losses)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("at", [2, 5])
def test_training_resumes_in_the_middle(tmp_path, stage, at):
    engine = build(stage, compression_training=compression())
    whole = steps(engine, at)
    engine.save_checkpoint(str(tmp_path))
    whole += steps(engine, 9 - at, first=at)
    again = build(stage, compression_training=compression())
    again.load_checkpoint(str(tmp_path))
    assert steps(again, 9 - at, first=at) == whole[at:]


def test_a_checkpoint_of_another_compression_is_refused(tmp_path):
    engine = build(compression_training=compression())
    steps(engine, 2)
    engine.save_checkpoint(str(tmp_path))
    other = copy.deepcopy(compression())
    other["weight_quantization"]["different_groups"]["w"]["params"]["target_bits"] = 8
    other["weight_quantization"]["different_groups"]["w"]["params"]["start_bits"] = 8
    again = build(compression_training=other)
    with pytest.raises(dsx.checkpoint.CheckpointError, match="expected 8 to 8"):
        again.load_checkpoint(str(tmp_path))


def test_a_model_that_the_caller_prepared_is_taken_as_it_is():
    torch.manual_seed(0)
    model = init_compression(fresh(), compression())
    engine = dsx.initialize(
        model=model, model_parameters=model.parameters(), config=base_config(compression_training=compression())
    )[0]
    assert steps(engine, 10) == pytest.approx(plain(10)[0], rel=1e-5)
    with pytest.raises(CompressionError, match="the model was prepared with"):
        only = {"sparse_pruning": compression()["sparse_pruning"]}
        dsx.initialize(model=init_compression(fresh(), only), config=base_config(compression_training=compression()))


def test_a_prepared_model_without_the_section_is_said(caplog):
    with caplog.at_level("WARNING", logger="dsx"):
        dsx.initialize(model=init_compression(fresh(), compression()), config=base_config())
    assert "advances no schedule" in caplog.text


def test_learnable_scores_are_trained_whatever_the_caller_passes():
    for in_groups in (False, True):
        model = fresh()
        parameters = list(model.parameters())
        engine, *_ = dsx.initialize(
            model=model,
            model_parameters=[{"params": parameters}] if in_groups else parameters,
            config=base_config(compression_training=compression()),
        )
        before = [p.detach().clone() for n, p in engine.module.named_parameters() if n.endswith("scores")]
        steps(engine, 7)
        after = [p for n, p in engine.module.named_parameters() if n.endswith("scores")]
        assert len(before) == 2 and not any(torch.equal(a, b) for a, b in zip(before, after))
    model = fresh()
    with pytest.raises(EngineArgumentError, match="2 learnable scores"):
        dsx.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={**base_config(compression_training=compression()), "optimizer": None},
        )


def moq(**more):
    return {
        "enabled": True,
        "quantize_bits": {"start_bits": 10, "target_bits": 4},
        "quantize_schedule": {"quantize_period": 2, "schedule_offset": 1},
        **more,
    }


def bits_of(engine):
    return {p.name: p.technique.schedule.bits for p in techniques_of(engine.module)}


@pytest.mark.parametrize(
    "precision", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}]
)
@pytest.mark.parametrize("stage", [0, 3])
def test_moq_lowers_the_bits_of_all_weights(stage, precision):
    engine = build(stage, quantize_training=moq(), **precision)
    seen = []
    for step in range(10):
        steps(engine, 1, first=step)
        (bits,) = set(bits_of(engine).values())
        seen.append(bits)
    assert seen == [10, 10, 9, 9, 8, 8, 8, 8, 7, 7]  # counted from step 1: at 2, 4 and 8


def test_moq_keeps_the_masters_whole():
    """The optimizer's weight is not the quantised one: it moves by less than a quantisation step and keeps that."""
    engine = build(0, quantize_training=moq(quantize_bits={"start_bits": 3, "target_bits": 3}))
    steps(engine, 3)
    layer = engine.module.head
    stored, used = layer.parametrizations.weight.original, layer.weight
    assert not torch.equal(stored, used) and len(used.unique()) <= 8 < len(stored.unique())


def test_moq_with_eigenvalues_keeps_steep_blocks_precise_for_longer():
    section = {"enabled": True, "layer_name": "blocks", "layer_num": 2, "max_iter": 3, "gas_boundary_resolution": 4}
    engine = build(0, quantize_training=moq(eigenvalue=section))
    steps(engine, 9)
    bits = bits_of(engine)
    # relative eigenvalue of the steepest block is 1: factor 5 instead of 1
    assert max(bits["blocks.0.up"], bits["blocks.1.up"]) > bits["head"]
    assert bits["head"] == bits["first"] == 7


def test_an_overflow_is_not_counted():
    engine = build(0, quantize_training=moq(), fp16={"enabled": True, "initial_scale_power": 4})
    for x, y in batches(1, 4):
        loss = engine(x.half(), y) * torch.tensor(float("inf"))
        engine.backward(loss)
        engine.step()
    assert engine.skipped_steps == 1
    steps(engine, 3)
    assert set(bits_of(engine).values()) == {9}


def test_both_forms_of_quantisation_at_once_are_refused():
    with pytest.raises(dsx.DsxConfigError, match=r"compression_training is the newer form"):
        build(0, quantize_training=moq(), compression_training=compression())
    with pytest.raises(dsx.DsxConfigError, match=r"quantize_training\.eigenvalue\.layer_num"):
        build(0, quantize_training=moq(eigenvalue={"enabled": True}))


def test_the_module_has_the_names_of_the_package():
    import dsx_compress

    assert dsx.compress.init_compression is dsx_compress.init_compression
    assert set(dsx.compress.__all__) == set(dsx_compress.__all__)
    engine = build(0, compression_training=compression())
    assert len(compression_report(engine.module).rows) == 8


def test_scores_of_snip_do_not_depend_on_the_loss_scale():
    """The scale doubles after each update; the scores are those of training without a scale."""
    method = {"enabled": True, "method": "snip_momentum", "schedule_offset": 0, "schedule_offset_end": 20}
    section = {"sparse_pruning": {"shared_parameters": {**method, "schedule_offset_stride": 20, "dense_ratio": 0.5}}}
    scores = []
    for power, window in ((0, 1000), (4, 1)):
        fp16 = {"enabled": True, "initial_scale_power": power, "loss_scale_window": window, "auto_cast": True}
        engine = build(compression_training=section, fp16=fp16)
        first = engine.loss_scale()
        steps(engine, 4)
        assert (engine.loss_scale() > first) == (window == 1)
        scores.append(torch.cat([
            p.technique.pending_score().flatten() for p in techniques_of(engine.module)
        ]))  # fmt: skip
    torch.testing.assert_close(scores[1], scores[0], rtol=2e-2, atol=1e-5)
