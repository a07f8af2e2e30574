"""Every writer against the real library that reads its files back; nothing is mocked."""

import csv
import json
import logging
import math
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import dsx_monitor
import pytest
from dsx_monitor import MonitorConfig, MonitorMaster, background, csvMonitor
from dsx_monitor.config import CSVConfig
from dsx_monitor.errors import MonitorConfigError


def rows(path):
    with open(path, newline="") as stream:
        return list(csv.reader(stream))


def events_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def csv_config(folder, job="job"):
    return {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": job}}


def test_csv_has_one_file_per_label_and_a_header_with_its_last_part(tmp_path):
    with MonitorMaster(csv_config(tmp_path), rank=0) as monitor:
        monitor.write_events([("Train/Samples/lr", 0.5, 8), ("val loss", 2, 8)])
        monitor.write_events([("Train/Samples/lr", 0.25, 16)])
    assert rows(tmp_path / "job" / "Train_Samples_lr.csv") == [["step", "lr"], ["8", "0.5"], ["16", "0.25"]]
    assert rows(tmp_path / "job" / "val_loss.csv") == [["step", "val loss"], ["8", "2.0"]]


def test_csv_of_a_restarted_run_goes_on_below_one_header(tmp_path):
    for step in (1, 2):
        with csvMonitor(csv_config(tmp_path), rank=0) as monitor:
            monitor.write_events([("loss", step, step)])
    path = tmp_path / "job" / "loss.csv"
    with path.open("a") as stream:
        stream.write("3,0.")  # as a crash leaves it
    with csvMonitor(csv_config(tmp_path), rank=0) as monitor:
        monitor.write_events([("loss", 4, 4)])
    assert rows(path) == [["step", "loss"], ["1", "1.0"], ["2", "2.0"], ["3", "0."], ["4", "4.0"]]


def test_csv_keeps_labels_apart_whose_file_names_fall_together(tmp_path):
    with csvMonitor(csv_config(tmp_path), rank=0) as monitor:
        monitor.write_events([("a/b", 1, 1), ("a b", 2, 1), ("a/b", 3, 2)])
    found = sorted(rows(path)[1:] for path in (tmp_path / "job").iterdir())
    assert found == [[["1", "1.0"], ["2", "3.0"]], [["1", "2.0"]]]


def test_csv_takes_more_labels_than_files_may_be_open(tmp_path):
    with csvMonitor(csv_config(tmp_path), rank=0) as monitor:
        for step in (1, 2):
            monitor.write_events([(f"m/{i}", i, step) for i in range(300)])
    assert rows(tmp_path / "job" / "m_7.csv") == [["step", "7"], ["1", "7.0"], ["2", "7.0"]]
    assert len(list((tmp_path / "job").iterdir())) == 300


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs the kernel's account of reads")
def test_csv_files_are_not_read_again_to_go_on_in_them(tmp_path):
    labels = [f"m{i}" for i in range(300)]  # more than stay open
    for label in labels:
        (tmp_path / f"{label}.csv").write_text("step,x\n" + "1,1.0\n" * 20_000)
    code = f"""
        from pathlib import Path
        from dsx_monitor.config import CSVConfig
        from dsx_monitor.writers.csv import CSVWriter
        read = lambda: int(Path("/proc/self/io").read_text().split()[1])
        writer, before = CSVWriter(CSVConfig(output_path={str(tmp_path)!r}, job_name="")), read()
        for step in (2, 3):
            writer.write([(label, 1.0, step) for label in {labels!r}])
            writer.flush()
        print(read() - before)
        writer.close()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert int(done.stdout) < 300 * 20_000, done.stderr
    assert rows(tmp_path / "m299.csv")[-2:] == [["2", "1.0"], ["3", "1.0"]]


def test_jsonl_holds_all_events_in_order_and_values_json_has_no_number_for(tmp_path):
    config = MonitorConfig.model_validate({"jsonl": {"enabled": True, "output_path": str(tmp_path), "job_name": ""}})
    with MonitorMaster(config, rank=0) as monitor:
        monitor.write_events([("a", 1.5, 2), ("b", math.nan, 2)])
        monitor.write_events([("a", -math.inf, 4)])
    found = events_of(tmp_path / "events.jsonl")
    assert [(e["label"], e["value"], e["step"]) for e in found] == [("a", 1.5, 2), ("b", "nan", 2), ("a", "-inf", 4)]
    assert all(e["time"] > 1.6e9 for e in found)


def test_tensorboard_reads_back_the_scalars(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = {"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "tb"}}
    with dsx_monitor.TensorBoardMonitor(config, rank=0) as monitor:
        monitor.write_events([("Train/Samples/train_loss", 8.0, 16), ("Train/Samples/lr", 0.1, 16)])
        monitor.write_events([("Train/Samples/train_loss", 4.0, 32)])
    found = loader.EventAccumulator(str(tmp_path / "tb"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("Train/Samples/train_loss")] == [(16, 8.0), (32, 4.0)]
    assert found.Scalars("Train/Samples/lr")[0].value == pytest.approx(0.1)


def wandb_records(path):
    """The protobuf records of a .wandb file: LevelDB's log format (32 KiB blocks) behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, position, part, records = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:  # padding at the end of a block
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, last
            records.append(wandb_internal_pb2.Record())
            records[-1].ParseFromString(part)
            part = b""
    return records


def test_wandb_offline_leaves_a_run_with_the_events(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    # W&B's helper process starts slowly on a busy machine; its own limits (30 s, 90 s) are no property of our writer.
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "280")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "280")
    config = {"wandb": {"enabled": True, "mode": "offline", "project": "p", "group": "g"}}
    with dsx_monitor.WandbMonitor(config, rank=0) as monitor:
        assert monitor.active == ("wandb",)
        monitor.write_events([("loss", 8.0, 16), ("lr", 0.5, 16), ("loss", 4.0, 32)])
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = wandb_records(path)
    deadline = time.monotonic() + 60
    while sum(r.HasField("history") for r in records) < 2 and time.monotonic() < deadline:
        time.sleep(0.5)  # the helper process writes the file
        records = wandb_records(path)
    runs = [r.run for r in records if r.HasField("run")]
    history = [
        {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    assert [(h["_step"], h.get("loss"), h.get("lr")) for h in history] == [(16, 8.0, 0.5), (32, 4.0, None)]
    assert (runs[0].project, runs[0].run_group) == ("p", "g")


def test_comet_offline_archive_holds_the_throttled_metrics(tmp_path, monkeypatch):
    pytest.importorskip("comet_ml")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    # Its library takes seconds to write the archive; on a busy machine more than the ten that a user waits.
    monkeypatch.setattr(background.BackgroundWriters.__init__, "__kwdefaults__", {"patience": 200.0})
    config = {"comet": {"enabled": True, "online": False, "samples_log_interval": 20, "experiment_name": "first"}}
    with dsx_monitor.CometMonitor(config, rank=0) as monitor:
        assert monitor.active == ("comet",)
        monitor.write_events([e for step in range(0, 50, 10) for e in (("loss", float(step), step), ("lr", 0.5, step))])
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        messages = [json.loads(line) for line in opened.read("messages.json").decode().splitlines()]
    metrics = [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]
    sent = {
        name: [(m["step"], float(m["metricValue"])) for m in metrics if m["metricName"] == name]
        for name in ("loss", "lr")
    }
    assert sent == {"loss": [(0, 0.0), (20, 20.0), (40, 40.0)], "lr": [(0, 0.5), (20, 0.5), (40, 0.5)]}


def test_other_ranks_write_nothing(tmp_path):
    with MonitorMaster(csv_config(tmp_path), rank=1) as monitor:
        assert monitor.enabled and monitor.active == ()
        monitor.write_events([("a", 1, 1)])
    assert not list(tmp_path.iterdir())


def test_the_rank_comes_from_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert MonitorMaster(csv_config(tmp_path)).active == ()
    monkeypatch.setenv("RANK", "0")
    with MonitorMaster(csv_config(tmp_path)) as monitor:
        assert monitor.active == ("csv_monitor",)


def test_a_missing_package_costs_one_warning_that_names_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = {**csv_config(tmp_path), "wandb": {"enabled": True}}
    with caplog.at_level(logging.WARNING, "dsx_monitor"), MonitorMaster(config, rank=0) as monitor:
        monitor.write_events([("a", 1, 1)])
    assert len(caplog.records) == 1 and "pip install wandb" in caplog.text and "the extra 'wandb'" in caplog.text
    assert len(rows(tmp_path / "job" / "a.csv")) == 2


def test_a_writer_that_fails_is_dropped_with_one_warning_and_the_others_go_on(tmp_path, caplog):
    config = {**csv_config(tmp_path), "jsonl": {"enabled": True, "output_path": str(tmp_path / "j"), "job_name": ""}}
    with caplog.at_level(logging.WARNING, "dsx_monitor"), MonitorMaster(config, rank=0) as monitor:
        (tmp_path / "job" / "b.csv").mkdir()  # opening it as a file fails
        for step in range(3):
            monitor.write_events([("a", step, step), ("b", step, step)], flush=True)
        assert monitor.active == ("jsonl",)
    assert len(caplog.records) == 1 and "csv_monitor" in caplog.text
    assert len(events_of(tmp_path / "j" / "events.jsonl")) == 6


def test_a_backend_that_cannot_start_costs_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "dsx_monitor"):
        monitor = MonitorMaster(csv_config(tmp_path / "file"), rank=0)
        monitor.write_events([("a", 1, 1)])
        monitor.close()
    assert len(caplog.records) == 1 and "csv_monitor cannot start" in caplog.text


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise RuntimeError('boom')"])
def test_a_process_that_ends_without_close_loses_nothing(tmp_path, ending):
    code = f"""
        import sys
        from dsx_monitor import MonitorMaster
        monitor = MonitorMaster({{"csv_monitor": {{"enabled": True, "output_path": {str(tmp_path)!r}, "job_name": ""}},
                                 "tensorboard": {{"enabled": True, "output_path": {str(tmp_path)!r},
                                                  "job_name": "t"}}}})
        for i in range(1000):
            monitor.write_events([("a", i, i)])
        {ending}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=60)
    assert len(rows(tmp_path / "a.csv")) == 1001


def test_a_process_that_is_killed_keeps_what_was_written_a_moment_ago(tmp_path):
    code = f"""
        import os, signal, time
        from dsx_monitor import csvMonitor
        monitor = csvMonitor({{"csv_monitor": {{"enabled": True, "output_path": {str(tmp_path)!r}, "job_name": ""}}}})
        monitor.write_events([("a", 1, 1)])
        while not os.path.exists({str(tmp_path / "a.csv")!r}) or os.path.getsize({str(tmp_path / "a.csv")!r}) < 10:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60)
    assert rows(tmp_path / "a.csv") == [["step", "a"], ["1", "1.0"]]


