"""Plans for a device that is not here: copies between tiers by their formulas, overlap, models by their config.json."""

import json

import pytest
import torch
from dsx.planning import Constants, Machine, Plan, plan
from torch import nn

WIDTH = 256


class Stack(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.float().square().mean()


PARAMETERS = 6 * WIDTH * WIDTH


def ask(stage, world=1, accumulation=1, *, machine="H100-SXM", micro=4, **zero) -> Plan:
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    batch = torch.zeros(micro, WIDTH, dtype=torch.bfloat16)
    return plan(Stack, config, world_size=world, machine=machine, batch=batch, changes=False)


HOST = {"device": "cpu"}


@pytest.mark.parametrize("world", [1, 4])
def test_offload_moves_two_bytes_out_and_two_in(world):
    """ZeRO-Offload's 4 bytes a parameter and step: gradients to the host, new parameters to the device."""
    found = ask(2, world, offload_optimizer=HOST)
    assert found.traffic["to host"] == pytest.approx(2 * PARAMETERS / world, rel=0.01)
    assert found.traffic["to device"] == pytest.approx(2 * PARAMETERS / world, rel=0.01)
    assert found.bytes["optimizer"] == {"host": pytest.approx(8 * PARAMETERS / world, rel=0.01)}
    assert found.bytes["master"]["host"] == pytest.approx(4 * PARAMETERS / world, rel=0.01)
    assert found.peak["host"] >= 14 * PARAMETERS / world
    kept = ask(2, world)
    assert kept.traffic["to host"] == kept.traffic["to device"] == 0 and "host" not in kept.peak
    assert found.peak_bytes < kept.peak_bytes and found.parts["copies"] > 0 == kept.parts["copies"]


def test_parameters_on_the_host_come_for_each_use():
    """Twice a micro-batch, and this rank's updated ones stay there."""
    found = ask(3, accumulation=2, offload_optimizer=HOST, offload_param=HOST)
    assert found.traffic["to device"] == pytest.approx(2 * 2 * 2 * PARAMETERS, rel=0.1)
    assert found.bytes["params"] == {"host": pytest.approx(2 * PARAMETERS, rel=0.01)}
    assert found.peak["host"] >= 16 * PARAMETERS


def test_states_on_disk_are_read_and_written_once(tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path / "not made")}
    found = ask(3, offload_optimizer=disk)
    for direction in ("to disk", "from disk"):
        assert found.traffic[direction] == pytest.approx(12 * PARAMETERS, rel=0.01), direction
    assert found.peak["disk"] == pytest.approx(12 * PARAMETERS, rel=0.01)
    assert not any(tmp_path.iterdir())  # no file


def test_time_follows_the_machine():
    base = Machine.named("H100-SXM")
    values = {name: getattr(base, name) for name in base.to_dict()}
    slow = Machine(**{**values, "link_bandwidth": base.link_bandwidth / 1000})
    one, other = (ask(3, 4, machine=found) for found in (base, slow))
    assert other.parts["communication"] > 10 * one.parts["communication"]
    assert other.parts["exposed_communication"] > one.parts["exposed_communication"]
    assert one.parts["exposed_communication"] <= one.parts["communication"]
    assert other.step_seconds > one.step_seconds and one.flops == other.flops
    lazy = Machine(**{**values, "constants": Constants(operator_seconds=1e-3)})
    assert ask(0, machine=lazy).parts["overhead"] > 0.03


def test_flops_are_counted_and_micro_batches_repeat():
    """Three products of each weight, none for the first layer's input; a hundred micro-batches cost a hundred."""
    one, many = ask(0, micro=512), ask(0, accumulation=100, micro=512)
    products = 2 * 512 * PARAMETERS * 3 - 2 * 512 * WIDTH * WIDTH
    assert one.flops == pytest.approx(products, rel=0.02) and one.recomputed_flops == 0
    micro = one.flops
    assert many.flops == pytest.approx(100 * micro, rel=0.05)
    assert many.tokens == 100 * one.tokens
    sent = ask(3, 4, accumulation=100, micro=512)
    assert sent.sent_bytes == pytest.approx(100 * 3 * 2 * PARAMETERS * 3 / 4, rel=0.02)


@pytest.fixture
def folder(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 128,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


SETTINGS = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}


def test_a_folder_of_hugging_face_is_enough(folder):
    pytest.importorskip("transformers")
    found = plan(folder, SETTINGS, world_size=8, machine="A100-80", changes=False)
    attention, rest = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 128
    assert found.parameters == 2 * 128 * 64 + 3 * (attention + rest + 2 * 64) + 64
    assert found.tokens == 8 * 4 * 64
    again = plan(folder, SETTINGS, world_size=8, machine="A100-80", sequence=32, recompute=True, changes=False)
    assert again.tokens == found.tokens // 2 and again.recomputed_flops > 0 == found.recomputed_flops


def test_what_makes_it_fit(folder):
    """A device with room for less: changes are found, each of them fits, the fastest first."""
    pytest.importorskip("transformers")
    settings = {**SETTINGS, "zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 64}
    base = Machine.named("A100-80").to_dict()
    whole = plan(folder, settings, world_size=4, machine=Machine.from_dict(base), changes=False)
    room = int(0.7 * (whole.peak_bytes + whole.fragmentation_bytes) / 0.97)
    small = Machine.from_dict({**base, "memory_bytes": room, "communicator_bytes": 1})
    found = plan(folder, settings, world_size=4, machine=small)
    assert not found.fits and found.short_of[0] == "device" and found.short_of[1] > found.short_of[2]
    assert found.changes and all(change.peak_bytes < found.peak_bytes for change in found.changes)
    seconds = [change.step_seconds for change in found.changes]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(("stage", "communicators"), [(2, 1), (3, 2)])
def test_each_communicator_takes_room_on_the_device(stage, communicators):
    """Gathers of stage 3 have one of their own."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    room = {"memory_bytes": 2 * 10**9, "communicator_bytes": 10**9}
    machine = Machine.from_dict({**Machine.named("A100-80").to_dict(), **room})
    model = lambda: nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 1))  # noqa: E731
    found = plan(model, config, world_size=2, machine=machine, batch=torch.zeros(2, 256), changes=False)
    assert f"{communicators} communicators take about {communicators}.0 GB of the device beside this" in found.notes
    assert found.fits is (communicators == 1)
    assert found.fits or found.short_of[0] == "device"
