"""What a `TensorStore` keeps: the last flush, through kills, failed writes and full budgets; whom it lets in."""

import errno
import json
import os
import random
import resource
import subprocess
import sys

import dsx_nvme
import dsx_nvme.errors
import pytest
import torch
from dsx_nvme import TensorStore
from dsx_nvme.errors import FolderInUseError
from dsx_nvme.folder_lock import FolderLock, ProcessIdentity

PAGE = 4096

KILLED = """
import os, random, select, signal, sys, time, torch, dsx_nvme
torch.set_num_threads(1)
folder, seed = sys.argv[1], int(sys.argv[2])
rng, last, bad, late = random.Random(seed), 0, [], 0
for trial in range(8):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store = dsx_nvme.TensorStore(folder)
            version = last
            while True:
                version += 1
                for i in range(4):
                    store.put(f"t{i}", torch.full((50_000 + 1000 * i,), float(version)))
                store.flush()
                os.write(writer, version.to_bytes(8, "little"))
        finally:
            os._exit(9)
    os.close(writer)
    last = int.from_bytes(os.read(reader, 8), "little")  # one flush at least
    time.sleep(rng.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while select.select([reader], [], [], 0)[0] and (word := os.read(reader, 8)):
        last = int.from_bytes(word, "little")
    os.close(reader)
    with dsx_nvme.TensorStore(folder) as store:  # at once
        values = {float(v) for i in range(4) for v in store.get(f"t{i}").result().unique()}
        if len(values) != 1 or not last <= min(values) <= last + 1:
            bad.append((trial, last, values))
        last = int(min(values))
print(bad)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_leaves_the_last_flush_and_the_folder_free(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "s"), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr[-3000:]


def contents(folder):
    """What another process would find now, without taking the folder: the files are copied."""
    copy = f"{folder}.copy"
    os.makedirs(copy, exist_ok=True)
    for name in ("tensors.dat", "index.json"):
        with open(os.path.join(folder, name), "rb") as source, open(os.path.join(copy, name), "wb") as target:
            target.write(source.read())
    with TensorStore(copy) as store:
        return {name: store.get(name).result().clone() for name in store}


def test_at_any_moment_the_folder_holds_the_last_flush(tmp_path):
    """Random puts, deletes and flushes; after each one the files on disk are read as after a kill."""
    rng, model, flushed = random.Random(5), {}, None
    folder = str(tmp_path / "s")
    with TensorStore(folder) as store:
        for step in range(120):
            name = f"t{rng.randrange(5)}"
            if rng.random() < 0.15 and name in model:
                store.delete(name)
                del model[name]
            elif rng.random() < 0.25:
                store.flush()
                flushed = dict(model)
            else:
                model[name] = torch.randn(rng.choice([1, 900, 1024, 5000]))
                store.put(name, model[name]).wait()
            assert set(store) == set(model)
            if flushed is not None and step % 3 == 0:
                found = contents(folder)
                assert set(found) == set(flushed) and all(torch.equal(found[n], t) for n, t in flushed.items())
        assert all(torch.equal(store.get(n).result(), t) for n, t in model.items())


def test_a_flush_per_step_takes_twice_the_room_and_no_more(tmp_path):
    with TensorStore(tmp_path / "s") as store:
        for step in range(30):
            for i in range(3):
                store.put(f"t{i}", torch.full((10 * 1024,), float(step)))
            store.flush()
        assert os.path.getsize(tmp_path / "s" / "tensors.dat") <= 2 * 3 * 10 * PAGE


def test_a_budget_counts_what_was_flushed(tmp_path):
    with TensorStore(tmp_path / "s", budget=3 * PAGE) as store:
        store.put("a", torch.ones(1024))
        store.put("b", torch.ones(2048))
        store.flush()
        with pytest.raises(dsx_nvme.errors.BudgetError, match="keeps its room until the next one"):
            store.put("a", torch.zeros(1024))
        assert store.get("a").result().sum() == 1024
        store.delete("b")
        with pytest.raises(dsx_nvme.errors.BudgetError):
            store.put("a", torch.zeros(1024))
        store.flush()
        store.put("a", torch.zeros(1024))
        assert store.get("a").result().sum() == 0


def test_a_budget_that_only_the_old_version_fills_takes_the_new_one(tmp_path):
    with TensorStore(tmp_path / "s", budget=3 * PAGE, keep=False) as store:
        store.put("a", torch.ones(2048))
        store.put("a", torch.ones(3 * 1024))
        assert store.get("a").result().numel() == 3 * 1024
        with pytest.raises(dsx_nvme.errors.BudgetError):
            store.put("a", torch.zeros(5 * 1024))
        assert store.get("a").result().sum() == 3 * 1024


def test_a_put_that_fails_leaves_the_version_that_was_flushed(tmp_path):
    with dsx_nvme.Engine(direct=False) as engine, TensorStore(tmp_path / "s", engine=engine) as store:
        store.put("a", torch.ones(100))
        store.flush()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            store.put("a", torch.zeros(1 << 20))
            with pytest.raises(OSError) as caught:
                store.flush()
            assert caught.value.errno == errno.EFBIG
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert torch.equal(store.get("a").result(), torch.ones(100))
        store.delete("a")
        store.flush()
        assert list(store) == []
    with TensorStore(tmp_path / "s") as store:
        assert list(store) == []


def test_the_holder_of_a_folder_is_named(tmp_path):
    with TensorStore(tmp_path / "s"):
        with pytest.raises(dsx_nvme.NvmeError, match=f"process {os.getpid()}"):
            TensorStore(tmp_path / "s")
    assert sorted(os.listdir(tmp_path / "s")) == ["index.json", "tensors.dat"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_may_read_and_nothing_else(tmp_path):
    torch.set_num_threads(1)
    store = TensorStore(tmp_path / "s")
    store.put("a", torch.ones(10))
    store.flush()
    child = os.fork()
    if child == 0:
        try:
            for call in (lambda: store.put("a", torch.zeros(10)), lambda: store.delete("a"), store.flush):
                with pytest.raises(dsx_nvme.errors.ForkError):
                    call()
            assert store.get("a").result().sum() == 10
            store.close()
            os._exit(0)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(dsx_nvme.NvmeError, match="in use"):
        TensorStore(tmp_path / "s")
    store.close()
    with TensorStore(tmp_path / "s") as again:
        assert again.get("a").result().sum() == 10


def test_a_process_is_known_by_more_than_its_number():
    me = ProcessIdentity.current()
    assert ProcessIdentity.parse(str(me)) == me and me.is_running()
    assert not me.started or not me._replace(started=str(int(me.started) + 1)).is_running()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    assert not ProcessIdentity(int(gone.stdout), "", me.machine).is_running()
    assert ProcessIdentity(1, "", "another-machine").is_running()
    for text in ("", "x y z", "12", "12 @3", "12 @3 m extra"):
        assert ProcessIdentity.parse(text) is None


def folder_lock(folder):
    return FolderLock(str(folder), os.open(folder / "lock", os.O_RDWR | os.O_CREAT))


def test_a_second_holder_is_refused_by_name_and_succeeds_after_release(tmp_path):
    first, second = folder_lock(tmp_path), folder_lock(tmp_path)
    first.acquire()
    with pytest.raises(FolderInUseError, match=rf"in use by another TensorStore \(process {os.getpid()}\)"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_a_killed_holder_leaves_the_folder_free(tmp_path):
    program = (
        "import os, sys, signal; from dsx_nvme.folder_lock import FolderLock\n"
        "lock = FolderLock(sys.argv[1], os.open(sys.argv[1] + '/lock', os.O_RDWR | os.O_CREAT)); lock.acquire()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    owner = ProcessIdentity.parse((tmp_path / "owner").read_text())
    assert owner is not None and not owner.is_running()
    lock = folder_lock(tmp_path)
    lock.acquire()
    lock.release()


@pytest.fixture
def written(tmp_path):
    """A folder with two tensors, and its index."""
    with TensorStore(tmp_path / "s") as store:
        store.put("a", torch.arange(6).view(2, 3))
        store.put("b", torch.zeros(10))
        store.put("none", torch.zeros(0, 4))
        store.put("nothing", torch.zeros(0))
    return tmp_path / "s", json.loads((tmp_path / "s" / "index.json").read_text())


def test_empty_tensors_come_back(written):
    with TensorStore(written[0]) as store:
        assert store.get("none").result().shape == (0, 4) and store.get("nothing").result().shape == (0,)


def test_no_flipped_byte_of_an_index_loads_something_else(written):
    folder, _ = written
    data = (folder / "index.json").read_bytes()
    with TensorStore(folder) as store:
        right = {name: (store.spec(name), store.get(name).result()) for name in store}
    rng = random.Random(0)
    for _ in range(400):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (folder / "index.json").write_bytes(damaged)
        try:
            store = TensorStore(folder)
        except dsx_nvme.errors.FormatError:
            continue
        found = {name: (store.spec(name), store.get(name).result()) for name in store}
        store._shut()
        assert set(found) == set(right) and all(
            found[n][0] == right[n][0] and torch.equal(found[n][1], right[n][1]) for n in right
        )


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"version": 99, "tensors": {}}', '{"version": true, "tensors": {}}',
     '{"version": 1, "tensors": {"a": 3}}', '{"version": 1, "tensors": {}, "tensors": {}}',
     '{"version": 1, "tensors": {}, "crc32": "00000000"}', '{"version": 2, "tensors": {}}', "[" * 100_000,
     '{"version": NaN, "tensors": {}}'],
)  # fmt: skip
def test_a_damaged_index_is_refused(text, tmp_path):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(dsx_nvme.errors.FormatError):
        TensorStore(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"offset": 1 << 40}, {"offset": -4096}, {"offset": 0}, {"offset": 4096.0}, {"shape": [10**9]}, {"shape": [-2, -5]},
     {"shape": [True, 10]}, {"shape": "10"}, {"room": 4}, {"room": None}, {"dtype": "F99"}, {"dtype": 3}, {"dtype": []},
     {"crc32": "zzzzzzzz"}, {"crc32": 3}, {"more": 1}],
    ids=str,
)  # fmt: skip
def test_an_index_that_does_not_fit_is_refused(change, written):
    """Written by an older version, whose index had no checksum."""
    folder, index = written
    index = {"version": 1, "tensors": index["tensors"]}
    (folder / "index.json").write_text(json.dumps(index))
    with TensorStore(folder) as store:
        assert torch.equal(store.get("a").result(), torch.arange(6).view(2, 3))
    index["tensors"]["b"].update(change)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(dsx_nvme.errors.FormatError):
        TensorStore(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name, error", [("index.json", dsx_nvme.errors.FormatError), ("tensors.dat", OSError)])
def test_a_pipe_in_the_place_of_a_file_does_not_hang(name, error, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(error):
        TensorStore(tmp_path)


def test_a_pipe_in_the_place_of_the_owner_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "owner")
    with TensorStore(tmp_path) as store:
        store.put("a", torch.ones(3))