def test_a_forked_child_does_not_write_and_does_not_hang(tmp_path):
    code = f"""
        import os
        from dsx_monitor import csvMonitor
        monitor = csvMonitor({{"csv_monitor": {{"enabled": True, "output_path": {str(tmp_path)!r}, "job_name": ""}}}})
        monitor.write_events([("a", 1, 1)], flush=True)
        child = os.fork()
        monitor.write_events([("a", 2 if child else 666, 2)], flush=True)
        monitor.close()
        if child:
            os._exit(os.waitpid(child, 0)[1])
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60).returncode == 0
    assert rows(tmp_path / "a.csv")[1:] == [["1", "1.0"], ["2", "2.0"]]


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_what_waits_to_be_written_when_a_process_forks_is_written_once(kind, tmp_path):
    pytest.importorskip("tensorboard")
    code = f"""
        import os
        from dsx_monitor.config import CSVConfig
        from dsx_monitor.writers.csv import CSVWriter
        from dsx_monitor.writers.tensorboard import TensorBoardWriter
        writer = {{"csv": CSVWriter, "tensorboard": TensorBoardWriter}}[{kind!r}]
        writer = writer(CSVConfig(output_path={str(tmp_path)!r}, job_name=""))
        writer.write([("a", 1.0, 1)])
        writer.flush()
        writer.write([("a", 2.0, 2)])
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0
            writer.close()  # the child ends as programs end, and lets go of its copy
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=True)
    if kind == "csv":
        assert rows(tmp_path / "a.csv")[1:] == [["1", "1.0"], ["2", "2.0"]]
        return
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = loader.EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("a")] == [(1, 1.0), (2, 2.0)]


