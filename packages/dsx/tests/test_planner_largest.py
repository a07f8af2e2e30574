"""The largest model that a machine can train is found, with the placement that reaches it."""

import dataclasses
import json

import pytest
import torch
from dsx.planning import Machine, PlanError, largest, plan
from dsx_plan.command import main
from dsx_plan.models import deep
from dsx_plan.sizes import describe_largest
from dsx_plan.text import describe_plan
from torch import nn

WIDTH = 256


class Deep(nn.Module):
    """Blocks of one matrix; an activation is small beside them."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


BLOCK = WIDTH * WIDTH * 4  # bytes in fp32
EXAMPLE = torch.zeros(1, WIDTH)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": WIDTH * WIDTH, "stage3_param_persistence_threshold": 0},
}
ZERO = "zero_optimization."


def machine(device=12 << 20, host=128 << 20):
    found = Machine.of("H100-SXM")
    return dataclasses.replace(found, memory_bytes=device, host_memory_bytes=host, communicator_bytes=1)


@pytest.mark.parametrize(("kind", "taken"), [("AdamW", True), ("torch", False)])
def test_a_plan_says_what_casts_cost_on_both_sides_of_the_link(kind, taken):
    """bf16 with the optimizer on the host: every element of the shard crosses once each way."""
    zero = {**CONFIG["zero_optimization"], "offload_optimizer": {"device": "cpu"}}
    config = {**CONFIG, "bf16": {"enabled": True}, "zero_optimization": zero}
    given = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-4)} if kind == "torch" else {}
    if given:
        config = {key: value for key, value in config.items() if key != "optimizer"}
    found = plan(
        lambda: Deep(3), config, world_size=1, machine=machine(), batch=EXAMPLE.bfloat16(), changes=False, **given
    )
    here, elements = machine(), 3 * WIDTH * WIDTH
    link, host = here.host_link_bandwidth, here.host_bandwidth
    assert found.casts["gradients"]["host"] == pytest.approx(elements * (2 / link + (4 if taken else 12) / host))
    assert found.casts["parameters"]["host"] == pytest.approx(elements * (2 / link + 8 / host))
    assert "casts of gradients: cheaper on the host" in describe_plan(found)
    wide = plan(
        lambda: Deep(3), {**config, "data_types": {"grad_accum_dtype": "fp32"}}, world_size=1, machine=machine(),
        batch=EXAMPLE.bfloat16(), changes=False, **given,
    )  # fmt: skip
    assert list(wide.casts) == ["parameters"]


def test_the_largest_model_is_the_one_that_fits_and_no_deeper_one():
    settings = {"device": {}, "host": {ZERO + "offload_optimizer": {"device": "cpu"}}}
    found = largest(Deep, CONFIG, world_size=1, machine=machine(), batch=EXAMPLE, settings=settings, recompute=False)
    device, host = found.reaches
    states = 4 * BLOCK  # parameter, gradient and two moments; buckets and gathered blocks come on top
    assert 0.6 * found.room / states < device.size <= found.room / states
    assert found.best is host and 1.5 * device.size < host.size <= found.room / BLOCK
    for reach in found.reaches:
        assert reach.plan.fits and reach.plan.parameters == reach.size * WIDTH * WIDTH
        deeper = int(reach.size * 1.05) + 2
        config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], **_inner(reach.values)}}
        answer = plan(lambda n=deeper: Deep(n), config, world_size=1, machine=machine(), batch=EXAMPLE, changes=False)
        assert not answer.fits


def _inner(values):
    return {key.removeprefix(ZERO): value for key, value in values.items()}


def test_the_host_is_what_ends_it_where_the_host_is_small():
    settings = {"host": {ZERO + "offload_optimizer": {"device": "cpu"}}}
    small = machine(host=12 << 20)
    found = largest(Deep, CONFIG, world_size=1, machine=small, batch=EXAMPLE, settings=settings)
    assert found.best.plan.peak["host"] <= 0.97 * (12 << 20) < 1.15 * found.best.plan.peak["host"]
    assert found.best.plan.peak_bytes < 0.8 * found.room


def test_the_disk_ends_it_where_its_size_is_known():
    settings = {"disk": {ZERO + key: {"device": "nvme", "nvme_path": "/local"} for key in
                         ("offload_optimizer", "offload_param")}}  # fmt: skip
    room = 6 << 20
    given = {"world_size": 1, "batch": EXAMPLE, "settings": settings, "recompute": False}
    found = largest(Deep, CONFIG, machine=dataclasses.replace(machine(), disk_bytes=room), **given)
    assert room - 4 * BLOCK < found.best.plan.peak["disk"] <= room  # a block has three fp32 values per element there
    assert largest(Deep, CONFIG, machine=machine(), **given).best.size > found.best.size
    answer = plan(
        lambda: Deep(found.best.size + 1), {**CONFIG, "zero_optimization": {
            **CONFIG["zero_optimization"], **_inner(settings["disk"])}}, world_size=1,
        machine=dataclasses.replace(machine(), disk_bytes=room), batch=EXAMPLE, changes=False,
    )  # fmt: skip
    assert answer.short_of[0] == "disk" and answer.short_of[2] == room


def test_every_placement_is_tried_and_each_reaches_at_least_as_far():
    found = largest(Deep, CONFIG, world_size=2, machine=machine(), batch=EXAMPLE, recompute=False)
    assert [reach.what for reach in found.reaches] == [
        "as configured", "optimizer states in host memory", "parameters in host memory", "optimizer states on disk",
        "parameters on disk",
    ]  # fmt: skip
    device, optimizer, parameters, *disk = (reach.size for reach in found.reaches)
    assert device < optimizer < parameters  # on disk a small model ends earlier: its buffers have a least size
    assert all(disk) and found.best.size == max(parameters, *disk)
    text = describe_largest(found)
    assert f"largest model: {found.best.size:,} blocks, " in text and "B parameters (" in text
    assert "--set zero_optimization.offload_optimizer=" in text


@pytest.mark.parametrize(
    "model, match",
    [(lambda: Deep(2), "expected a function of the number of blocks"), (Deep(2), "got Deep, expected a function"),
     (lambda blocks: blocks, r"<lambda>\(4\) returned int")],
)  # fmt: skip
def test_a_model_that_cannot_be_deepened_is_refused(model, match):
    with pytest.raises(PlanError, match=match):
        largest(model, CONFIG, world_size=1, machine=machine(), batch=EXAMPLE)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(PlanError, match="no setting can hold a model of 4 blocks: a: does not fit"):
        largest(Deep, CONFIG, world_size=1, machine=machine(1 << 20), batch=EXAMPLE, settings={"a": {}})
    with pytest.raises(PlanError, match="start: got True"):
        largest(Deep, CONFIG, world_size=1, machine=machine(), batch=EXAMPLE, start=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    with pytest.raises(PlanError, match="does not say how many layers it has"):
        largest(tmp_path, CONFIG, world_size=1, machine=machine())


def test_layers_of_a_hugging_face_model_are_added(tmp_path):
    transformers = pytest.importorskip("transformers")
    gemma = transformers.Gemma3TextConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=32, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        architectures=["Gemma3ForCausalLM"],
    )  # fmt: skip
    gemma.save_pretrained(tmp_path)
    made = deep(tmp_path)(5)()
    assert len(made.model.layers) == 5 and made.config.layer_types == (gemma.layer_types * 2)[:5]


PROGRAM = """
import sys; sys.path.insert(0, {folder!r})
from test_planner_largest import Deep

def batch():
    import torch
    return torch.zeros(1, 256)
"""


def test_the_command(tmp_path, capsys):
    program, picture = tmp_path / "m.py", tmp_path / "memory.svg"
    program.write_text(PROGRAM.format(folder=__file__.rpartition("/")[0]))
    host = {"device": "cpu"}
    zero = {**CONFIG["zero_optimization"], "offload_optimizer": host, "offload_param": host}
    (tmp_path / "c.json").write_text(json.dumps({**CONFIG, "zero_optimization": zero}))
    machine(4 << 20, 24 << 20).save(tmp_path / "machine.json")
    words = [f"{program}:Deep", "-c", f"{tmp_path}/c.json", "-n", "1", "-m", f"{tmp_path}/machine.json"]
    assert main([*words, "--largest", "-b", f"{program}:batch", "--picture", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "largest model: " in said and "parameters on disk" in said
    assert "blocks of the model" in picture.read_text()
    assert main([*words, "--largest", "--search"]) == 1
    assert "--largest: got --search beside it" in capsys.readouterr().err
