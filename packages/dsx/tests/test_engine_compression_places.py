"""Compression trains wherever a model may be: offloaded, built under `zero.Init`, in pipeline stages, in tensor slices,
with low-rank adapters, compiled; and it resumes in the middle of its schedule at every ZeRO stage.
"""

import copy

import dsx
import pytest
import torch
from dsx_compress import CompressionError, compression_scheduler, init_compression, redundancy_clean
from dsx_compress.apply import techniques_of
from dsx_testkit import run_ranks
from dsx_testkit.compression import Block, base_config, batches, train_engine, train_plain
from torch import nn
from torch.nn import functional

STEPS = 6


def layers():
    """The layers of the model, with the same values every time."""
    torch.manual_seed(0)
    return [nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 4)]


class Model(nn.Module):
    def __init__(self, made=None):
        super().__init__()
        self.layers = nn.Sequential(*(layers() if made is None else made))

    def forward(self, x, y):
        return error(self.layers(x), y)


def error(output, y):
    return functional.mse_loss(output.float(), y.float())


def method(name, shared, **group):
    group = {"params": {k: group.pop(k) for k in list(group) if k not in ("modules", "related_modules")}, **group}
    return {name: {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"g": group}}}


def compression():
    """Methods that begin, and bits that fall, in the middle of a short run; masks made of weights and of scores."""
    return {
        **method("weight_quantization",
                 {"schedule_offset": 1, "quantize_weight_in_forward": True, "quantize_groups": 4},
                 start_bits=8, target_bits=5, quantization_period=1),
        **method("activation_quantization", {"schedule_offset": 3, "range_calibration": "dynamic"}, modules=["down"]),
        **method("sparse_pruning", {"schedule_offset": 2}, dense_ratio=0.5, modules=["down"]),
        **method("row_pruning", {"schedule_offset": 4, "method": "topk"}, dense_ratio=0.5, modules=["up"],
                 related_modules=[["down"]]),
    }  # fmt: skip


def config(stage=0, **more):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    own = {"zero_optimization": zero, "compression_training": compression(), "gradient_clipping": 0.0}
    return base_config(stage, **{**own, **more})


def plain(count, model=None, section=None, size=4):
    """The training without an engine: the losses, and the model."""
    model = Model() if model is None else model
    torch.manual_seed(1)
    return train_plain(model, section or compression(), count, size=size)


def build(settings, model=None):
    made = Model() if model is None else model
    torch.manual_seed(1)
    return dsx.initialize(model=made, config=settings)[0]