def test_events_after_close_are_dropped_with_one_warning(tmp_path, caplog):
    monitor = csvMonitor(csv_config(tmp_path), rank=0)
    monitor.write_events([("a", 1, 1)])
    monitor.close()
    monitor.close()
    monitor.write_events([("a", 2, 2)], flush=True)
    assert len(rows(tmp_path / "job" / "a.csv")) == 2
    monitor.write_events([("b", 2.0, 2)])
    assert [record.getMessage() for record in caplog.records if "after close()" in record.getMessage()] != []
    assert caplog.text.count("after close()") == 1


@pytest.mark.parametrize("bad", [("a", 1), ("a", "high", 1), 3, ("a", None, 1)])
def test_an_event_that_is_no_event_is_named(tmp_path, bad):
    with csvMonitor(csv_config(tmp_path), rank=0) as monitor, pytest.raises(MonitorConfigError, match="samples"):
        monitor.write_events([bad])


def test_nothing_enabled_means_not_enabled():
    monitor = MonitorMaster({})
    assert not monitor.enabled and not MonitorConfig().enabled
    monitor.write_events([("a", 1, 1)], flush=True)
    monitor.close()


def test_a_section_alone_is_accepted(tmp_path):
    section = CSVConfig(enabled=True, output_path=str(tmp_path), job_name="x")
    with csvMonitor(section, rank=0) as monitor:
        monitor.write_events([("a", 1, 1)])
    assert (tmp_path / "x" / "a.csv").exists()
    with csvMonitor({"enabled": True, "output_path": str(tmp_path), "job_name": "y"}, rank=0) as monitor:
        monitor.write_events([("a", 1, 1)])
    assert (tmp_path / "y" / "a.csv").exists()
    with pytest.raises(MonitorConfigError, match=r"csv_monitor\.outputpath"):
        csvMonitor({"enabled": True, "outputpath": "x"})


