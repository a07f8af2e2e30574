"""A process killed while it saves: the checkpoint that was there before, or the new one, is whole; never a part of one.

The save runs in forked processes that kill themselves (SIGKILL, nothing is flushed or cleaned up) at the k-th call that
changes the disk, for every k there is; and in processes that are killed at random moments. 200 of these are slow, with
several ranks on top; a sample of both is in the suite:

    pytest -m slow packages/dsx/tests/test_checkpoint_killed.py
"""

import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from dsx.checkpoint import CheckpointError, open_checkpoint, plan, save
from dsx_checkpoint.behind import WriteBehind
from dsx_checkpoint.keeping import Keeping
from dsx_checkpoint.ranks import Solo
from dsx_checkpoint.verifying import verify_all
from dsx_checkpoint.writing import plan_save
from dsx_testkit import RankError, run_ranks
from torch import nn

CHANGES = (
    "open",
    "pwrite",
    "posix_fallocate",
    "fsync",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "rmdir",
    "ftruncate",
    "link",
)


@dataclass
class Part:
    value: float
    name: str = "w"
    shape: tuple = (50, 3)
    start: int = 0
    stop: int = 150
    aliases: tuple = ()
    trainable: bool = True
    master: None = None
    states: dict = field(default_factory=dict)
    ranges: tuple = ()

    @property
    def param(self):
        return torch.full((self.stop,), self.value)


def parts_of(value):
    """A parameter that is trained, and one that is not, whose file is linked."""
    return [Part(value), Part(0.5, "frozen", trainable=False)]


@pytest.fixture(autouse=True)
def small_files_are_linked(monkeypatch):
    monkeypatch.setattr(plan, "STEADY_BYTES", 1)


def die_at(deadly_call):
    """Kill this process at its k-th call that changes the disk (0: never); returns what counts the calls."""
    calls = []

    def deadly(original):
        def wrapped(*args, **kwargs):
            calls.append(original.__name__)
            if len(calls) == deadly_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return wrapped

    for name in CHANGES:
        setattr(os, name, deadly(getattr(os, name)))
    return calls


def save_and_die(rank, world, folder, deadly_call, tag="new"):
    plan.STEADY_BYTES = 1
    calls = die_at(deadly_call)
    save(folder, tag, module=nn.Module(), slices=parts_of(2.0), state={"n": 2}, ranks=Solo())
    return calls


def die_once_at_each_call(rank, world, folders, tag):
    """A forked process per folder saves `tag` there and dies at call 1, 2, 3, ...; returns how many were killed."""
    killed = 0
    for deadly_call, folder in enumerate(folders, 1):
        pid = os.fork()
        if pid == 0:
            save_and_die(rank, world, folder, deadly_call, tag)
            os._exit(0)
        killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    return killed


def deaths(tmp_path, tag):
    """Folders with a checkpoint `old`, in each of which a save of `tag` was killed: one for every call it makes."""
    save(tmp_path / "dry", "old", module=nn.Module(), slices=parts_of(1.0), state={"n": 1}, ranks=Solo())
    (calls,) = run_ranks(save_and_die, 1, str(tmp_path / "dry"), 0, tag, backend=None)
    assert {"pwrite", "fsync", "rename", "replace", "link", "posix_fallocate", "unlink"} <= set(calls)
    total = len(calls)
    folders = [tmp_path / str(call) for call in range(1, total + 1)]
    for folder in folders:
        save(folder, "old", module=nn.Module(), slices=parts_of(1.0), state={"n": 1}, ranks=Solo())
    assert run_ranks(die_once_at_each_call, 1, [str(f) for f in folders], tag, backend=None) == [total]
    return folders


def test_killed_at_any_point_leaves_a_whole_checkpoint(tmp_path):
    seen = set()
    for folder in deaths(tmp_path, "new"):
        reader = open_checkpoint(folder)  # what `latest` names is there and whole
        value = {"old": 1.0, "new": 2.0}[reader.folder.name]
        assert torch.equal(reader.whole("w"), torch.full((50, 3), value))
        assert torch.equal(reader.whole("frozen"), torch.full((50, 3), 0.5))
        if (folder / "new").exists():  # visible means complete, even before `latest` says so
            assert torch.equal(open_checkpoint(folder, "new").whole("w"), torch.full((50, 3), 2.0))
        save(folder, "new", module=nn.Module(), slices=[Part(3.0)], state={"n": 3}, ranks=Solo())  # saving works again
        assert torch.equal(open_checkpoint(folder).whole("w"), torch.full((50, 3), 3.0))
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "new", "old"]
        seen.add(reader.folder.name)
    assert seen == {"old", "new"}


def test_killed_while_replacing_a_tag_keeps_the_old_or_the_new_values(tmp_path):
    seen = set()
    for folder in deaths(tmp_path, "old"):
        seen.add(float(open_checkpoint(folder).whole("w")[0, 0]))
        save(folder, "old", module=nn.Module(), slices=[Part(3.0)], state={}, ranks=Solo())
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "old"]
        assert torch.equal(open_checkpoint(folder).whole("w"), torch.full((50, 3), 3.0))
    assert seen == {1.0, 2.0}


# - At random moments


