"""Offload to disk when the disk, the folder or the process fails: named errors, and nothing is left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap

import dsx
import dsx_nvme
import dsx_nvme.errors
import dsx_zero
import pytest
import torch
from dsx_testkit import MemoryStore, RankError, run_ranks
from torch import nn


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def config(folder, stage=3, device="nvme"):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 5000}
    if device != "none":
        place = {"device": device, "nvme_path": str(folder)}
        zero |= {"offload_optimizer": place, "offload_param": place | {"max_in_cpu": 0}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "aio": {"block_size": 65536, "queue_depth": 4},
    }


def built(folder, device="nvme"):
    return dsx.initialize(model=Net(), config=config(folder, device=device))[0]


def trained(engine, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        loss = engine(torch.randn(2, 64, generator=torch.Generator().manual_seed(step)).bfloat16())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def files_in(folder):
    return [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]


def test_a_full_disk_is_named_and_the_last_checkpoint_still_loads(tmp_path):
    engine = built(tmp_path / "swap")
    trained(engine, 2)
    engine.save_checkpoint(str(tmp_path / "saved"))
    wanted = trained(engine, 2, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # as a disk without room: every write fails
    try:
        with pytest.raises(OSError, match=r"write of .* bytes failed") as caught:
            trained(engine, 1, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "tensors.dat" in str(caught.value)
    engine.destroy()
    assert files_in(tmp_path / "swap") == []
    other = built(tmp_path / "swap")
    other.load_checkpoint(str(tmp_path / "saved"))
    assert trained(other, 2, 2) == wanted
    other.destroy()


@pytest.mark.parametrize("fault", ["cut", "changed"])
def test_a_file_that_was_cut_or_changed_while_training_is_named(fault, tmp_path):
    engine = built(tmp_path)
    trained(engine, 2)
    (file,) = [name for name in files_in(tmp_path) if name.endswith("tensors.dat")]
    if fault == "cut":
        os.truncate(file, 4096)
    else:
        with open(file, "r+b") as data:
            data.write(b"\xff" * os.path.getsize(file))
    with pytest.raises(OSError, match=r"tensors.dat") as caught:
        trained(engine, 3, 2)
    assert isinstance(
        caught.value, (dsx_nvme.errors.TransferError, dsx_nvme.errors.ChecksumError, dsx_nvme.errors.EndOfFileError)
    )
    engine.destroy()
    assert files_in(tmp_path) == []


def test_a_removed_file_does_not_matter_while_it_is_open(tmp_path):
    engine, plain = built(tmp_path / "a"), built(tmp_path / "b", device="none")
    wanted = trained(plain, 4)
    got = trained(engine, 2)
    for name in files_in(tmp_path / "a"):
        os.unlink(name)
    assert got + trained(engine, 2, 2) == wanted
    engine.destroy()


def test_folders_that_cannot_be_used_are_refused_before_the_model_is_touched(tmp_path):
    (tmp_path / "file").write_text("")
    cases = [(tmp_path / "file", "cannot be written to"), ("/proc/self/none", "cannot be written to")]
    memory = tempfile.TemporaryDirectory(dir="/dev/shm") if os.path.isdir("/dev/shm") else None
    if memory is not None:
        cases.append((memory.name, r"lies in memory \(tmpfs\); expected a folder on a disk.*set device to cpu"))
    for folder, text in cases:
        model = Net()
        with pytest.raises(dsx_zero.ZeroConfigError, match=text):
            dsx.initialize(model=model, config=config(folder))
        assert all(type(p) is nn.Parameter for p in model.parameters())
    if memory is not None:
        memory.cleanup()


def test_two_jobs_in_one_folder(tmp_path):
    first = built(tmp_path)
    wanted = trained(first, 1)
    with pytest.raises(
        dsx_nvme.errors.FolderInUseError, match=f"is in use by another TensorStore .process {os.getpid()}"
    ):
        built(tmp_path)
    trained(first, 1, 1)
    first.destroy()
    second = built(tmp_path)
    assert trained(second, 1) == wanted
    second.destroy()


def test_a_model_on_disk_is_sharded_anew_and_gone_with_its_engine(tmp_path):
    engine = built(tmp_path)
    trained(engine, 2)
    model, plain = engine.module, Net().bfloat16()
    kept = model.blocks[0].weight.full_tensor()
    second, *_ = dsx.initialize(model=model, config=config(tmp_path))
    assert torch.equal(model.blocks[0].weight.full_tensor(), kept)
    assert not torch.equal(kept, plain.blocks[0].weight)
    trained(second, 1)
    second.destroy()
    with pytest.raises(dsx_zero.ZeroStateError, match=r"lived on disk in .* and went with its engine"):
        model.blocks[0].weight.full_tensor()


def test_what_a_killed_job_left_is_taken_over_and_removed(tmp_path):
    script = f"""
        import os, signal, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_engine_offload_faults import built, trained
        engine = built({str(tmp_path)!r})
        trained(engine, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=120, check=False)
    assert ended.returncode == -9
    assert files_in(tmp_path)
    engine = built(tmp_path)
    trained(engine, 1)
    engine.destroy()
    assert files_in(tmp_path) == []


