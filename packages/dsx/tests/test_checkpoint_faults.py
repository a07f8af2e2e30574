"""A fault on one rank is the same named error on all, within the call: nobody waits, nothing is changed, and the ranks
stay in step.

Faults are planted on rank 1 while rank 0 goes on as usual.
"""

import errno
import logging
import os
from pathlib import Path

import dsx
import pytest
import torch
from dsx.checkpoint import CheckpointError
from dsx_testkit import run_ranks

STAGES = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]


def build(stage, world, seed=0, **more):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    model[2].weight.requires_grad_(False)
    config = {
        "train_batch_size": 2 * world,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
        **more,
    }
    parameters = [p for p in model.parameters() if p.requires_grad]
    return dsx.initialize(model=model, model_parameters=parameters, config=config)[0]


def train(engine, rank, steps):
    for step in range(steps):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(x).square().mean())
        engine.step()


def everything(engine):
    tensors = {n: b.clone() for n, b in engine.module.named_buffers()}
    for part in engine.optimizer.slices(held=True):
        tensors[part.name] = part.param.clone()
        tensors |= {f"{k}/{part.name}": torch.as_tensor(v).clone() for k, v in part.states.items()}
    return tensors, vars(engine.counters).copy()


def same(one, other):
    return (
        one[1] == other[1]
        and one[0].keys() == other[0].keys()
        and all(torch.equal(one[0][k], other[0][k]) for k in one[0])
    )


def on_any_rank(flag):
    import dsx_comm

    value = torch.tensor(float(flag))
    dsx_comm.all_reduce(value)
    return value.item() > 0


def in_step(rank, world):
    """The ranks' next collective is the same one."""
    import dsx_comm

    value = torch.tensor(float(rank))
    dsx_comm.all_reduce(value)
    return value.item() == world * (world - 1) / 2


def text_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return "no error"


class Failing:
    """An operating system call that fails at its k-th use (counted over the calls of the names given)."""

    def __init__(self, names, at):
        self.names, self.at, self.count, self.seen = names, at, 0, set()
        self.originals = {name: getattr(os, name) for name in names}

    def __enter__(self):
        for name in self.names:
            setattr(os, name, self.wrapped(name))
        return self

    def wrapped(self, name):
        def call(*args, **kwargs):
            self.count += 1
            self.seen.add(name)
            if self.count == self.at:
                raise OSError(errno.EIO, "Input/output error")
            return self.originals[name](*args, **kwargs)

        return call

    def __exit__(self, *_):
        for name, original in self.originals.items():
            setattr(os, name, original)


def read_errors(rank, world, folder, stage):
    """Every read of rank 1 fails once."""
    engine = build(stage, world)
    train(engine, rank, 2)
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    before, found, at = everything(engine), [], 0
    other = build(stage, world, seed=1)
    while True:
        at += 1
        kept = everything(other)
        with Failing(["preadv"], at if rank == 1 else 0) as fault:
            text = text_of(other.load_checkpoint, folder)
        if not on_any_rank(rank == 1 and fault.count >= at):
            break
        found.append((text, same(everything(other), kept), in_step(rank, world)))
    return found, same(everything(other), before)


@pytest.mark.parametrize("stage", STAGES)
def test_a_read_error_of_one_rank_is_everybodys_and_changes_nothing(tmp_path, stage):
    (first, loaded), (second, loaded_too) = run_ranks(read_errors, 2, str(tmp_path), stage)
    assert first == second and len(first) > 5 and loaded and loaded_too
    for text, unchanged, together in first:
        assert "rank 1 failed" in text and "Input/output error" in text and unchanged and together, text


WRITES = ["pwrite", "fsync", "rename", "replace", "link", "unlink", "posix_fallocate"]


def write_errors(rank, world, folder, rank_at_fault):
    """The frozen layer has a file of its own, which is linked."""
    from dsx.checkpoint import plan

    plan.STEADY_BYTES = 1
    engine = build(2, world)
    train(engine, rank, 1)
    engine.save_checkpoint(folder, tag="old")
    kept, found, at = sorted(os.listdir(folder)), [], 0
    while True:
        at += 1
        with Failing(WRITES, at if rank == rank_at_fault else 0) as fault:
            text = text_of(engine.save_checkpoint, folder, tag="new")
        if not on_any_rank(rank == rank_at_fault and fault.count >= at):
            break
        # between two renames a tag that is replaced is found under another name
        names = {"new" if name.startswith(".old-new-") else name for name in os.listdir(folder)}
        committed = [name for name in names if not name.startswith(".")]
        whole = is_good(folder, "old") and ("new" not in committed or is_good(folder, "new"))
        found.append((text, (Path(folder) / "latest").read_text(), sorted(committed), in_step(rank, world) and whole))
    return found, kept, fault.seen


def is_good(folder, tag):
    from dsx.checkpoint import open_checkpoint
    from dsx_checkpoint.verifying import verify_all

    reader = open_checkpoint(folder, tag)
    return verify_all(reader.folder, reader.index).tensors > 0


