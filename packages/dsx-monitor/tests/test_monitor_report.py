"""The HTML report: what it reads, what it refuses, that it needs no network, and that a real browser draws it."""

import json
import math
import re
import shutil
import subprocess
from importlib import resources
from itertools import count
from pathlib import Path

import pytest
from dsx_monitor import MemoryLog, MonitorMaster, start_run, write_report
from dsx_monitor.errors import ReportError

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of 100 steps on two ranks, resumed on one, written by the package itself."""
    folder = tmp_path / "run"
    config = {"zero_optimization": {"stage": 2}, "note": "</script><b>bold</b>"}
    start_run(folder, title="A <run>", config=config, world_size=2, facts={"parameters": 1_381_632})
    writers = {"jsonl": {"enabled": True, "output_path": str(folder), "job_name": ""}}
    with MonitorMaster(writers, rank=0) as monitor:
        for step in range(1, 101):
            loss = math.nan if step == 50 else 5 / step
            monitor.write_events([("Train/Samples/train_loss", loss, step * 8), ("Train/Samples/lr", 1e-3, step * 8)])
            monitor.write_events([("Train/Samples/tokens_per_second", 1000.0, step * 8), ("Mine/x", step, step * 8)])
            if step % 20 == 0:
                monitor.write_events([("Validation/Samples/bits_per_byte", 8 / step, step * 8)])
    start_run(folder, title="A <run>", config=config, world_size=1, step=400, facts={"parameters": 1_381_632})
    for rank in range(2):
        with MemoryLog(folder, rank=rank) as log:
            log.record(8, force=True)
            log.record(800, force=True)
    return folder


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1])


def panels_by_title(page: str) -> dict:
    return {panel["title"]: panel for panel in data_of(page)["panels"]}


def test_the_report_holds_every_curve_under_its_title(run):
    page = write_report(run).read_text()
    panels = panels_by_title(page)
    assert list(panels) == ["Loss", "Bits per byte", "Throughput", "Learning rate", "Memory of each process", "Mine/x"]
    loss = panels["Loss"]["series"][0]
    assert loss["x"] == [8.0 * s for s in range(1, 101)]
    assert loss["y"][:2] == [5.0, 2.5] and loss["y"][49] is None  # not finite: a gap
    assert [s["name"] for s in panels["Memory of each process"]["series"]] == ["rank 0", "rank 1"]
    assert all(10 < y < 100_000 for s in panels["Memory of each process"]["series"] for y in s["y"])  # MiB
    assert panels["Loss"]["main"] and not panels["Mine/x"]["main"]
    assert data_of(page)["starts"] == [{"step": 0, "ranks": 2}, {"step": 400, "ranks": 1}]


def test_the_report_is_one_file_that_asks_for_nothing_and_runs_nothing_foreign(run):
    page = write_report(run).read_text()
    assert not re.search(r"""(src|href)\s*=|url\(|@import|fetch\(|XMLHttpRequest""", page)
    assert set(re.findall(r"https?://[^\"']+", page)) <= {"http://www.w3.org/2000/svg"}
    assert page.count("</script>") == 2 and "<b>bold</b>" not in page and "A &lt;run&gt;" in page


def test_configuration_environment_and_facts_are_shown(run):
    page = write_report(run).read_text()
    shown = page.replace("<wbr>", "")
    for text in ("zero_optimization.stage", "<td>2</td>", "python", "1.38 M", "on 2 processes, then 1 process"):
        assert text in shown


def test_long_keys_end_a_line_between_words(run):
    page = write_report(run).read_text()
    assert "<th>zero_<wbr>optimization.<wbr>stage</th>" in page
    # In an attribute or a title nothing is put between the words.
    assert "<wbr>" not in re.search(r"<head>(.*?)</head>", page, re.S)[1]


def test_the_throughput_tile_shows_what_its_curve_shows(tmp_path):
    config = {"jsonl": {"enabled": True, "output_path": str(tmp_path), "job_name": ""}}
    with MonitorMaster(config, rank=0) as monitor:
        for step, speed in enumerate((100.0, 3138.0, 3140.0, 1227.0)):
            monitor.write_events([("Train/Samples/tokens_per_second", speed, step)])
    page = write_report(tmp_path).read_text()
    (series,) = panels_by_title(page)["Throughput"]["series"]
    tile = re.search(r'<div class="tile"><span>Throughput, (.*?)</span><b>(.*?)</b><i>(.*?)</i>', page)
    assert tile[1] == series["name"] == "all ranks"
    assert float(tile[2]) == series["y"][-1] == 1227.0  # the legend shows the last value
    assert tile[3] == "tokens/s at the end, median 3138"


def test_every_start_of_a_run_has_its_command(tmp_path, monkeypatch):
    (tmp_path / "events.jsonl").write_text('{"time": 1, "step": 1, "label": "a", "value": 1}\n')
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "0.1"])
    start_run(tmp_path, title="t", world_size=2)
    monkeypatch.setattr("sys.argv", ["train.py", "--resume", "a folder"])
    start_run(tmp_path, title="t", step=800)
    page = write_report(tmp_path).read_text().replace("<wbr>", "")
    rows = dict(re.findall(r"<th>(start \d: .*?)</th><td>(.*?)</td>", page))
    assert list(rows.values()) == ["train.py --lr 0.1", "train.py --resume &#x27;a folder&#x27;"]
    assert [name.split(", ", 1)[1] for name in rows] == ["2 processes, at 0 samples", "1 process, at 800 samples"]


def write_losses(folder, first, last):
    writers = {"jsonl": {"enabled": True, "output_path": str(folder), "job_name": ""}}
    with MonitorMaster(writers, rank=0) as monitor:
        for step in range(first, last):
            monitor.write_events([("Train/Samples/train_loss", 1.0 + step, step * 8)])


def test_two_runs_in_one_folder_are_told_apart_and_a_resumed_run_is_one_curve(tmp_path, monkeypatch):
    """Every rank calls `start_run`, as a script that is launched does; the variables say which rank this is.

    The three runs follow each other within a millisecond.
    """
    ticks = count(1)
    monkeypatch.setattr("time.time", lambda: 1_700_000_000 + next(ticks) * 1e-5)
    for ranks, first, last in ((1, 1, 11), (2, 1, 6), (2, 6, 9)):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        for rank in range(ranks):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setattr("dsx_monitor.run._born", lambda key=(ranks, first, rank): str(key))  # its own process
            assert start_run(tmp_path, title="t", step=8 * (first - 1)) == tmp_path
        write_losses(tmp_path, first, last)
    page = write_report(tmp_path).read_text()
    assert data_of(page)["starts"] == [{"step": 0, "ranks": 1}, {"step": 0, "ranks": 2}, {"step": 40, "ranks": 2}]
    assert "on 1 process, then 2 processes (2 starts)<" in page
    one, two = panels_by_title(page)["Loss"]["series"]
    assert (one["name"], two["name"]) == ("training, start 1", "training, start 2")
    assert one["x"] == [8 * step for step in range(1, 11)] and two["x"] == [8 * step for step in range(1, 9)]
    assert two["y"] == [1.0 + step for step in range(1, 9)] and len(two["t"]) == 8


def test_steps_that_go_back_within_a_run_stay_one_curve(tmp_path):
    start_run(tmp_path, title="t")
    write_losses(tmp_path, 1, 6)
    write_losses(tmp_path, 1, 6)
    (series,) = panels_by_title(write_report(tmp_path).read_text())["Loss"]["series"]
    assert len(series["x"]) == 10 and series["name"] == "training"


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert start_run(tmp_path / "run", title="t") == tmp_path / "run"
    assert not (tmp_path / "run").exists()


def test_secrets_are_masked(tmp_path, monkeypatch):
    secret = "S3CR3T"
    words = ["train.py", "--hf-token", secret, f"--api_key={secret}", f"comet.api_key={secret}", "--lr", "1"]
    monkeypatch.setattr("sys.argv", [*words, "https://me:S3CR3T@host/data", "--max_tokens", "9", "--password"])
    config = {
        "comet": {"enabled": True, "api_key": secret, "workspace": "mine"},
        "services": [{"accessKey": secret}, {"credentials": {"user": secret}}, ("https://u:S3CR3T@host",)],
        "wandb": {"api_key": None}, "max_tokens": 4096, "pad_token": "<pad>", "token": "",
    }  # fmt: skip
    start_run(tmp_path, title="t", config=config, facts={"SECRET": secret, "parameters": 5})
    write_losses(tmp_path, 1, 3)
    write_report(tmp_path)
    for name in ("meta.json", "report.html"):
        assert secret not in (tmp_path / name).read_text()
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["config"] == {
        "comet": {"enabled": True, "api_key": "***", "workspace": "mine"},
        "services": [{"accessKey": "***"}, {"credentials": "***"}, ["https://***@host"]],
        "wandb": {"api_key": None}, "max_tokens": 4096, "pad_token": "<pad>", "token": "",
    }  # fmt: skip
    assert meta["facts"] == {"SECRET": "***", "parameters": 5}
    assert meta["starts"][0]["command"] == [
        "train.py", "--hf-token", "***", "--api_key=***", "comet.api_key=***", "--lr", "1", "https://***@host/data",
        "--max_tokens", "9", "--password",
    ]  # fmt: skip
    assert config["comet"]["api_key"] == secret, "the caller's configuration is not changed"


@pytest.mark.parametrize("name", ["</script><b>", "<!--<script>", "<SCRIPT", "]]>", "\u2028"])
def test_no_name_ends_or_swallows_the_data_of_the_page(tmp_path, name):
    writers = {"jsonl": {"enabled": True, "output_path": str(tmp_path), "job_name": ""}}
    with MonitorMaster(writers, rank=0) as monitor:
        monitor.write_events([(name, 1.0, 8)])
    page = write_report(tmp_path).read_text()
    assert "<" not in re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1]
    assert data_of(page)["panels"][0]["series"][0]["label"] == name


def test_half_a_line_is_skipped_and_counted(run):
    with (run / "events.jsonl").open("a") as stream:
        stream.write('not json\n{"step": 3}\n{"time": 1, "step": 900, "label": "Train/Samp')
    page = write_report(run, run.parent / "elsewhere" / "r.html").read_text()
    assert panels_by_title(page)["Loss"]["series"][0]["x"][-1] == 800
    assert "lines that could not be read" in page and "<td>3</td>" in page


def test_csv_files_serve_where_there_is_no_jsonl(tmp_path):
    config = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"}}
    with MonitorMaster(config, rank=0) as monitor:
        monitor.write_events([("Train/Samples/train_loss", 3, 8), ("Train/Samples/lr", 0.5, 8)])
        monitor.write_events([("Train/Samples/train_loss", 2, 16)])
    (tmp_path / "other.csv").write_text("a,b,c\n1,2,3\n")
    panels = panels_by_title(write_report(tmp_path).read_text())
    assert list(panels) == ["Loss", "Learning rate"]
    assert panels["Loss"]["series"][0]["y"] == [3.0, 2.0] and panels["Loss"]["series"][0]["t"] == []


def test_long_curves_are_thinned_but_keep_their_extremes(tmp_path):
    config = {"jsonl": {"enabled": True, "output_path": str(tmp_path), "job_name": ""}}
    with MonitorMaster(config, rank=0) as monitor:
        monitor.write_events([("loss/train_loss", 99.0 if i == 12345 else math.sin(i / 9), i) for i in range(30_000)])
    series = panels_by_title(write_report(tmp_path).read_text())["Loss"]["series"][0]
    assert len(series["x"]) < 2100 and series["y"][series["x"].index(12345)] == 99.0
    assert (series["x"][0], series["x"][-1]) == (0, 29_999)


def test_what_cannot_be_drawn_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ReportError, match="csv_monitor"):
        write_report(tmp_path)
    with pytest.raises(ReportError, match="got nothing"):
        write_report(tmp_path / "none")
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(ReportError, match=r"meta\.json is no JSON"):
        write_report(tmp_path)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_draws_the_curves_and_shows_values_under_the_pointer(run, tmp_path):
    page = write_report(run).read_text()
    probe = """<script>addEventListener("error", e => document.title = "failed: " + e.message);
      setTimeout(() => { const s = document.querySelector("svg"), b = s.getBoundingClientRect();
        const at = {clientX: b.left + 55, clientY: b.top + 9, bubbles: true};
        s.dispatchEvent(new PointerEvent("pointermove", at)) }, 300)
      </script>"""
    (tmp_path / "probe.html").write_text(page.replace("</body>", probe + "</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "probe.html").as_uri()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert "<title>A &lt;run&gt;</title>" in found  # no script failed
    assert found.count('class="curve"') == 6  # four main charts with one curve, memory with two
    assert ">nothing to show<" not in found and "resumed on 1 process" in found
    assert re.search(r"training<b>5</b>", found)  # the value at the left edge, not the last one
    points = re.search(r'<path d="(M[^"]+)" class="curve"', found)[1]
    assert points.count("M") == 2 and points.count("L") == 97  # a gap where the loss was not finite


def test_profile_trace_and_stragglers_are_in_the_report(run):
    from dsx_monitor import Timeline

    for rank in (0, 1):
        timeline = Timeline(rank)
        with timeline.range("forward"):
            pass
        timeline.write(run)
    (run / "flops.json").write_text(json.dumps({"summary": {"fwd flops per GPU": "3.14 GFLOPS"}}))
    (run / "flops.html").write_text("<!doctype html>")
    record = {"step": 80, "own": [[1, 2, 3, 4], [1, 2, 99, 4]], "waiting": [96, 0], "found": ["rank 1 is <slow>"]}
    (run / "stragglers.jsonl").write_text(json.dumps(record) + "\n{broken\n")
    page = write_report(run).read_text()
    assert 'href="flops.html"' in page and 'href="trace.json"' in page and "3.14 GFLOPS" in page
    assert "<td>99.0</td>" in page and "at 80 samples: rank 1 is &lt;slow&gt;" in page
    assert "lines that could not be read" in page
    events = [e for e in json.loads((run / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [e["pid"] for e in events] == [0, 1]


def test_groups_of_curves_share_a_chart(tmp_path):
    writers = {"jsonl": {"enabled": True, "output_path": str(tmp_path), "job_name": ""}}
    with MonitorMaster(writers, rank=0) as monitor:
        monitor.write_events([("Train/Memory/params", 2**20, 1), ("Train/Memory/grads", 2**21, 1)])
        monitor.write_events([(f"Train/Eigenvalues/ModelBlockParam_{i}", 0.5, 1) for i in range(3)])
    panels = panels_by_title(write_report(tmp_path).read_text())
    assert [(s["name"], s["y"]) for s in panels["Memory by class"]["series"]] == [("params", [1.0]), ("grads", [2.0])]
    assert len(panels["Largest curvature of each block"]["series"]) == 3
    assert panels["Memory by class"]["stacked"] and not panels["Largest curvature of each block"]["stacked"]


def test_memory_by_class_is_stacked_per_start_and_its_total_is_a_line(tmp_path, monkeypatch):
    writers = {"jsonl": {"enabled": True, "output_path": str(tmp_path), "job_name": ""}}
    ticks = count(1)
    monkeypatch.setattr("time.time", lambda: 1_700_000_000 + next(ticks))
    for start in (1, 2):  # the same steps twice
        monkeypatch.setattr("dsx_monitor.run._born", lambda start=start: str(start))  # each in its own process
        start_run(tmp_path, title="twice", world_size=1)
        with MonitorMaster(writers, rank=0) as monitor:
            for step in (1, 2):
                events = [("params", 1), ("grads", 2), ("total", 3)]
                monitor.write_events([(f"Train/Memory/{name}", size * 2**20, step) for name, size in events])
    panels = panels_by_title(write_report(tmp_path).read_text())
    for start in (1, 2):  # areas of two starts in one chart would hide each other
        series = panels[f"Memory by class, start {start}"]["series"]
        assert {(s["name"], s["start"], s.get("line", False)) for s in series} == {
            (name, start, name == "total") for name in ("params", "grads", "total")
        }
    assert "Memory by class" not in panels


def test_the_phases_of_a_step_are_stacked_and_none_is_counted_twice(tmp_path):
    writers = {"jsonl": {"enabled": True, "output_path": str(tmp_path), "job_name": ""}}
    times = {"forward": 3, "backward": 7, "backward_inner": 5, "backward_allreduce": 2, "step": 4}
    with MonitorMaster(writers, rank=0) as monitor:
        for step in (1, 2):
            monitor.write_events([(f"Train/Samples/elapsed_time_ms_{name}", ms, step) for name, ms in times.items()])
    panel = panels_by_title(write_report(tmp_path).read_text())["Time of a step"]
    assert panel["stacked"] and sum(series["y"][0] for series in panel["series"]) == 3 + 7 + 4
    assert "backward" not in [series["name"] for series in panel["series"]]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
def test_the_script_puts_the_parts_of_a_sum_on_each_other():
    script = (resources.files("dsx_monitor.report") / "assets" / "report.js").read_text()
    function = script[script.index("function stack(") : script.index("const origin")]
    curves = [
        {"x": [1, 3], "s": {"start": 1, "y": [1, 2]}}, {"x": [2, 3], "s": {"start": 1, "y": [10, None]}},
        {"x": [1, 3], "s": {"start": 1, "y": [9, 9], "line": True}}, {"x": [1], "s": {"start": 2, "y": [5]}},
    ]  # fmt: skip
    program = (
        f"const c = {json.dumps(curves)}; {function} stack(c); console.log(JSON.stringify(c.map(one => one.area)))"
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    first, second, line, other = [json.loads(done.stdout)[i] for i in range(4)]
    assert first == {"x": [1, 2, 3], "low": [0, 0, 0], "top": [1, 1, 2]}
    assert second == {"x": [1, 2, 3], "low": [1, 1, 2], "top": [1, 11, 12]}
    assert line is None and other == {"x": [1], "low": [0], "top": [5]}


def test_on_paper_the_report_is_light():
    style = (resources.files("dsx_monitor.report") / "assets" / "report.css").read_text()
    assert "@media screen and (prefers-color-scheme: dark)" in style and "(prefers-color-scheme: dark)" not in (
        style.replace("@media screen and (prefers-color-scheme: dark)", "")
    )
    assert "break-inside:avoid" in style[style.index("@media print") :]


def test_a_run_with_tensorboard_only_is_drawn_too(tmp_path):
    pytest.importorskip("tensorboard")
    writers = {"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "tb"}}
    with MonitorMaster(writers, rank=0) as monitor:
        monitor.write_events([("Train/Samples/train_loss", 4.0, 8), ("Train/Samples/train_loss", 2.0, 16)])
    (series,) = panels_by_title(write_report(tmp_path).read_text())["Loss"]["series"]
    assert (series["x"], series["y"]) == ([8, 16], [4.0, 2.0])


def test_a_framework_does_not_repeat_what_the_user_told(tmp_path):
    start_run(tmp_path, title="mine", world_size=2)
    start_run(tmp_path, title="the framework's", world_size=2, quiet=True)
    start_run(tmp_path, title="mine again", world_size=2)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["title"] == "mine again" and len(meta["starts"]) == 1
    assert meta["config"] == {}
    start_run(tmp_path, title="the framework's", config={"a": 1}, facts={"parameters": 5}, quiet=True)
    start_run(tmp_path, title="the framework's", config={"a": 2}, quiet=True)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert (meta["title"], meta["config"], meta["facts"]) == ("mine again", {"a": 1}, {"parameters": 5})