def killed_while_building(rank, world, folder):
    engine = built(folder)
    settings = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": folder}}}
    with dsx.zero.Init(remote_device="nvme", config_dict_or_path=settings):
        model = Net()
    assert len([name for name in files_in(folder) if name.endswith("tensors.dat")]) >= 2
    assert engine is not None and model is not None
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_larger_job_left_that_was_killed_while_it_built_a_model_is_removed(tmp_path):
    """By a smaller one, which builds none; a folder that another process uses stays."""
    with pytest.raises(RankError):
        run_ranks(killed_while_building, 2, str(tmp_path))
    left = {os.path.basename(os.path.dirname(name)) for name in files_in(tmp_path)}
    assert {"dsx-rank1", "dsx-init0-rank0"} <= left
    with dsx_nvme.TensorStore(tmp_path / "dsx-rank7", keep=False) as used:
        used.put("a", torch.ones(4)).wait()
        engine = built(tmp_path)
        trained(engine, 1)
        engine.destroy()
        assert torch.equal(used.get("a", torch.empty(4)).wait(), torch.ones(4))
        assert {os.path.basename(os.path.dirname(name)) for name in files_in(tmp_path)} == {"dsx-rank7"}
    assert files_in(tmp_path) == []


def test_page_locked_memory_that_is_refused_is_named():
    if torch.cuda.is_available():
        pytest.skip("this machine has a device that locks pages")
    from dsx_zero.homes.home import HostHome

    with pytest.raises(
        dsx_zero.ZeroStateError, match=r"40 bytes, page-locked. was refused: .* set pin_memory to false"
    ):
        HostHome(10, torch.float32, torch.device("cuda"), pin=True)


def test_a_checkpoint_reads_states_one_after_the_other(tmp_path, monkeypatch):
    from dsx import sharding

    store = MemoryStore()
    store.close = lambda: None
    monkeypatch.setattr(sharding, "store_on_disk", lambda config: store)
    engine = built(tmp_path)
    trained(engine, 1)
    total = sum(t.nbytes for t in store.tensors.values())
    store.peak = before = store.held  # the next forward's shards are read ahead
    engine.save_checkpoint(str(tmp_path / "saved"))
    assert store.peak - before < 0.15 * total
    engine.destroy()


def built_on_disk(rank, world, folder):
    settings = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": folder}}}
    with dsx.zero.Init(remote_device="nvme", config_dict_or_path=settings):
        model, other = Net(), Net()  # two models of one process
    held = [name for name in files_in(folder) if name.endswith("tensors.dat")]
    assert len(held) == world
    assert model.blocks[1].weight.source.shard.tier == "disk"
    whole = model.blocks[1].weight.full_tensor()
    engine, *_ = dsx.initialize(model=model, config=config(folder))
    losses = trained(engine, 2)
    engine.destroy()
    del model, other, engine
    return whole, losses


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_that_are_built_on_disk(world, tmp_path):
    plain = built(tmp_path, device="none")
    wanted = trained(plain, 2)
    plain.destroy()
    for whole, losses in run_ranks(built_on_disk, world, str(tmp_path)):
        assert torch.equal(whole, Net().blocks[1].weight)
        assert losses == pytest.approx(wanted, rel=1e-2)
    assert files_in(tmp_path) == []


def test_a_forward_without_an_optimizer_reads_from_disk(tmp_path):
    settings = config(tmp_path)
    del settings["optimizer"], settings["zero_optimization"]["offload_optimizer"]
    engine, *_ = dsx.initialize(model=Net(), config=settings)
    assert "disk" in engine._parts.shards.state_bytes_by_tier()["params"]
    x = torch.ones(1, 64).bfloat16()
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(engine(x), Net().bfloat16()(x))
    engine.destroy()
