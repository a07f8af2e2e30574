"""When techniques begin, how bits fall, and that training resumed in the middle goes on exactly."""

import copy

import pytest
import torch
from compress_zoo import TinyBert, ids, method, train
from dsx_compress import CompressionError, compression_scheduler, init_compression
from dsx_compress.apply import techniques_of
from dsx_compress.bits import BitSchedule, period_factor
from dsx_compress.moq import OptimizerQuantizer
from dsx_compress.quantizers import fake_quantize
from dsx_compress.scheduler import CompressionScheduler
from torch.nn import functional

QUANTIZE = {"quantize_weight_in_forward": True}


def prepared(config, seed=0, **settings):
    torch.manual_seed(seed)
    model = init_compression(TinyBert(1), config)
    return model, compression_scheduler(model, config, **settings)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize(
    "name, shared",
    [
        ("weight_quantization", QUANTIZE),
        ("activation_quantization", {}),
        ("sparse_pruning", {"method": "l1"}),  # E93: l1 and topk need no schedule_offset_end
        ("sparse_pruning", {"method": "topk"}),
        ("row_pruning", {"method": "l1"}),
        ("row_pruning", {"method": "topk"}),
        ("head_pruning", {"num_heads": 4}),
    ],
)
def test_a_technique_begins_after_its_offset(name, shared, offset):
    model, scheduler = prepared(method(name, {**shared, "schedule_offset": offset}, g={"modules": ["dense"]}))
    (technique, *_) = [p.technique for p in techniques_of(model)]
    seen = [technique.enabled]
    for _ in range(4):
        model(ids()).sum().backward()
        scheduler.step()
        seen.append(technique.enabled)
    assert seen == [step >= offset for step in range(5)]


def test_before_the_offset_the_model_is_the_plain_one():
    config = {
        **method("weight_quantization", {**QUANTIZE, "schedule_offset": 5}, g={}),
        **method("activation_quantization", {"schedule_offset": 5}, g={}),
        **method("row_pruning", {"schedule_offset": 5}, g={"modules": ["up"]}),
    }
    torch.manual_seed(0)
    plain = TinyBert(1)
    torch.manual_seed(0)
    model = init_compression(TinyBert(1), config)
    assert train(model, compression_scheduler(model, config), 5) == train(plain, None, 5)


def test_bits_fall_at_the_period_and_its_doublings():
    schedule = BitSchedule(8, 4, 3)
    assert [step for step in range(1, 40) if schedule.advance(step)] == [3, 6, 12, 24]
    assert schedule.bits == 4
    steep = BitSchedule(8, 4, 3)
    assert [step for step in range(1, 200) if steep.advance(step, period_factor(0.5))] == [3, 18, 108]
    assert BitSchedule(8, 3, 0).bits == 3
    assert [period_factor(value) for value in (0.0, 0.24, 0.25, 0.99, 1.0)] == [1, 1, 2, 4, 5]
    with pytest.raises(CompressionError, match="from 0 to 1"):
        period_factor(1.5)


def test_the_weight_in_use_is_the_quantised_one_at_the_bits_of_the_schedule():
    config = method("weight_quantization", {**QUANTIZE, "quantize_groups": 2}, g={
        "start_bits": 5, "target_bits": 1, "quantization_period": 1, "modules": ["head"]})  # fmt: skip
    model, scheduler = prepared(config)
    for bits in (5, 4, 3, 3, 2, 2, 2, 2, 1):
        stored = model.head.parametrizations.weight.original
        assert torch.equal(model.head.weight, fake_quantize(stored, bits, 2))
        scheduler.step()


def test_eigenvalues_slow_the_blocks_they_name():
    config = method("weight_quantization", QUANTIZE, g={"start_bits": 8, "target_bits": 4, "quantization_period": 1})
    model, scheduler = prepared(config)
    assert scheduler.needs_eigenvalues()
    for _ in range(8):
        scheduler.step({"layers.0": 1.0})
    bits = {p.name: p.technique.schedule.bits for p in techniques_of(model)}
    assert bits["head"] == 4 and bits["layers.0.up"] == 7


