"""`TensorFile`, `TensorStore`, `BufferPool`, `FastFileWriter`: names, extents, checksums, budgets."""

import asyncio
import gc
import io
import os
import random
import stat
import threading
import time
import weakref
from itertools import pairwise

import dsx_nvme
import dsx_nvme.errors
import pytest
import torch
from dsx_nvme import BufferPool, TensorFile, TensorStore, memory

TENSORS = {
    "w": torch.randn(1000, 33), "b": torch.arange(7, dtype=torch.int16), "half": torch.randn(5, 5).to(torch.bfloat16),
    "none": torch.zeros(0, 4), "scalar": torch.tensor(2.5, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
}  # fmt: skip


def write_file(path, **options):
    with TensorFile.create(path, TENSORS, **options) as file:
        for name, tensor in TENSORS.items():
            file.write(name, tensor)


def test_a_file_comes_back_and_is_a_safetensors_file(tmp_path):
    write_file(tmp_path / "t")
    with TensorFile.open(tmp_path / "t") as file:
        assert list(file) == list(TENSORS) and len(file) == 6 and "w" in file and "x" not in file
        readings = {name: file.read(name) for name in file}
        for name, reading in readings.items():
            found = reading.result()
            assert torch.equal(found, TENSORS[name]) and found.dtype == TENSORS[name].dtype
        assert all(e.offset % 4096 == 0 for e in file.extents.values())
    safetensors = pytest.importorskip("safetensors.torch")
    found = safetensors.load_file(tmp_path / "t")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_files_of_the_safetensors_library_can_be_read(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(TENSORS, tmp_path / "t")
    with TensorFile.open(tmp_path / "t") as file:
        assert all(torch.equal(file.read(name).result(), tensor) for name, tensor in TENSORS.items())


def test_a_file_that_finds_no_room_leaves_the_old_one(tmp_path):
    write_file(tmp_path / "t")
    before = (tmp_path / "t").read_bytes()
    with pytest.raises(OSError):
        TensorFile.create(tmp_path / "t", {"huge": ((1 << 50,), torch.float32)})
    with pytest.raises(IsADirectoryError):
        TensorFile.create(tmp_path, {"a": torch.ones(3)})
    assert os.listdir(tmp_path) == ["t"] and (tmp_path / "t").read_bytes() == before
    assert [p.name for p in tmp_path.parent.iterdir() if p.name.startswith(tmp_path.name)] == [tmp_path.name]
    with TensorFile.open(tmp_path / "t") as old, TensorFile.create(tmp_path / "t", {"a": torch.ones(3)}) as new:
        assert torch.equal(old.read("w").result(), TENSORS["w"])
        assert new.path == str(tmp_path / "t") and os.listdir(tmp_path) == ["t"]


def test_extents_are_there_before_the_first_write_and_slices_fill_them(tmp_path):
    with TensorFile.create(tmp_path / "t", {"a": ((10, 100), torch.float32), "z": ((3,), torch.uint8)}) as file:
        assert torch.equal(file.read("a").result(), torch.zeros(10, 100))
        size = os.path.getsize(tmp_path / "t")
        for start in range(0, 1000, 250):
            file.write("a", torch.arange(start, start + 250, dtype=torch.float32), start=start)
        file.flush(durable=True)
        assert os.path.getsize(tmp_path / "t") == size
        assert torch.equal(file.read("a").result().view(-1), torch.arange(1000, dtype=torch.float32))
        assert torch.equal(
            file.read("a", torch.zeros(5), start=500).result(), torch.arange(500, 505, dtype=torch.float32)
        )


def test_a_flipped_bit_is_found(tmp_path):
    write_file(tmp_path / "t")
    with TensorFile.open(tmp_path / "t") as file:
        offset = file.extents["w"].offset
    with open(tmp_path / "t", "r+b") as raw:
        raw.seek(offset + 777)
        byte = raw.read(1)
        raw.seek(offset + 777)
        raw.write(bytes([byte[0] ^ 4]))
    with TensorFile.open(tmp_path / "t") as file:
        with pytest.raises(dsx_nvme.errors.ChecksumError, match="w: checksum"):
            file.read("w").result()
        assert torch.equal(file.read("b").result(), TENSORS["b"])
    with TensorFile.open(tmp_path / "t", checksum=False) as file:
        assert not torch.equal(file.read("w").result(), TENSORS["w"])


def test_what_a_tensor_file_refuses(tmp_path):
    write_file(tmp_path / "t")
    with TensorFile.open(tmp_path / "t") as file:
        with pytest.raises(dsx_nvme.errors.OptionError, match="open for reading"):
            file.write("w", TENSORS["w"])
        with pytest.raises(KeyError, match="no tensor 'x'"):
            file.read("x")
        with pytest.raises(dsx_nvme.errors.TensorError, match="the file has 33000"):
            file.read("w", torch.zeros(33_001))
    with pytest.raises(dsx_nvme.errors.OptionError, match="reserved"):
        TensorFile.create(tmp_path / "u", {"__pad_0__": ((3,), torch.uint8)})
    with pytest.raises(FileNotFoundError):
        TensorFile.open(tmp_path / "none")


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b"", lambda b: b[:4], lambda b: b[:5000], lambda b: b"\xff" * 8 + b[8:],
        lambda b: b[:8] + b"[" + b[9:],
        lambda b: b.replace(b'"F32"', b'"F99"'), lambda b: b.replace(b"33]", b"34]"), lambda b: b[:-1000],
    ],
)  # fmt: skip
def test_damaged_and_hostile_headers(damage, tmp_path):
    with TensorFile.create(tmp_path / "t", {"w": TENSORS["w"]}) as file:
        file.write("w", TENSORS["w"])
    (tmp_path / "t").write_bytes(damage((tmp_path / "t").read_bytes()))
    with pytest.raises(dsx_nvme.errors.FormatError):
        TensorFile.open(tmp_path / "t")


