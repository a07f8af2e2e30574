"""Folders that cannot be made or go away, full disks, services that hang or exit, odd labels: a warning, not the
end.
"""

import csv
import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import types

import pytest
from dsx_monitor import MemoryLog, MonitorConfig, MonitorMaster, start_run
from dsx_monitor.background import BackgroundWriters
from dsx_monitor.errors import MonitorConfigError
from dsx_monitor.tolerance import tolerating


def rows(path):
    with open(path, newline="") as stream:
        return list(csv.reader(stream))


def csv_config(folder, job="job"):
    return {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": job}}


def jsonl_config(folder, job=""):
    return {"jsonl": {"enabled": True, "output_path": str(folder), "job_name": job}}


@pytest.fixture(params=["a file in the way", "a full disk"])
def unwritable(request, tmp_path):
    """A folder that cannot be made, and one on a disk that takes no bytes."""
    if request.param == "a file in the way":
        (tmp_path / "file").write_text("")
        yield tmp_path / "file" / "run"
        return
    folder = tmp_path / "small"
    folder.mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.call(small, stderr=subprocess.DEVNULL):
        pytest.skip("mounting a small file system needs root")
    with open(folder / "fill", "wb", buffering=0) as stream:
        stream.write(b"x" * 4096)
    yield folder
    subprocess.check_call(["umount", str(folder)])


def test_where_nothing_can_be_written_each_part_warns_once_and_goes_on(unwritable, caplog):
    with caplog.at_level(logging.WARNING, "dsx_monitor"):
        assert start_run(unwritable, title="t", config={"lr": 1}) == unwritable
        with MemoryLog(unwritable, rank=0) as memory:
            for step in range(3):
                memory.record(step, force=True)
        with MonitorMaster({**jsonl_config(unwritable), **csv_config(unwritable)}, rank=0) as monitor:
            for step in range(3):
                monitor.write_events([("a", step, step)], flush=True)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4, said
    for part in ("meta.json cannot be written", "the memory of rank 0", "jsonl ", "csv_monitor "):
        assert sum(part in text for text in said) == 1, (part, said)
    assert not (unwritable.exists() and [p for p in unwritable.iterdir() if p.name.startswith("meta.json.")])


def test_a_damaged_meta_file_is_written_anew(tmp_path, caplog):
    for text in ("", "{", "[]", '{"starts": [3]}', '{"title": "x"}'):
        (tmp_path / "meta.json").write_text(text)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dsx_monitor"):
            start_run(tmp_path, title="t", config={(1, 2): {None: 3}})
        assert len(caplog.records) == 1 and "is damaged" in caplog.text
        meta = json.loads((tmp_path / "meta.json").read_text())
        assert meta["title"] == "t" and len(meta["starts"]) == 1 and meta["config"] == {"(1, 2)": {"None": 3}}


def test_other_errors_are_not_swallowed():
    with pytest.raises(ZeroDivisionError), tolerating("x"):
        _ = 1 / 0


# - Folders that go away


@pytest.mark.parametrize("section", ["csv_monitor", "jsonl", "tensorboard"])
def test_a_removed_folder_is_warned_of_and_made_again(section, tmp_path, caplog):
    if section == "tensorboard":
        pytest.importorskip("tensorboard")
    config = {section: {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    with caplog.at_level(logging.WARNING, "dsx_monitor"), MonitorMaster(config, rank=0) as monitor:
        monitor.write_events([("a", 1, 1), ("b", 1, 1)], flush=True)
        shutil.rmtree(tmp_path / "job")
        for step in (2, 3):
            monitor.write_events([("a", step, step), ("b", step, step)], flush=True)
        assert monitor.active == (section,)
    assert len(caplog.records) == 1 and "was removed while the run goes on" in caplog.text
    folder = tmp_path / "job"
    if section == "csv_monitor":
        assert rows(folder / "a.csv") == [["step", "a"], ["2", "2.0"], ["3", "3.0"]]
    elif section == "jsonl":
        steps = [json.loads(line)["step"] for line in (folder / "events.jsonl").read_text().splitlines()]
        assert steps == [2, 2, 3, 3]
    else:
        loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        found = loader.EventAccumulator(str(folder))
        found.Reload()
        assert [(e.step, e.value) for e in found.Scalars("a")] == [(2, 2.0), (3, 3.0)]


def test_a_removed_folder_of_the_memory_log_too(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "dsx_monitor"), MemoryLog(tmp_path / "run", rank=3) as memory:
        memory.record(1, force=True)
        shutil.rmtree(tmp_path / "run")
        memory.record(2, force=True)
    assert len(caplog.records) == 1 and "was removed" in caplog.text
    assert [json.loads(line)["step"] for line in memory.path.read_text().splitlines()] == [2]


def test_a_folder_that_cannot_be_made_again_ends_its_writer_alone(tmp_path, caplog):
    config = {**jsonl_config(tmp_path / "other"), **csv_config(tmp_path)}
    with caplog.at_level(logging.WARNING, "dsx_monitor"), MonitorMaster(config, rank=0) as monitor:
        monitor.write_events([("a", 1, 1)], flush=True)
        shutil.rmtree(tmp_path / "job")
        (tmp_path / "job").write_text("in the way")
        monitor.write_events([("a", 2, 2)], flush=True)
        assert monitor.active == ("jsonl",)
    assert "csv_monitor failed and is switched off" in caplog.text
    assert len((tmp_path / "other" / "events.jsonl").read_text().splitlines()) == 2


# - Labels


@pytest.mark.parametrize("section", ["csv_monitor", "jsonl", "tensorboard"])
@pytest.mark.parametrize(
    "label", ["x" * 10_000, "\u00e9\u4e2d" * 3000, "\ud800 half", "a\0b", "..", "", "Train/../../x"]
)
def test_no_label_switches_a_writer_off(section, label, tmp_path, caplog):
    if section == "tensorboard":
        pytest.importorskip("tensorboard")
    config = {section: {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    with caplog.at_level(logging.WARNING, "dsx_monitor"), MonitorMaster(config, rank=0) as monitor:
        monitor.write_events([(label, 1, 1), ("a", 1, 1)], flush=True)
        assert monitor.active == (section,)
    assert not caplog.records and [p.name for p in tmp_path.iterdir()] == ["job"]
    if section == "csv_monitor":
        assert len(list((tmp_path / "job").iterdir())) == 2 and len(rows(tmp_path / "job" / "a.csv")) == 2


def test_long_labels_that_begin_alike_have_files_of_their_own(tmp_path):
    with MonitorMaster(csv_config(tmp_path), rank=0) as monitor:
        monitor.write_events([("x" * 5000 + str(i), i, 1) for i in range(3)])
    assert sorted(rows(path)[1][1] for path in (tmp_path / "job").iterdir()) == ["0.0", "1.0", "2.0"]


def test_a_number_of_samples_that_no_file_holds_is_named(tmp_path):
    with MonitorMaster(csv_config(tmp_path), rank=0) as monitor:
        for samples in (1 << 63, float("inf")):
            with pytest.raises(MonitorConfigError, match="write_events: got"):
                monitor.write_events([("a", 1, samples)])
        monitor.write_events([("a", 1, (1 << 63) - 1)])


# - Names of jobs


@pytest.mark.parametrize("name", ["../x", "../../x", "/abs", "a/../../x", "..", "a\\..\\..\\x", "\\x", "a\0b"])
@pytest.mark.parametrize("section", ["csv_monitor", "jsonl", "tensorboard"])
def test_a_job_name_cannot_lead_out_of_its_folder(name, section, tmp_path):
    section_config = {"enabled": True, "output_path": str(tmp_path / "runs"), "job_name": name}
    with pytest.raises(MonitorConfigError, match=r"job_name.*below output_path"):
        MonitorMaster({section: section_config}, rank=0)
    # An object of another library in the place of our configuration.
    foreign = types.SimpleNamespace(**{section: types.SimpleNamespace(**section_config)})
    with MonitorMaster(foreign, rank=0) as monitor:
        assert monitor.active == ()
    assert list(tmp_path.iterdir()) == []


def test_folders_below_are_names_too(tmp_path):
    for name in ("", "a/b", "a..b", ".hidden", "with blank"):
        with MonitorMaster(jsonl_config(tmp_path, name), rank=0) as monitor:
            monitor.write_events([("a", 1, 1)])
        assert (tmp_path / name / "events.jsonl").exists()
    assert MonitorConfig().csv_monitor.job_name == "DeepSpeedJobName"


# - Services


class Writer:
    """Counts its calls; `hangs` in the method of that name until it is let go."""

    def __init__(self, section, hangs="", remote=True):
        self.section, self.remote, self._hangs = section, remote, hangs
        self.events, self.calls, self.let_go = [], [], threading.Event()

    def _call(self, name):
        self.calls.append(name)
        if name == self._hangs:
            self.let_go.wait(60)

    def write(self, events):
        self._call("write")
        self.events += events

    def flush(self):
        self._call("flush")

    def close(self):
        self._call("close")


@pytest.mark.parametrize("hangs", ["write", "close", "flush"])
@pytest.mark.parametrize("events", [0, 3])
def test_a_service_that_hangs_delays_neither_the_end_for_long_nor_the_files(hangs, events, caplog):
    service, file = Writer("wandb", hangs), Writer("csv_monitor", remote=False)
    with caplog.at_level(logging.WARNING, "dsx_monitor"):
        writers = BackgroundWriters([service, file], patience=0.4)
        for i in range(events):
            writers.put([("a", float(i), i)])
        begun = time.monotonic()
        writers.close()
        took = time.monotonic() - begun
    assert file.events == [("a", float(i), i) for i in range(events)] and file.calls[-1] == "close"
    hung = hangs in service.calls
    assert hung == (events > 0 or hangs != "write")
    assert (0.4 <= took < 20) if hung else took < 20
    assert ("wandb has not come back" in caplog.text) == hung
    service.let_go.set()


def test_flush_does_not_wait_for_ever_and_not_twice(caplog):
    service, file = Writer("wandb", "write"), Writer("csv_monitor", remote=False)
    with caplog.at_level(logging.WARNING, "dsx_monitor"):
        writers = BackgroundWriters([service, file], patience=0.3)
        for i in range(5):
            writers.put([("a", float(i), i)])
            assert writers.flush() is False
        assert len(file.events) == 5 and len(caplog.records) == 1
        service.let_go.set()
        deadline = time.monotonic() + 20
        while not writers.flush() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(service.events) == 5  # it has come back, and has everything
        assert writers.flush(timeout=0) in (True, False)
        writers.close()


def test_a_slow_service_is_waited_for_as_long_as_it_gets_on():
    class Slow(Writer):
        def write(self, events):
            for _ in events:
                time.sleep(0.02)
            super().write(events)

    service = Slow("wandb")
    writers = BackgroundWriters([service], patience=1.0)
    for i in range(20):
        writers.put([("a", float(i), i)])
        writers.flush(timeout=0.0)  # so that the events are not one call
    writers.close()
    assert len(service.events) == 20 and service.calls[-1] == "close"


def test_a_program_ends_although_wandb_hangs(tmp_path):
    (tmp_path / "wandb.py").write_text(
        textwrap.dedent("""
        import time
        class Run:
            def log(self, *args, **kwargs): time.sleep(1000)
            def finish(self): time.sleep(1000)
        def init(**kwargs): return Run()
        """)
    )
    code = f"""
        from dsx_monitor import MonitorMaster, background
        background._PATIENCE = background.BackgroundWriters.__init__.__kwdefaults__["patience"] = 0.5
        config = {{"wandb": {{"enabled": True}}, "csv_monitor": {{"enabled": True, "output_path": {str(tmp_path)!r}}}}}
        monitor = MonitorMaster(config, rank=0)
        for step in range(100):
            monitor.write_events([("a", step, step)])
    """
    begun = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 60 and "wandb has not come back" in done.stderr
    assert len(rows(tmp_path / "DeepSpeedJobName" / "a.csv")) == 101


def test_the_default_patience_is_seconds():
    assert BackgroundWriters.__init__.__kwdefaults__["patience"] <= 15


@pytest.mark.parametrize("error", [SystemExit(1), RuntimeError("no network")])
def test_a_service_that_exits_at_start_or_later_does_not_end_the_program(error, tmp_path, monkeypatch, caplog):
    class Run:
        def log(self, *args, **kwargs):
            raise error

        def finish(self):
            raise error

    def init(**kwargs):
        if starts:
            return Run()
        raise error

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = {"wandb": {"enabled": True}, **csv_config(tmp_path)}
    for starts in (False, True):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dsx_monitor"), MonitorMaster(config, rank=0) as monitor:
            assert monitor.active == (("wandb", "csv_monitor") if starts else ("csv_monitor",))
            for step in range(3):
                monitor.write_events([("a", step, step)], flush=True)
            assert monitor.active == ("csv_monitor",)
        assert len(caplog.records) == 1 and "wandb" in caplog.text
    assert len(rows(tmp_path / "job" / "a.csv")) == 7


@pytest.mark.parametrize("name", ["wandb", "comet_ml"])
def test_a_service_that_hangs_at_its_start_does_not_hold_training_up(name, tmp_path, monkeypatch, caplog):
    begun, go_on, seen = threading.Event(), threading.Event(), []

    def start(**kwargs):
        begun.set()
        assert go_on.wait(60)

        def take(values, step):
            seen.append((values, step))

        return types.SimpleNamespace(log=take, log_metrics=take, finish=lambda: None, end=lambda: None)

    monkeypatch.setattr("dsx_monitor.writers.starting._SECONDS", 0.05)
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(init=start, start=start))
    config = {name.removesuffix("_ml"): {"enabled": True}, **csv_config(tmp_path)}
    with MonitorMaster(config, rank=0) as monitor:
        assert begun.wait(10) and not go_on.is_set(), "training goes on while the service starts"
        for step in range(3):
            monitor.write_events([("a", step, step)])
        assert not seen and monitor.active == (name.removesuffix("_ml"), "csv_monitor")
        go_on.set()
    assert seen[0] == ({"a": 0.0}, 0) and len(seen) == (3 if name == "wandb" else 1)
    assert len(rows(tmp_path / "job" / "a.csv")) == 4


def test_a_service_that_fails_late_in_its_start_is_switched_off_with_one_warning(tmp_path, monkeypatch, caplog):
    go_on = threading.Event()

    def init(**kwargs):
        assert go_on.wait(60)
        raise RuntimeError("no network")

    monkeypatch.setattr("dsx_monitor.writers.starting._SECONDS", 0.05)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = {"wandb": {"enabled": True}, **csv_config(tmp_path)}
    with caplog.at_level(logging.WARNING, "dsx_monitor"), MonitorMaster(config, rank=0) as monitor:
        go_on.set()
        for step in range(3):
            monitor.write_events([("a", step, step)], flush=True)
        assert monitor.active == ("csv_monitor",)
    assert len(caplog.records) == 1 and "did not start: RuntimeError: no network" in caplog.text


def test_a_keyboard_interrupt_at_the_start_of_a_service_is_the_users(tmp_path, monkeypatch):
    def init(**kwargs):
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with pytest.raises(KeyboardInterrupt):
        MonitorMaster({"wandb": {"enabled": True}}, rank=0)