def test_the_mixture_falls_to_zero_and_stays_there():
    # E92: DeepSpeed's jumped back to 1 when a bit went, and fell below 0
    shared = {**QUANTIZE, "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.3}}
    config = method("weight_quantization", shared, g={
        "start_bits": 8, "target_bits": 4, "quantization_period": 1, "modules": ["head"]})  # fmt: skip
    model, scheduler = prepared(config)
    (technique,) = [p.technique for p in techniques_of(model)]
    seen = []
    for _ in range(6):
        stored = model.head.parametrizations.weight.original
        quantized = fake_quantize(stored, technique.schedule.bits)
        torch.testing.assert_close(model.head.weight, technique.ratio * stored + (1 - technique.ratio) * quantized)
        seen.append(technique.ratio)
        scheduler.step()
    assert seen == pytest.approx([1.0, 0.7, 0.4, 0.1, 0.0, 0.0])
    model.head.weight.sum().backward()
    assert torch.equal(stored.grad, torch.ones_like(stored))


def everything():
    return {
        **method("weight_quantization", {**QUANTIZE, "schedule_offset": 1}, g={
            "start_bits": 8, "target_bits": 5, "quantization_period": 1}),
        **method("activation_quantization", {"schedule_offset": 2}, g={"modules": ["down"]}),
        **method("sparse_pruning", {"schedule_offset": 3}, g={"modules": ["query"]}),
        **method("row_pruning", {"schedule_offset": 4, "method": "topk"}, g={"modules": ["up"]}),
        **method("head_pruning", {"schedule_offset": 5, "num_heads": 4}, g={"modules": ["dense"]}),
    }  # fmt: skip


def snip(**shared):
    return method("sparse_pruning", {
        "method": "snip_momentum", "schedule_offset": 2, "schedule_offset_end": 8, "schedule_offset_stride": 3,
        "dense_ratio": 0.25, "excluded_modules": ["head"], **shared})  # fmt: skip


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("config", [everything(), snip()], ids=["everything", "snip"])
def test_training_resumed_in_the_middle_goes_on_exactly(config, at):
    model, scheduler = prepared(config)
    whole = train(model, scheduler, at)
    saved = copy.deepcopy((model.state_dict(), scheduler.state_dict()))
    whole += train(model, scheduler, 10 - at, first=at)
    again, other = prepared(config, seed=1)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert train(again, other, 10 - at, first=at) == whole[at:]


def test_a_state_of_another_model_changes_nothing():
    _, scheduler = prepared(everything())
    _, other = prepared(snip())
    before = scheduler.state_dict()
    for state in (other.state_dict(), {}, {"training_steps": -1, "techniques": {}}):
        with pytest.raises(CompressionError):
            scheduler.load_state_dict(state)
    assert scheduler.state_dict() == before


def test_snip_prunes_more_and_more_and_ends_at_its_ratio():
    model, scheduler = prepared(snip())
    mask = next(p.technique for p in techniques_of(model) if p.name == "layers.0.up")
    density = []
    for step in range(10):
        train(model, scheduler, 1, first=step)
        density.append(mask.kept().float().mean().item())
    assert density[:4] == [1.0] * 4
    assert density[4] == pytest.approx(1 - 0.75 * (1 - 0.5**3), abs=0.01)
    assert density[7:] == [0.25] * 3
    blocks = mask.kept().view(8, 4, 16)
    assert torch.equal(blocks.any(1), blocks.all(1))
    assert (model.layers[0].up.weight == 0).float().mean() == 0.75


def test_snip_keeps_what_the_loss_needs():
    """The mask is that of the momentum of |w g|, worked out by hand."""
    config = snip(schedule_offset=0, schedule_offset_end=3, schedule_offset_stride=1, block_pattern="2:4")
    del config["sparse_pruning"]["shared_parameters"]["dense_ratio"]
    model, scheduler = prepared(config)
    weight = model.layers[0].up.parametrizations.weight.original
    technique = next(p.technique for p in techniques_of(model) if p.name == "layers.0.up")
    score = torch.zeros_like(weight)
    for step in range(3):
        used = model.layers[0].up.weight.detach().clone()
        x = ids(seed=step)
        loss = functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        model.zero_grad()
        loss.backward()
        # the gradient reaches the stored weight through the mask; where it is 0, so is |w g|
        score += (used * weight.grad).abs()
        if step < 2:
            scheduler.step()
            score *= 0.9
    torch.testing.assert_close(technique.pending_score(), score)
    scheduler.step()
    kept = score.view(-1, 4).argsort(dim=1, descending=True, stable=True)[:, :2]
    expected = torch.zeros(score.numel() // 4, 4, dtype=torch.bool).scatter_(1, kept, True).view(score.shape)
    assert torch.equal(technique.kept(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_snip_scores_do_not_depend_on_the_loss_scale(dtype):
    """The scale grows by a factor of 2^12 in the middle; products of scaled numbers leave the range of float16."""
    scores = []
    for scales in ([1.0] * 4, [16.0, 16.0, 2.0**16, 2.0**16]):
        config = snip(schedule_offset=0, schedule_offset_end=9, schedule_offset_stride=9)
        model, _ = prepared(config)
        current = [1.0]
        scheduler = compression_scheduler(model, config, loss_scale=lambda current=current: current[0])
        technique = next(p.technique for p in techniques_of(model) if p.name == "layers.0.up")
        for step, current[0] in enumerate(scales):
            weight = torch.full(technique.kept().shape, 2.0 + step, dtype=dtype, requires_grad=True)
            technique(weight).backward(torch.full_like(weight, 2.0**-3 * current[0]))
            scheduler.step()
        scores.append(technique.pending_score().clone())
        assert copy.deepcopy(technique).loss_scale() == 1.0, "a copy does not take the scaler along"
    expected = sum((2.0 + step) * 2.0**-3 * 0.9 ** (4 - step) for step in range(4))
    torch.testing.assert_close(scores[0], torch.full_like(scores[0], expected))
    torch.testing.assert_close(scores[1], scores[0])


def test_snip_without_gradients_says_so():
    _, scheduler = prepared(snip(schedule_offset=0, schedule_offset_end=1, schedule_offset_stride=1))
    with pytest.raises(CompressionError, match="has seen no gradient"):
        scheduler.step()


def test_static_ranges_follow_training_and_stand_still_in_evaluation():
    model, scheduler = prepared(method("activation_quantization", {"schedule_offset": 1}, g={"modules": ["up"]}))
    technique = next(p.technique for p in techniques_of(model))
    seen = []
    model.layers[0].up.register_forward_pre_hook(
        lambda m, i: seen.append(torch.stack(torch.aminmax(i[0]))), prepend=True
    )
    for step in range(3):
        model(ids(seed=step))
    expected = seen[0]
    for found in seen[1:]:
        expected = 0.95 * expected + 0.05 * found
    torch.testing.assert_close(technique.range, expected)
    model.eval()
    model(ids(seed=9))
    torch.testing.assert_close(technique.range, expected)
    scheduler.step()
    x = torch.randn(3, 16, dtype=torch.float64) * 2
    s = 2 * technique.range.abs().max().double() / 256
    torch.testing.assert_close(technique(x), (x / s).round().clamp(-128, 127) * s, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_dynamic_scales_are_those_of_each_token(kind):
    shared = {"range_calibration": "dynamic", "quantization_type": kind}
    model, _ = prepared(method("activation_quantization", shared, g={"bits": 4, "modules": ["up"]}))
    technique = next(p.technique for p in techniques_of(model))
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    expected = torch.stack([torch.stack([fake_quantize(token, 4, 1, kind) for token in row]) for row in x])
    assert torch.equal(technique(x), expected)


def test_scores_and_ranges_are_averaged_over_ranks():
    shared = []
    config = {
        **snip(schedule_offset=0, schedule_offset_end=1),
        **method("activation_quantization", g={"modules": ["up"]}),
    }
    model, scheduler = prepared(config, mean=lambda tensor: shared.append(tensor.clone()))
    train(model, scheduler, 1)
    names = [p.name for p in techniques_of(model) if p.technique.method == "sparse_pruning"]
    assert [tuple(t.shape) for t in shared[: len(names)]] == [tuple(model.get_submodule(n).weight.shape) for n in names]
    assert shared[-1].shape == (2,)


def test_weights_are_gathered_only_to_make_masks():
    from contextlib import contextmanager

    gathered = []

    @contextmanager
    def gather(parameters):
        gathered.append(len(parameters))
        yield

    config = {
        **method("sparse_pruning", {"schedule_offset": 2}, g={"modules": ["up"]}),
        **method("weight_quantization", QUANTIZE, g={}),
    }
    _, scheduler = prepared(config, gather=gather)
    counts = []
    for _ in range(4):
        scheduler.step()
        counts.append(len(gathered))
    assert counts == [0, 1, 1, 1]


def test_a_scheduler_without_techniques_or_for_others_is_refused():
    with pytest.raises(CompressionError, match="call init_compression first"):
        CompressionScheduler(TinyBert(1))
    model, _ = prepared(snip())
    with pytest.raises(CompressionError, match="pass the configuration of init_compression"):
        compression_scheduler(model, everything())


# - The optimizer's side


def moq(**more):
    return {"enabled": True, "quantize_bits": {"start_bits": 8, "target_bits": 4},
            "quantize_schedule": {"quantize_period": 2, "schedule_offset": 1}, **more}  # fmt: skip


def test_moq_quantises_in_place_and_counts_no_overflow():
    masters = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    weight, bias = masters.half(), torch.ones(8).half()
    quantizer = OptimizerQuantizer([("w", weight), ("b", bias)], moq())
    seen = []
    for step in range(10):
        weight.copy_(masters)
        quantizer.step(overflow=step == 4)
        if step == 4:
            assert torch.equal(weight, masters.half())
            continue
        seen.append(quantizer.bits["w"])
        assert torch.equal(weight, fake_quantize(masters.half(), seen[-1]))
    assert seen == [8, 8, 7, 7, 6, 6, 6, 6, 5] and torch.equal(bias, torch.ones(8).half())
    again = OptimizerQuantizer([("w", weight)], moq())
    again.load_state_dict(quantizer.state_dict())
    assert again.bits == quantizer.bits


def test_moq_draws_the_same_numbers_on_every_rank():
    def run():
        weight = torch.linspace(-1, 1, 64).view(8, 8).bfloat16()
        quantizer = OptimizerQuantizer([("w", weight)], moq(quantize_algo={"rounding": "stochastic"}))
        torch.manual_seed(torch.seed() % 1000)
        quantizer.step()
        return weight

    assert torch.equal(run(), run())


def test_moq_refuses_weights_that_are_their_own_masters():
    with pytest.raises(CompressionError, match=r"w is torch\.float32, expected float16 or bfloat16"):
        OptimizerQuantizer([("w", torch.randn(4, 4))], moq())
    with pytest.raises(CompressionError, match="expected true"):
        OptimizerQuantizer([], {"enabled": False})