def test_a_single_monitor_tells_its_settings(tmp_path):
    with csvMonitor({"enabled": True, "output_path": str(tmp_path), "job_name": "j"}) as monitor:
        assert (monitor.output_path, monitor.job_name) == (str(tmp_path), "j")
    board = dsx_monitor.TensorBoardMonitor(MonitorConfig(tensorboard={"output_path": "runs"}))
    assert not board.enabled and board.output_path == "runs"
    board = dsx_monitor.TensorBoardMonitor({})
    assert (board.output_path, board.job_name) == ("", MonitorConfig().tensorboard.job_name)
    wandb = dsx_monitor.WandbMonitor({"wandb": {"group": "g", "team": "t"}})
    assert (wandb.group, wandb.team, wandb.project) == ("g", "t", "deepspeed")


def test_documented_defaults_and_strict_keys():
    config = MonitorConfig()
    assert config.tensorboard.job_name == config.csv_monitor.job_name == "DeepSpeedJobName"
    assert config.tensorboard.output_path == "" and config.wandb.project == "deepspeed"
    assert config.comet.samples_log_interval == 100 and config.comet.online is None
    with pytest.raises(MonitorConfigError, match=r"csv_monitor\.outputpath"):
        MonitorMaster({"csv_monitor": {"enabled": True, "outputpath": "x"}})
    with pytest.raises(MonitorConfigError, match=r"comet\.mode"):
        MonitorMaster({"comet": {"mode": "append"}})
    with pytest.raises(MonitorConfigError, match=r"tensorboard\.enabled"):
        MonitorMaster({"tensorboard": {"enabled": "yes"}})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"csv_monitor": {"enabled": True, "output_pth": "x"}},
         "csv_monitor.output_pth: unknown key, expected one of enabled, output_path, job_name "
         "(did you mean 'output_path'?)"),
        ({"csv_monitr": {"enabled": True}},
         "csv_monitr: unknown key, expected one of tensorboard, wandb, comet, csv_monitor, jsonl "
         "(did you mean 'csv_monitor'?)"),
        ({"wandb": {"zzzzzzzz": 1}},
         "wandb.zzzzzzzz: unknown key, expected one of enabled, group, team, project, mode"),
        ({"csv_monitor": {"enabled": "yes"}}, "csv_monitor.enabled: got 'yes', expected true or false"),
        ({"csv_monitor": 3}, "csv_monitor: got 3, expected an object { ... }"),
        ({"wandb": {"mode": "onlin"}},
         "wandb.mode: got 'onlin', expected one of online, offline, disabled (did you mean 'online'?)"),
        ({"comet": {"samples_log_interval": 0}},
         "comet.samples_log_interval: got 0, expected greater than or equal to 1"),
        ({"comet": {"api_key": 1234}}, "comet.api_key: got '***', expected text"),
        ({"comet": [{"api_key": "1234"}]}, "comet: got [{'api_key': '***'}], expected an object { ... }"),
        ({"jsonl": {"enabld": True}, "wandb": {"tem": "a"}},
         "wandb.tem: unknown key, expected one of enabled, group, team, project, mode (did you mean 'team'?); "
         "jsonl.enabld: unknown key, expected one of enabled, output_path, job_name (did you mean 'enabled'?)"),
    ],
)  # fmt: skip
def test_a_wrong_section_is_refused_in_words_of_its_own(config, said):
    with pytest.raises(MonitorConfigError) as caught:
        MonitorMaster(config)
    assert str(caught.value) == f"monitor configuration: {said}"


def test_a_tensor_with_one_element_is_a_number(tmp_path):
    torch = pytest.importorskip("torch")
    with csvMonitor(csv_config(tmp_path), rank=0) as monitor:
        monitor.write_events([("a", torch.tensor([2.5], requires_grad=True), torch.tensor(7))])
    assert rows(tmp_path / "job" / "a.csv")[1] == ["7", "2.5"]


def test_the_base_import_loads_neither_torch_nor_pydantic_nor_a_backend():
    heavy = "{'torch', 'pydantic', 'wandb', 'comet_ml', 'tensorboard'}"
    for extra in ("", "; dsx_monitor.MonitorMaster; dsx_monitor.WallClock; dsx_monitor.memory_snapshot()"):
        code = f"import sys, dsx_monitor{extra}; print(sorted({heavy} & sys.modules.keys()))"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert found.strip() == "[]"