@pytest.mark.parametrize("rank_at_fault", [0, 1])
def test_a_write_error_of_one_rank_is_everybodys_and_the_old_checkpoint_stays(tmp_path, rank_at_fault):
    """At every write, flush, rename, link and removal. What can be done in another way (a link), or need not be done
    any more (a removal), is no error.
    """
    (first, kept, seen), (second, *_) = run_ranks(write_errors, 2, str(tmp_path), rank_at_fault)
    assert len(first) == len(second) > (20 if rank_at_fault == 0 else 3) and kept == ["latest", "old"]
    assert seen == set(WRITES)
    for (text, *_), (text_too, latest, committed, together) in zip(first, second):
        assert text == text_too and together
        if text == "no error":
            assert latest == "new"
        else:
            assert f"rank {rank_at_fault} failed" in text and "Input/output error" in text
        assert latest == "old" or "new" in committed
    assert sum(text == "no error" for text, *_ in first) < len(first) / 3
    if rank_at_fault == 1:
        assert all(latest == "old" and committed == kept for _, latest, committed, _ in second)


def bad_states(rank, world, folder):
    """What one rank or every rank cannot encode."""
    engine, found = build(2, world), []
    bad, good = {"t": torch.zeros(2, dtype=torch.complex128)}, {"t": torch.zeros(2)}
    for state in (bad, bad if rank == 1 else good, bad if rank == 0 else good, {1: {2}} if rank == 1 else good):
        found.append((text_of(engine.save_checkpoint, folder, client_state=state), in_step(rank, world)))
    return found, os.listdir(folder)


def test_a_client_state_that_one_rank_cannot_store_is_everybodys_error(tmp_path):
    (first, there), (second, _) = run_ranks(bad_states, 2, str(tmp_path))
    assert first == second and there == []
    for (text, together), failing in zip(first, (0, 1, 0, 1)):
        assert f"rank {failing} failed" in text and "state.client" in text and together


def different_arguments(rank, world, folder):
    engine, found = build(2, world, checkpoint={"tag_validation": "Fail"}), []
    engine.save_checkpoint(folder)
    other = f"{folder}/rank{rank}"
    found.append(text_of(engine.save_checkpoint, other))
    found.append(text_of(engine.load_checkpoint, other))
    os.makedirs(other)
    os.chdir(other)
    found.append(text_of(engine.save_checkpoint, "ckpt"))
    found.append(text_of(engine.save_checkpoint, "" if rank == 1 else folder))
    found.append(text_of(engine.load_checkpoint, None if rank == 1 else folder))
    found.append(text_of(engine.save_16bit_model, "" if rank == 1 else folder))
    with pytest.raises(dsx.engine.EngineArgumentError, match="different tags"):
        engine.save_checkpoint(folder, tag=f"rank{rank}")
    return found, in_step(rank, world), sorted(os.listdir(folder))


def test_ranks_that_name_different_folders_or_tags_are_told_so(tmp_path):
    (first, together, there), (second, together_too, _) = run_ranks(different_arguments, 2, str(tmp_path))
    assert first == second and together and together_too
    assert there == ["global_step0", "latest", "rank0", "rank1"]
    for text in first[:3]:
        assert "ranks name different folders" in text and f"rank 0: {tmp_path}/rank0" in text and "rank1" in text
    for text in first[3:]:
        assert "rank 1 failed" in text and "expected the path of a folder" in text


def full_disk(rank, world, folder):
    """`save_16bit_model` on a rank that cannot write: the others learn of it."""
    engine = build(3, world, zero_optimization={"stage": 3, "stage3_gather_16bit_weights_on_model_save": True})
    engine.save_16bit_model(folder, "weights.safetensors")
    with Failing(["replace"], 1 if rank == 0 else 0):
        text = text_of(engine.save_16bit_model, folder, "weights.safetensors")
    return text, in_step(rank, world), os.listdir(folder)


def test_weights_that_cannot_be_written_are_everybodys_error(tmp_path):
    first, second = run_ranks(full_disk, 2, str(tmp_path))
    assert first == second and first[1] and first[2] == ["weights.safetensors"]
    assert "rank 0 failed" in first[0] and "Input/output error" in first[0]


def broken_schedule(rank, world, folder):
    """Restoring the training state fails on rank 1 after it has begun; rank 0 had no trouble."""
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 9}}}
    engine = build(1, world, **schedule)
    train(engine, rank, 2)
    engine.save_checkpoint(folder)
    other = build(1, world, seed=3, **schedule)
    before, lr = everything(other), other.get_lr()
    inner = other._parts.update.schedule.scheduler
    load, state_before = inner.load_state_dict, inner.state_dict()

    def half(state):
        load(state)
        if rank == 1 and state != state_before:
            raise RuntimeError("half done")

    inner.load_state_dict = half
    text = text_of(other.load_checkpoint, folder)
    return text, same(everything(other), before), other.get_lr() == lr, inner.state_dict() == state_before


def test_a_training_state_that_one_rank_cannot_restore_is_taken_back_on_all(tmp_path):
    outcomes = run_ranks(broken_schedule, 2, str(tmp_path))
    assert outcomes[0] == outcomes[1]
    assert "rank 1 failed" in outcomes[0][0] and "half done" in outcomes[0][0] and all(outcomes[0][1:])


def tags(rank, world, folder, policy):
    engine = build(0, world, checkpoint={"tag_validation": policy})
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("dsx").addHandler(handler)
    path = engine.save_checkpoint(folder, tag=f"rank{rank}")
    return os.path.basename(path), any("different tags" in text for text in records)


@pytest.mark.parametrize(("policy", "warned"), [("Ignore", False), ("Warn", True)])
def test_tags_that_differ_are_rank_zeros(tmp_path, policy, warned):
    assert run_ranks(tags, 2, str(tmp_path), policy) == [("rank0", warned)] * 2