def steps(engine, count, rank=0, world=1, first=0):
    rows = slice(rank * 4 // world, (rank + 1) * 4 // world)
    return train_engine(engine, ((x[rows], y[rows]) for x, y in batches(count, 4, first)))


def mean(found):
    return [sum(values) / len(values) for values in zip(*found)]


# - ZeRO: resume in the middle, offload, Init


def resumed(rank, world, stage, at, folder, zero):
    settings = {**config(stage, zero=zero), "train_micro_batch_size_per_gpu": 4 // world}
    engine = build(settings)
    whole = steps(engine, at, rank, world)
    engine.save_checkpoint(folder)
    whole += steps(engine, STEPS - at, rank, world, at)
    again = build(settings)
    again.load_checkpoint(folder)
    return whole, steps(again, STEPS - at, rank, world, at)


@pytest.mark.parametrize(
    "stage, at",
    [pytest.param(0, 1, marks=pytest.mark.slow), pytest.param(1, 3, marks=pytest.mark.slow), (2, 2), (3, 4)],
)
def test_two_ranks_resume_in_the_middle_at_every_stage(tmp_path, stage, at):
    found = run_ranks(resumed, 2, stage, at, str(tmp_path), {})
    for whole, again in found:
        assert again == whole[at:]
    assert mean([whole for whole, _ in found]) == pytest.approx(plain(STEPS)[0], rel=1e-4)


@pytest.mark.parametrize("stage, world", [(2, 1), pytest.param(3, 1, marks=pytest.mark.slow), (3, 2)])
def test_offloaded_to_the_host(tmp_path, stage, world):
    zero = {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 100}
    if stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    found = run_ranks(resumed, world, stage, 3, str(tmp_path), zero)
    assert all(again == whole[3:] for whole, again in found)
    assert mean([whole for whole, _ in found]) == pytest.approx(plain(STEPS)[0], rel=1e-4)


def from_init(rank, world, stage):
    torch.manual_seed(0)
    with dsx.zero.Init():
        model = Model([nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 4)])
    engine = build({**config(stage), "train_micro_batch_size_per_gpu": 4 // world}, model)
    losses = steps(engine, STEPS, rank, world)
    masks = [p.technique.kept().float().mean().item() for p in techniques_of(engine.module)
             if p.technique.method == "sparse_pruning"]  # fmt: skip
    return losses, masks


@pytest.mark.parametrize("stage, world", [(0, 1), pytest.param(3, 1, marks=pytest.mark.slow), (3, 2)])
def test_models_built_under_init(stage, world):
    expected = plain(STEPS)[0]
    found = run_ranks(from_init, world, stage)
    assert mean([losses for losses, _ in found]) == pytest.approx(expected, rel=1e-4)
    assert all(masks == [0.5, 0.5] for _, masks in found)


def test_a_model_that_an_engine_has_sharded_is_refused():
    engine = build({**config(3), "compression_training": {}})
    with pytest.raises(CompressionError, match="call init_compression before the model is sharded"):
        init_compression(engine.module, compression())


# - Pipelines and slices


def in_stages(rank, world, stage, folder):
    import dsx_pipe

    def engine():
        module = dsx_pipe.PipelineModule(layers(), num_stages=2, loss_fn=error, partition_method="uniform")
        settings = {**config(stage), "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
        section = {key: value for key, value in compression().items() if key != "row_pruning"}
        return build({**settings, "compression_training": section}, module)

    def train(made, count, first=0):
        losses = []
        for x, y in batches(count, 4, first):
            losses.append(float(made.train_batch(iter([(x[:2], y[:2]), (x[2:], y[2:])]))))
        return losses

    one = engine()
    whole = train(one, 3)
    one.save_checkpoint(folder)
    whole += train(one, STEPS - 3, 3)
    again = engine()
    again.load_checkpoint(folder)
    names = {p.name.rpartition(".")[2] for p in techniques_of(one.module)}
    return whole, train(again, STEPS - 3, 3), names


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_pipeline_stages_compress_their_own_layers(tmp_path, stage):
    section = {key: value for key, value in compression().items() if key != "row_pruning"}
    expected, _ = plain(STEPS, section=section)
    for whole, again, names in run_ranks(in_stages, 2, stage, str(tmp_path), timeout=120):
        assert whole == pytest.approx(expected, rel=1e-4) and again == pytest.approx(expected[3:], rel=1e-4)
        assert {"up", "down"} <= names


class Wide(nn.Module):
    """A block whose two layers may be cut over ranks."""

    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x, y):
        return error(self.down(functional.gelu(self.up(x))), y)


def sliced_config(groups):
    return {
        **method("weight_quantization", {"schedule_offset": 1, "quantize_weight_in_forward": True,
                                         "quantize_groups": groups}, start_bits=8, target_bits=4,
                 quantization_period=1),
    }  # fmt: skip


def sliced_pruning():
    """Masks of weights, and of learnable scores, which are slices as well."""
    return {
        **method("sparse_pruning", {"schedule_offset": 1, "method": "topk"}, dense_ratio=0.5),
        **method("row_pruning", {"schedule_offset": 2, "method": "topk"}, dense_ratio=0.5, modules=["up"],
                 related_modules=[["down"]]),
    }  # fmt: skip


def in_slices(rank, world, stage, folder, section):
    import dsx_pipe
    from dsx_pipe.tensor import ColumnParallelLinear, RowParallelLinear

    grid = dsx_pipe.RankGrid(dsx_pipe.PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1))

    def engine():
        torch.manual_seed(0)
        group = grid.model.group
        model = Wide(ColumnParallelLinear(4, 16, group=group, gather_output=False),
                     RowParallelLinear(16, 4, group=group, input_is_parallel=True))  # fmt: skip
        settings = {**config(stage), "compression_training": section}
        return dsx.initialize(model=model, config=settings, mpu=grid)[0]

    one = engine()
    whole = steps(one, 3)
    one.save_checkpoint(folder)
    whole += steps(one, STEPS - 3, first=3)
    again = engine()
    again.load_checkpoint(folder)
    return whole, steps(again, STEPS - 3, first=3)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_tensor_slices_are_quantised_where_they_lie(tmp_path, stage):
    torch.manual_seed(0)
    # As many groups of as many numbers: the rows of two slices, or two halves of each row.
    expected, _ = plain(STEPS, Wide(nn.Linear(4, 16), nn.Linear(16, 4)), sliced_config(8))
    for whole, again in run_ranks(in_slices, 2, stage, str(tmp_path), sliced_config(4), timeout=120):
        assert whole == pytest.approx(expected, rel=1e-4)
        assert again == pytest.approx(whole[3:], rel=1e-5)


def test_scores_of_slices_are_slices_and_resume(tmp_path):
    for whole, again in run_ranks(in_slices, 2, 0, str(tmp_path), sliced_pruning(), timeout=120):
        assert again == whole[3:]


# - Adapters and the compiler


class LowRank(nn.Module):
    """A frozen layer and a trained correction of rank 2."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + functional.linear(functional.linear(x, self.a), self.b)


def adapted():
    model = Model()
    torch.manual_seed(2)
    for block in (model.layers[1], model.layers[2]):
        block.up, block.down = LowRank(block.up), LowRank(block.down)
    return model


ADAPTERS = {
    **method("weight_quantization", {"schedule_offset": 2, "quantize_weight_in_forward": True}, start_bits=4,
             target_bits=4, modules=["base"]),
    **method("sparse_pruning", {"schedule_offset": 3}, dense_ratio=0.5, modules=["base"]),
}  # fmt: skip


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_layers_under_adapters_are_compressed(stage):
    expected, model = plain(STEPS, adapted(), ADAPTERS)
    engine = build({**config(stage), "compression_training": ADAPTERS}, adapted())
    frozen = model.layers[1].up.base.parametrizations.weight.original
    assert torch.equal(frozen, Model().layers[1].up.weight), "the adapters are trained, the frozen weights are not"
    assert steps(engine, STEPS) == pytest.approx(expected, rel=1e-4)
    x = torch.randn(3, 4)
    with torch.no_grad():
        before = model.layers(x)
        redundancy_clean(model, ADAPTERS)
        assert torch.equal(model.layers(x), before)
    assert not model.layers[1].up.base.weight.requires_grad and model.layers[1].up.b.requires_grad


def test_adapters_of_peft():
    peft = pytest.importorskip("peft")

    def made():
        torch.manual_seed(2)
        settings = peft.LoraConfig(r=2, target_modules=["up", "down"], lora_alpha=4, init_lora_weights="gaussian")
        return peft.get_peft_model(Model(), settings)

    section = copy.deepcopy(ADAPTERS)
    for part in section.values():
        part["different_groups"]["g"]["modules"] = ["base_layer"]
    expected, _ = plain(STEPS, made(), section)
    engine = build({**config(3), "compression_training": section}, made())
    assert steps(engine, STEPS) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("stage", [None, pytest.param(0, marks=pytest.mark.slow), 3])
def test_compiled_models_follow_the_schedule(stage):
    expected, _ = plain(STEPS)
    if stage is not None:
        engine = build(config(stage))
        engine.compile(backend="aot_eager")
        assert steps(engine, STEPS) == pytest.approx(expected, rel=1e-4)
        return
    model = Model()
    torch.manual_seed(1)
    init_compression(model, compression())
    scheduler = compression_scheduler(model, compression())
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    found = []
    for x, y in batches(STEPS, 4):
        loss = compiled(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        found.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-4)