def test_a_store_against_a_dictionary(tmp_path):
    rng, model = random.Random(3), {}
    with dsx_nvme.Engine() as engine:
        for generation in range(3):
            with TensorStore(tmp_path / "s", engine=engine) as store:
                assert set(store) == set(model)
                for _ in range(60):
                    name = f"t{rng.randrange(12)}"
                    if name in model and rng.random() < 0.25:
                        store.delete(name)
                        del model[name]
                    elif name in model and rng.random() < 0.4:
                        assert torch.equal(store.get(name).result(), model[name])
                    else:
                        model[name] = torch.randn(rng.choice([1, 1000, 5000, 5000]), rng.choice([1, 3]))
                        store.put(name, model[name])
                assert len(store) == len(model) and store.nbytes == sum(t.numel() * 4 for t in model.values())
                used = sorted((store.spec(n).offset, store.spec(n).nbytes) for n in store)
                assert all(a + n <= b for (a, n), (b, _) in pairwise(used))
        with TensorStore(tmp_path / "s", engine=engine) as store:
            assert all(torch.equal(store.get(n).result(), t) for n, t in model.items())


def test_a_folder_is_free_as_soon_as_its_store_is_closed(tmp_path):
    with dsx_nvme.Engine() as engine:
        for step in range(50):
            with TensorStore(tmp_path / "s", engine=engine) as store:
                store.put("state", torch.full((3000,), float(step)))
                with pytest.raises(dsx_nvme.NvmeError, match="in use by another"):
                    TensorStore(tmp_path / "s")


def test_the_same_name_keeps_its_order_and_its_room(tmp_path):
    with TensorStore(tmp_path / "s") as store:
        for step in range(50):
            store.put("state", torch.full((30_000,), float(step)))
        assert store.get("state").result()[0] == 49.0
        store.flush()
    assert os.path.getsize(tmp_path / "s" / "tensors.dat") <= 122_880


def test_what_was_read_from_a_store_is_the_callers_alone(tmp_path, monkeypatch):
    with TensorStore(tmp_path / "s") as store:
        store.put("a", torch.ones(5000))
        seen = []
        for _ in range(20):
            found = store.get("a").result()
            seen.append(weakref.ref(found))
            del found
        gc.collect()
        assert [ref() for ref in seen] == [None] * 20
        # Nor does the store keep account of reads that are over.
        tickets, read = [], store.engine.read

        def noted(*args, **options):
            ticket = read(*args, **options)
            tickets.append(weakref.ref(ticket))
            return ticket

        monkeypatch.setattr(store.engine, "read", noted)
        for _ in range(50):
            store.get("a").result()
        gc.collect()
        assert len(tickets) == 50 and sum(ref() is not None for ref in tickets) <= 1


def test_files_can_be_closed_after_the_engine_they_share(tmp_path):
    with dsx_nvme.Engine() as engine:
        file = TensorFile.create(tmp_path / "f", {"a": torch.ones(3)}, engine=engine)
        file.write("a", torch.ones(3)).wait()
        store = TensorStore(tmp_path / "s", engine=engine)
    store.close()
    file.close()
    with TensorFile.open(tmp_path / "f") as again:
        assert torch.equal(again.read("a").result(), torch.ones(3))
    TensorStore(tmp_path / "s").close()


