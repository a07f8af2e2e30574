"""Timers, memory figures and the run directory. No test asserts how long something takes, only how figures relate."""

import json
import subprocess
import sys
import time

import dsx_monitor
import pytest
from dsx_monitor import MemoryLog, ThroughputTimer, WallClock, start_run


def test_ranges_add_up_per_step_and_nest():
    clock = WallClock()
    with clock.range("forward"), clock.range("inner"):
        time.sleep(0.02)
    with clock.range("forward"):
        time.sleep(0.01)
    figures = dict(clock.elapsed())
    assert list(figures) == ["inner", "forward"]
    assert figures["forward"] >= 30 > 20 <= figures["inner"] <= figures["forward"] - 10
    assert clock.elapsed() == []


def test_a_range_that_raises_is_measured():
    clock = WallClock("cpu")
    with pytest.raises(KeyError), clock.range("step"):
        raise KeyError
    assert [name for name, _ in clock.elapsed()] == ["step"]


@pytest.mark.gpu
def test_device_ranges_come_without_waiting_and_wait_on_demand():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    clock = WallClock(torch.device("cuda"))
    with clock.range("forward"):
        torch.cuda._sleep(500_000_000)  # far longer than it takes to get to the next line
    assert clock.elapsed() == []
    with clock.range("forward"):
        pass
    first, second = dict(clock.elapsed(wait=True)), dict(clock.elapsed(wait=True))
    assert first["forward"] > 50 > second["forward"]


def test_throughput_counts_samples_over_time_and_leaves_out_pauses(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    timer = ThroughputTimer(8, tokens_per_sample=16, flops_per_sample=1e12, start_step=2, window=4)
    now[0] += 50  # compilation, left out
    timer.step()
    assert timer.samples_per_second == 0.0 and timer.events(8) == []
    timer.step()
    for _ in range(10):
        now[0] += 2
        with timer.pause():
            now[0] += 1000
        timer.step()
    assert timer.samples_per_second == pytest.approx(4.0)
    assert timer.tokens_per_second == pytest.approx(64.0)
    assert timer.tflops == pytest.approx(4.0)
    assert timer.events(96) == [
        ("Train/Samples/samples_per_second", pytest.approx(4.0), 96),
        ("Train/Samples/tokens_per_second", pytest.approx(64.0), 96),
        ("Train/Samples/tflops", pytest.approx(4.0), 96),
    ]
    now[0] += 2
    timer.step(batch_size=40)
    assert timer.samples_per_second == pytest.approx((3 * 8 + 40) / 8)


def test_throughput_refuses_a_batch_of_nothing():
    with pytest.raises(ValueError, match="batch_size=0"):
        ThroughputTimer(0)


_ALLOCATION = """
from dsx_monitor import memory_snapshot
before = memory_snapshot(pss=True)
block = bytearray(b"x") * (64 << 20)
after = memory_snapshot(pss=True)
assert after.rss - before.rss > 60 << 20, (before, after)
assert after.peak_rss >= after.rss - (1 << 20) and after.cuda_allocated == 0, after
if after.pss is not None:
    assert after.pss - before.pss > 60 << 20 and after.pss <= after.rss + (1 << 20), (before, after)
assert memory_snapshot().pss is None
"""


def test_memory_follows_an_allocation():
    # In a process of its own: pages that pytest's process shares with forked ranks count in parts, and one rank's end
    # changes the count.
    subprocess.run([sys.executable, "-c", _ALLOCATION], check=True)


def test_a_run_that_resumes_extends_the_same_files(tmp_path):
    for step, world in ((0, 2), (640, 1)):
        start_run(tmp_path, title="t", config={"a": {"b": 1}, "path": tmp_path}, world_size=world, step=step)
        for rank in range(world):
            with MemoryLog(tmp_path, rank=rank, interval=3600) as log:
                log.record(step + 8)
                log.record(step + 16)  # not due
                log.record(step + 24, force=True)
        if step == 0:
            with (tmp_path / "memory" / "rank00000.jsonl").open("a") as stream:
                stream.write('{"time": 1')  # as a crash leaves it
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert [(s["step"], s["world_size"]) for s in meta["starts"]] == [(0, 2), (640, 1)]
    assert meta["config"]["path"] == str(tmp_path) and meta["environment"]["cores"] >= 1
    texts = (tmp_path / "memory" / "rank00000.jsonl").read_text().splitlines()
    lines = [json.loads(text) for text in texts if text.endswith("}")]
    assert [line["step"] for line in lines] == [8, 24, 648, 664]
    assert all(line["rss"] > 1 << 20 for line in lines)
    assert len((tmp_path / "memory" / "rank00001.jsonl").read_text().splitlines()) == 2


def test_every_public_name_can_be_loaded():
    for name in dsx_monitor.__all__:
        assert getattr(dsx_monitor, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dsx_monitor.nothing
