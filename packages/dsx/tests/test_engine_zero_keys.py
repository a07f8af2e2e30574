"""Every key of `zero_optimization`: it does something that can be seen, or is refused, or gets exactly one warning.

One table says which, key by key; keys that do something have a probe, which sees a difference between two values of the
key through public names. Keys with a test file of their own name it instead.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import dsx
import dsx_zero
import pytest
import torch
from dsx.errors import DsxConfigError
from dsx_testkit import run_ranks
from dsx_zero.config import NO_EFFECT, NOT_YET, OLD_NAMES, OffloadOptimizer, OffloadParam, ZeroConfig
from torch import nn


class Tower(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Net(nn.Module):
    def __init__(self, width=32, layers=4):
        super().__init__()
        torch.manual_seed(0)
        self.tower = Tower(width, layers)
        self.spare = nn.Linear(3, 3)

    def forward(self, x):
        return self.tower(x).float().square().mean()


def started(stage, more=(), **top):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **dict(more)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "steps_per_print": None,
        **top,
    }
    return dsx.initialize(model=Net(), config=config)[0]


def step(engine):
    engine.backward(engine(torch.ones(2, 32).bfloat16()))
    engine.step()


def ended(engine, found):
    engine.destroy()
    return found


# What can be seen, each at a value of the key: a function of the key's value -----------------------------------------


def units(key, stage, **more):
    def probe(value, folder):
        engine = started(stage, {key: value, **more})
        return ended(engine, len(engine.optimizer.placements))

    return probe


def bytes_of(kind, key, stage, **more):
    def probe(value, folder):
        engine = started(stage, {key: value, **more})
        step(engine)
        return ended(engine, engine.optimizer.state_bytes_by_tier()[kind])

    return probe


def sub_groups(value, folder):
    engine = started(3, {"sub_group_size": value})
    return ended(engine, len(engine.optimizer.step_plan.sub_groups))


def unused(value, folder):
    engine = started(2, {"ignore_unused_parameters": value})
    try:
        step(engine)
    except dsx_zero.ZeroStateError as error:
        return "spare" in str(error)
    finally:
        engine.destroy()
    return False


def masters_of_a_load(value, folder):
    """Masters have digits that the parameters do not have."""
    engine = started(1)
    step(engine)
    engine.save_checkpoint(os.path.join(folder, "saved"))
    engine.destroy()
    engine = started(1, {"load_from_fp32_weights": value})
    engine.load_checkpoint(os.path.join(folder, "saved"))
    weight = engine.module.tower.blocks[0][0].weight
    master = dsx_zero.safe_get_full_fp32_param(weight)
    return ended(engine, bool(torch.equal(master, weight.float())))


def saved_weights(value, folder):
    engine = started(3, {"stage3_gather_16bit_weights_on_model_save": value})
    done = engine.save_16bit_model(os.path.join(folder, str(value)))
    return ended(engine, (bool(done), any(Path(folder, str(value)).glob("*"))))


def reductions(value, folder):
    """Stage 2 with two micro-batches: full gradients are reduced once."""

    def work(rank, world, value):
        import dsx_comm

        engine = started(2, {"keep_full_gradients": value}, gradient_accumulation_steps=2)
        with dsx_comm.count_traffic() as traffic:
            step(engine)
            step(engine)
        return ended(engine, traffic.sent_bytes())

    return run_ranks(work, 2, value)[0]


def in_flight(value, folder):
    """Reductions under way at once."""
    from dsx_zero.grads.reductions import Reductions

    most, start = [0], Reductions.run_reduce

    def run_reduce(self, unit):
        start(self, unit)
        most.append(len(self._in_flight))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reductions, "run_reduce", run_reduce)
        engine = started(3, {"overlap_comm": value})
        step(engine)
        return ended(engine, max(most))


def offloaded(section, key, kind, device):
    def probe(value, folder):
        place = {"device": device, "nvme_path": os.path.join(folder, "swap"), key: value}
        if key == "device":
            place = {"device": value, "nvme_path": os.path.join(folder, "swap")}
            place |= {"max_in_cpu": 0} if section == "offload_param" else {}
        if key == "nvme_path":
            place["nvme_path"] = os.path.join(folder, value)
        engine = started(3, {section: place})
        step(engine)
        found = engine.optimizer.state_bytes_by_tier()[kind]
        if key == "nvme_path":
            found = sorted(name for name in os.listdir(folder) if name in ("a", "b"))
        return ended(engine, found)

    return probe


def old_name(key, kind, stage):
    def probe(value, folder):
        engine = started(stage, {key: value})
        step(engine)
        return ended(engine, engine.optimizer.state_bytes_by_tier()[kind])

    return probe


def accumulated(value, folder):
    """Not a key of this section, but one that decides about its gradients: bytes of gradients on the host."""
    engine = started(2, {"offload_optimizer": {"device": "cpu"}}, data_types={"grad_accum_dtype": value})
    engine.backward(engine(torch.ones(2, 32).bfloat16()))
    return ended(engine, engine.optimizer.state_bytes_by_tier()["grads"])


WARNED = "one warning"
REFUSED = "refused"

KEYS = {
    **dict.fromkeys([*NO_EFFECT, *OLD_NAMES], WARNED),
    **dict.fromkeys(NOT_YET, REFUSED),
    # (two values, a probe that tells them apart)
    "stage": (
        (1, 3),
        lambda value, folder: ended(e := started(value), type(e.module.tower.blocks[0][0].weight).__name__),
    ),
    "keep_full_gradients": ((False, True), reductions),
    "overlap_comm": ((True, False), in_flight),
    "reduce_bucket_size": ((100_000, 1000), units("reduce_bucket_size", 2)),
    "load_from_fp32_weights": ((True, False), masters_of_a_load),
    "ignore_unused_parameters": ((True, False), unused),
    "sub_group_size": ((10**12, 512), sub_groups),
    "stage3_param_persistence_threshold": ((0, 10**6), units("stage3_param_persistence_threshold", 3)),
    "stage3_model_persistence_threshold": (
        (0, 2000),
        units("stage3_model_persistence_threshold", 3, stage3_param_persistence_threshold=10**6),
    ),
    "stage3_gather_16bit_weights_on_model_save": ((False, True), saved_weights),
    "stage3_module_granularity_threshold": ((0, 10**6), units("stage3_module_granularity_threshold", 3)),
    "leaf_module": ((None, {"names": ["tower"]}), units("leaf_module", 3)),
    "offload_optimizer.device": (("cpu", "nvme"), offloaded("offload_optimizer", "device", "master", "")),
    "offload_optimizer.nvme_path": (("a", "b"), offloaded("offload_optimizer", "nvme_path", "master", "nvme")),
    "offload_optimizer.ratio": ((1.0, 0.5), offloaded("offload_optimizer", "ratio", "master", "cpu")),
    "offload_param.device": (("cpu", "nvme"), offloaded("offload_param", "device", "params", "")),
    "offload_param.nvme_path": (("a", "b"), offloaded("offload_param", "nvme_path", "params", "nvme")),
    "offload_param.max_in_cpu": ((10**9, 0), offloaded("offload_param", "max_in_cpu", "params", "nvme")),
    "save_muon_momentum_buffer_in_memory": (
        (False, True),
        lambda value, folder: bytes_of(
            "optimizer",
            "save_muon_momentum_buffer_in_memory",
            2,
            offload_optimizer={"device": "nvme", "nvme_path": os.path.join(folder, "swap")},
        )(value, folder),
    ),
    "data_types.grad_accum_dtype": (("bf16", "fp32"), accumulated),
    # Effects that one line cannot show: the file that does.
    "allgather_bucket_size": "packages/dsx-zero/tests/test_zero_gradient_path.py",
    "stage3_max_live_parameters": "packages/dsx-zero/tests/test_stage3_oracle.py",
    "stage3_max_reuse_distance": "packages/dsx-zero/tests/test_stage3_oracle.py",
    "stage3_prefetch_bucket_size": "packages/dsx-zero/tests/test_stage3_oracle.py",
    **dict.fromkeys(
        [f"offload_optimizer.{key}" for key in ("buffer_count", "fast_init", "pipeline_read", "pipeline_write")],
        "packages/dsx-zero/tests/test_zero_offload_keys.py",
    ),
    "notice_data_writes": "packages/dsx-zero/tests/test_zero_edits.py",
    "step_agreement": "packages/dsx-zero/tests/test_step_agreement.py",
    "offload_optimizer.late_update_after": "packages/dsx-zero/tests/test_zero_late_update.py",
    "offload_optimizer.step_during_backward": "packages/dsx-zero/tests/test_zero_step_during_backward.py",
    "offload_optimizer.max_in_cpu": "packages/dsx-zero/tests/test_zero_step_from_disk_during_backward.py",
    "offload_optimizer.pin_memory": "packages/dsx/tests/test_engine_offload_faults.py",
    "offload_param.pin_memory": "packages/dsx/tests/test_engine_offload_faults.py",
    "offload_param.buffer_count": "packages/dsx-zero/tests/test_zero_read_ahead.py",
    "offload_param.buffer_size": "packages/dsx-zero/tests/test_zero_read_ahead.py",
    **dict.fromkeys(
        (
            "zero_hpz_partition_size",
            "zero_quantized_weights",
            "zero_quantized_weights_bits",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
            "zero_quantized_gradients_bits",
            "zero_quantized_gradients_block_size",
            "zero_quantized_error_feedback",
            "zeropp_loco_param",
            "mics_shard_size",
            "mics_hierarchical_params_gather",
        ),
        "packages/dsx-zero/tests/test_zero_plus_plus.py",
    ),
}

NAMED = {"effective": {k for k, v in KEYS.items() if isinstance(v, tuple)}}


def test_the_table_has_every_key():
    sections = {"offload_optimizer": OffloadOptimizer, "offload_param": OffloadParam}
    keys = {key for key in ZeroConfig.model_fields if key not in sections}
    keys |= {f"{name}.{key}" for name, section in sections.items() for key in section.model_fields}
    assert set(KEYS) - {"data_types.grad_accum_dtype"} == keys
    root = Path(__file__).parents[3]
    for key, found in KEYS.items():
        if isinstance(found, str) and found.endswith(".py"):
            assert key.rpartition(".")[2] in (root / found).read_text(), (key, found)


@pytest.mark.parametrize("key", sorted(NAMED["effective"]))
def test_a_key_that_does_something(key, tmp_path):
    (first, second), probe = KEYS[key]
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    found = [probe(value, str(folder)) for value, folder in zip((first, second), folders)]
    assert found[0] != found[1], (key, found)


OTHER = {bool: lambda value: not value, int: lambda value: value + 1}


def changed(key):
    """A configuration with another value than the default, and where the key stands in it."""
    section, _, name = key.rpartition(".")
    model = OffloadOptimizer if section else ZeroConfig
    default = model.model_fields[name].default
    value = OTHER[type(default)](default)
    more = {section: {"device": "cpu", name: value}} if section else {name: value}
    if key == "cpu_offload_use_pin_memory":
        more["cpu_offload"] = True
    return more


@pytest.mark.parametrize("key", sorted([*NO_EFFECT, *OLD_NAMES]))
def test_a_key_without_effect_gets_one_warning(key, caplog):
    stage = 3 if key in ("cpu_offload_params",) else 2
    with caplog.at_level(logging.WARNING):
        started(stage, changed(key)).destroy()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    said = [
        line
        for line in lines
        for _ in range(line.count(f"zero_optimization.{key}:") + line.count(f"zero_optimization.{key} "))
    ]
    assert len(said) == 1, (key, lines)
    assert {**NO_EFFECT, **OLD_NAMES}[key] in said[0]


def test_settings_that_are_written_out_with_their_defaults_say_nothing(caplog):
    named = [name for name in {*NO_EFFECT, *OLD_NAMES, *NOT_YET} if "." not in name]
    fields = {name: ZeroConfig.model_fields[name].default for name in named}
    off = {name: OffloadOptimizer.model_fields[name].default for name in ("super_offload", "cpuadam_cores_perc")}
    config = {"stage": 2, **fields, "offload_optimizer": {"device": "cpu", **off}}
    with caplog.at_level(logging.WARNING):
        dsx_zero.shard(nn.Linear(2, 2), torch.optim.AdamW, config=config)
    assert not [record for record in caplog.records if "zero_optimization" in record.getMessage()]


ASKS = {"super_offload": True, "cpuadam_cores_perc": 0.5, "zenflow": {"topk_ratio": 0.1}, "legacy_stage1": True}


@pytest.mark.parametrize("key", sorted(NOT_YET))
def test_a_key_that_is_refused(key):
    section, _, name = key.rpartition(".")
    value = ASKS[name]
    more = {section: {"device": "cpu", name: value}} if section else {name: value}
    with pytest.raises((dsx_zero.ZeroConfigError, DsxConfigError), match=name):
        started(2, more)


@pytest.mark.parametrize("key", sorted(key for key in NOT_YET if "." in key))
def test_a_section_that_is_switched_off_asks_for_nothing(key):
    """`dsx.initialize` and `dsx_zero.shard` judge alike."""
    section, _, name = key.rpartition(".")
    more = {section: {"device": "none", name: ASKS[name]}}
    started(2, more)
    dsx_zero.shard(nn.Linear(2, 2), torch.optim.AdamW, config={"stage": 2, **more})