@pytest.mark.skipif(not hasattr(os, "O_DIRECTORY"), reason="needs folders that can be opened")
@pytest.mark.parametrize("kind", ["file", "store"])
def test_what_is_durable_has_its_name_on_the_device_too(kind, tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(fd):
        synced.append(stat.S_ISDIR(os.fstat(fd).st_mode))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.chdir(tmp_path)
    thing = TensorFile.create("f", {"a": torch.ones(3)}) if kind == "file" else TensorStore("s")
    with thing:
        thing.flush()
        assert synced == []
        thing.flush(durable=True)
        assert synced[-1] and not any(synced[:-1]) and len(synced) > 1  # the folder, after what lies in it


def test_a_store_after_a_crash_holds_the_last_flush(tmp_path):
    store = TensorStore(tmp_path / "s")
    store.put("a", torch.ones(100))
    store.flush(durable=True)
    store.put("a", torch.zeros(100)).wait()
    store.put("b", torch.zeros(100)).wait()
    store._shut()  # what a crash leaves: no last flush
    with TensorStore(tmp_path / "s") as again:
        assert list(again) == ["a"]
        assert torch.equal(again.get("a").result(), torch.ones(100))


def test_budgets_locks_and_swap_space(tmp_path):
    with TensorStore(tmp_path / "s", budget=3 * 4096, keep=False) as store:
        store.put("a", torch.zeros(1024))
        store.put("b", torch.zeros(2048))
        with pytest.raises(dsx_nvme.errors.BudgetError, match="c: 4096 bytes more"):
            store.put("c", torch.zeros(1))
        store.delete("a")
        store.put("c", torch.zeros(1))
        with pytest.raises(dsx_nvme.NvmeError, match="in use"):
            TensorStore(tmp_path / "s")
        with pytest.raises(KeyError):
            store.get("a")
        with pytest.raises(dsx_nvme.errors.TensorError):
            store.get("b", torch.zeros(3))
    assert os.listdir(tmp_path / "s") == []


def test_await_a_tensor(tmp_path):
    async def main():
        with TensorStore(tmp_path / "s") as store:
            await store.put("a", torch.arange(5))
            return await store.get("a")

    assert torch.equal(asyncio.run(main()), torch.arange(5))


def test_checksums_are_zlibs():
    import zlib

    for n in (0, 1, 15, 63, 64, 65, 100, 4096, 99_991):
        data = torch.randint(0, 256, (n,), dtype=torch.uint8)
        for start in (0, min(1, n)):
            assert dsx_nvme.crc32(data[start:]) == zlib.crc32(bytes(data[start:].tolist()))


def test_a_pool_keeps_its_budget_and_lets_wait():
    pool = BufferPool(10 * 4096, pin=False)
    rng, held, seen = random.Random(0), [], []
    for _ in range(300):
        if held and rng.random() < 0.5:
            buffer, value = held.pop(rng.randrange(len(held)))
            assert bool((buffer.tensor() == value).all())
            buffer.release()
        else:
            buffer = pool.try_acquire(rng.randrange(1, 4 * 4096))
            if buffer is not None:
                value = rng.randrange(256)
                buffer.tensor().fill_(value)
                held.append((buffer, value))
        assert pool.in_use == sum(b.nbytes for b, _ in held) <= pool.budget
    for buffer, _ in held:
        buffer.release()
    whole = pool.acquire(10 * 4096)  # nothing is lost to fragments
    with pytest.raises(dsx_nvme.errors.BudgetError, match="came free"):
        pool.acquire(1, timeout=0.01)
    thread = threading.Thread(target=lambda: seen.append(pool.acquire(4096, timeout=30)))
    thread.start()
    time.sleep(0.05)
    whole.release()
    thread.join()
    assert len(seen) == 1 and pool.peak == pool.budget
    with pytest.raises(dsx_nvme.errors.BudgetError, match="larger budget"):
        pool.acquire(11 * 4096)
    with pytest.raises(dsx_nvme.errors.BudgetError, match="given back"):
        whole.tensor()


def test_memory_is_aligned_and_says_how_it_is_locked():
    for shape in ((), (3,), (5, 7), (1 << 20,)):
        t = dsx_nvme.empty(shape, dtype=torch.float16)
        assert t.shape == torch.Size(shape) and t.data_ptr() % 4096 == 0 and not t.any()
    assert dsx_nvme.empty(2, 3).shape == (2, 3) and dsx_nvme.empty(0).numel() == 0
    assert memory.allocate(10, True).locked.by in ("mlock", "cuda")
    assert memory.allocate(10, False).locked.reason == "not asked for"
    with pytest.raises(dsx_nvme.errors.OptionError):
        memory.allocate(10, "yes")


@pytest.mark.filterwarnings("error")
def test_torch_saves_through_the_fast_writer(tmp_path):
    state = {"a": torch.randn(300, 300), "b": [torch.arange(9), "text"]}
    for half in (8192, 1 << 20):
        with dsx_nvme.FastFileWriter(tmp_path / "t", buffer_bytes=half) as file:
            torch.save(state, file)
        found = torch.load(tmp_path / "t", weights_only=True)
        assert torch.equal(found["a"], state["a"]) and found["b"][1] == "text"
    plain = io.BytesIO()
    torch.save(state, plain)
    assert os.path.getsize(tmp_path / "t") == len(plain.getvalue())