def save_on_and_on(folder, first, told, asynchronous):
    """Save checkpoints of values `first`, `first + 1`, ...; tell each that is there."""
    behind = WriteBehind(ranks=Solo) if asynchronous else None
    for value in range(first, first + 10_000):
        parts = [Part(float(value), shape=LARGE, stop=LARGE[0] * LARGE[1]), Part(0.5, "frozen", trainable=False)]
        planned = plan_save(folder, f"s{value}", module=nn.Module(), slices=parts, state={"n": value}, ranks=Solo(),
                            keeping=Keeping(2))  # fmt: skip
        if behind is None:
            planned.run(Solo())
        else:
            behind.submit(planned, Solo()).result()
        os.write(told, value.to_bytes(4, "little"))


LARGE = (1100, 1000)
"""4.4 MB: pieces are large enough to be written past the page cache."""


def kill_at_random(rank, world, folder, seed, points):
    """A process that saves is killed some time after it has told of some saves; again and again in one folder. Returns
    the last value that was found, and how often a save was in the middle.
    """
    plan.STEADY_BYTES = 1
    began = time.monotonic()
    large = Part(0.0, shape=LARGE, stop=LARGE[0] * LARGE[1])
    save(f"{folder}-measured", "t", module=nn.Module(), slices=[large], state={}, ranks=Solo())
    took = time.monotonic() - began
    chosen, last, torn = random.Random(seed), 0, 0
    for point in range(points):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(ours)
                save_on_and_on(folder, last + 1, theirs, asynchronous=point % 2)
            finally:
                os._exit(1)
        os.close(theirs)
        told, awaited = b"", 4 * chosen.randrange(3)
        while len(told) < awaited and (part := os.read(ours, 4)):
            told += part
        time.sleep(chosen.uniform(0, took))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        while part := os.read(ours, 1 << 16):
            told += part
        os.close(ours)
        said = int.from_bytes(told[-4:], "little") if told else last
        torn += any(name.startswith(".tmp-") for name in os.listdir(folder))
        if not said and not os.path.exists(f"{folder}/latest"):
            continue
        reader = open_checkpoint(folder)  # what was said to be there is; at most the next one came to it too
        found = reader.state_of_caller()["n"]
        assert said <= found <= said + 1, (point, said, found)
        verify_all(reader.folder, reader.index)
        assert torch.equal(reader.whole("w"), torch.full(LARGE, float(found)))
        last = found
    return last, torn


@pytest.mark.parametrize(("seed", "points"), [(0, 12), pytest.param(1, 200, marks=pytest.mark.slow)])
def test_killed_at_random_moments_the_last_that_was_there_is_found(tmp_path, seed, points):
    (tmp_path / "run").mkdir()
    ((last, torn),) = run_ranks(kill_at_random, 1, str(tmp_path / "run"), seed, points, backend=None, timeout=300)
    assert last > points / 4 and torn > points / 8
    save(tmp_path / "run", "end", module=nn.Module(), slices=parts_of(3.0), state={}, ranks=Solo(), keeping=Keeping(1))
    Keeping.wait()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["end", "latest"]


def save_with_little_room(rank, world, folder):
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))  # as a full disk: writes beyond fail with an errno
    try:
        save(folder, "new", module=nn.Module(), slices=[Part(2.0)], state={"n": 2}, ranks=Solo())
    except CheckpointError as error:
        return str(error)


def test_a_full_disk_is_an_error_and_the_old_checkpoint_stays(tmp_path):
    save(tmp_path, "old", module=nn.Module(), slices=[Part(1.0)], state={"n": 1}, ranks=Solo())
    (text,) = run_ranks(save_with_little_room, 1, str(tmp_path), backend=None)
    assert "File too large" in text and "making " in text
    assert sorted(p.name for p in Path(tmp_path).iterdir()) == ["latest", "old"]
    assert torch.equal(open_checkpoint(tmp_path).whole("w"), torch.full((50, 3), 1.0))


def die_while_saving(rank, world, folder, deadly_rank, deadly_call):
    """Save again and again; one rank kills itself at a call of its own. The others raise, or are killed with it."""
    import dsx

    torch.manual_seed(0)
    config = {
        "train_batch_size": world,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
        "steps_per_print": None,
    }
    engine = dsx.initialize(model=torch.nn.Linear(5, 3), config=config)[0]
    if rank == deadly_rank:
        die_at(deadly_call)
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 5)).sum())
        engine.step()
        engine.save_checkpoint(folder, client_state={"steps": engine.global_steps})
    return engine.global_steps


def load_and_save(rank, world, folder):
    import dsx

    config = {"train_batch_size": world, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "steps_per_print": None}
    engine = dsx.initialize(model=torch.nn.Linear(5, 3), config=config)[0]
    path, client = engine.load_checkpoint(folder)
    found = None if path is None else (Path(path).name, client["steps"], engine.global_steps)
    engine.save_checkpoint(folder, tag="after")
    return found, sorted(p.name for p in Path(folder).iterdir() if p.name.startswith("."))


SLOW = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=SLOW) for seed in range(2, 32))])
def test_ranks_killed_at_random_leave_a_checkpoint_that_loads_elsewhere(tmp_path, seed):
    chosen = random.Random(seed)
    rank = seed % 2
    with pytest.raises(RankError) as died:  # rank 0 makes the files and the commit, so it has more calls to die at
        run_ranks(die_while_saving, 2, str(tmp_path), rank, chosen.randrange(1, 20 if rank else 90))
    assert "died" in {failure.kind for failure in died.value.failures if failure.rank == rank}
    ((found, left),) = run_ranks(load_and_save, 1, str(tmp_path))
    assert left == []
    if found is not None:
        tag, steps, counted = found
        assert tag == f"global_step{steps}" and counted == steps
