"""`dsx-nvme tune`, `bench`, `explain`: what they print, write and refuse; the search on a made-up disk."""

import io
import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import dsx_nvme
import dsx_nvme.errors
import pytest
from dsx_nvme.cli import main
from dsx_nvme.tune import search
from dsx_nvme.tune.show import Progress, parse_size, size_text, svg_bars
from dsx_nvme.tune.space import DEFAULT, Setting, Space, read_space

SMALL = ["--io_size", "2M", "--seconds", "1"]


def test_tune_prints_and_writes_a_section(tmp_path, capsys):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 8, "aio": {"thread_count": 2, "queue_depth": 32}}))
    arguments = ["tune", "--nvme_dir", str(tmp_path / "d"), *SMALL, "--log_dir", str(tmp_path / "log"), "--verbose"]
    assert main([*arguments, "--config", str(config), "--update"]) == 0
    out = capsys.readouterr().out
    assert "Best performance (GB/sec): read = " in out and ", write = " in out
    section = json.loads(out[out.index("{\n") :])["aio"]
    assert set(section) == {"single_submit", "overlap_events", "intra_op_parallelism", "queue_depth", "block_size"}
    assert type(section["single_submit"]) is bool
    updated = json.loads(config.read_text())
    assert updated == {"train_batch_size": 8, "aio": section}
    dsx_nvme.AioConfig.from_dict({"aio": section}).handle().close()
    log = json.loads((tmp_path / "log" / "tune.json").read_text())
    assert log["aio"] == section and len(log["trials"]) > 1 and log["seconds"] > 0
    assert ElementTree.parse(tmp_path / "log" / "tune.svg").getroot().tag.endswith("svg")
    assert list((tmp_path / "d").iterdir()) == []


def test_tune_with_one_direction_a_sweep_file_and_every_setting(tmp_path, capsys):
    sweep = tmp_path / "sweep.json"
    sweep.write_text(
        '{"block_size": ["64K"], "queue_depth": [4, 8], "io_parallel": 1, "single_submit": ["false"], '
        '"sequential_requests": [false]}'
    )
    arguments = [
        "tune",
        "--nvme_dir",
        str(tmp_path),
        *SMALL,
        "--log_dir",
        str(tmp_path / "log"),
        "--sweep_config",
        str(sweep),
    ]
    assert main([*arguments, "--no_write", "--exhaustive", "--flush_page_cache"]) == 0
    out = capsys.readouterr().out
    assert (
        "write" not in out.split("Best performance")[1] and "exhaustive: bs64K qd" in out and "measured in turn" in out
    )


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--no_read", "--no_write"], "nothing to measure"), (["--update"], "needs --config"),
        (["--sweep_config", "none.json"], "none.json"), (["--seconds", "0"], "expected more than 0"),
    ],
)  # fmt: skip
def test_tune_says_what_is_wrong(arguments, word, tmp_path, capsys):
    assert main(["tune", "--nvme_dir", str(tmp_path), *arguments]) == 1
    assert word in capsys.readouterr().err


def test_sweep_files(tmp_path):
    path = tmp_path / "s.json"
    path.write_text('{"sequential_requests": [true, false], "block_size": ["1M", 4096, "1M"]}')
    space = read_space(str(path))
    assert space.values["overlap_events"] == (False, True) and space.values["block_size"] == (1 << 20, 4096)
    assert len(DEFAULT.all()) == 64 and len({s.name for s in DEFAULT.all()}) == 64
    for text in (
        '{"depth": [1]}',
        "[]",
        '{"single_submit": ["maybe"]}',
        '{"queue_depth": ["x"]}',
        '{"queue_depth": []}',
    ):
        path.write_text(text)
        with pytest.raises(dsx_nvme.errors.OptionError):
            read_space(str(path))


def made_up_disk(best: Setting, rng, seconds=0.25):
    """A disk whose speed falls with every dimension that is not the best one's, with 1 % of noise; and its clock."""
    now = [0.0]

    def measure(setting):
        now[0] += seconds
        wrong = sum(
            getattr(setting, n) != getattr(best, n)
            for n in ("threads", "queue_depth", "block_size", "overlap_events", "single_submit")
        )
        return {"read": (3 - 0.3 * wrong) * rng.gauss(1, 0.01), "write": (2 - 0.2 * wrong) * rng.gauss(1, 0.01)}

    return measure, lambda: now[0]


def test_the_guided_search_finds_the_best_in_its_time_with_fewer_trials():
    rng = random.Random(0)
    for best in rng.sample(DEFAULT.all(), 20):
        measure, clock = made_up_disk(best, rng)
        found = search.guided(DEFAULT, measure, start=Setting(), budget=15.0, tell=lambda part, note: None, clock=clock)
        assert found.best == best and found.seconds <= 15.0 and len(found.trials) < 32
        measure, clock = made_up_disk(best, rng)
        every = search.exhaustive(DEFAULT, measure, finish_seconds=5.0, tell=lambda part, note: None, clock=clock)
        assert every.best == best and len(every.trials) == 64 and every.seconds >= 16.0


def test_a_start_outside_the_space_is_moved_into_it():
    space = Space({**DEFAULT.values, "queue_depth": (64,)})
    assert space.nearest(Setting(queue_depth=100)).queue_depth == 64
    assert space.nearest(replace(Setting(), queue_depth=64)) == replace(Setting(), queue_depth=64)


@pytest.mark.parametrize("engine", ["aio_handle", "aio_basic", "torch_io", "torch_fastio"])
@pytest.mark.parametrize("read", [False, True])
def test_bench(engine, read, tmp_path, capsys):
    result, picture = tmp_path / "r.json", tmp_path / "p.svg"
    arguments = ["bench", "--folder", str(tmp_path / "d"), "--io_size", "1M", "--engine", engine, "--loops", "2"]
    arguments += ["--block_size", "64K", "--json", str(result), "--picture", str(picture)] + ["--read"] * read
    if engine.startswith("aio"):
        arguments += ["--validate", "--slow_bounce_buffer", "--different_file_each_iteration", "--include_warmup_time"]
    assert main(arguments) == 0
    out, word = capsys.readouterr().out, "Read" if read else "Write"
    assert f"Task {word} Latency = " in out and f"Task {word} Speed = " in out and f"E2E {word} Speed = " in out
    found = json.loads(result.read_text())
    assert found["op"] == word.lower() and len(found["task_speeds"]) == 2 and found["task_speed_gbps"] > 0
    assert bool(found["block_latency_us"]) == (engine == "aio_handle")
    assert ElementTree.parse(picture).getroot().tag.endswith("svg") and list((tmp_path / "d").iterdir()) == []


def test_bench_in_several_processes(tmp_path, capsys):
    assert main(["bench", "--folder", str(tmp_path), "--io_size", "256K", "--multi_process", "2", "--loops", "1"]) == 0
    assert "E2E Write Speed" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


def test_bench_names_a_process_that_died(tmp_path, capsys):
    arguments = ["bench", "--folder", str(tmp_path), "--io_size", "256K", "--multi_process", "2", "--loops", "100000"]
    codes = []
    runner = threading.Thread(target=lambda: codes.append(main(arguments)))
    runner.start()
    while len(multiprocessing.active_children()) < 2:
        time.sleep(0.01)
    child = multiprocessing.active_children()[0]
    child.kill()
    runner.join()
    assert codes == [1] and f"process {child.pid} ended without an answer, exit code -9" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--loops", "--multi_process", "--queue_depth", "--io_parallel"])
def test_bench_refuses_counts_of_nothing(option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--folder", str(tmp_path), "--io_size", "1M", option, "0"])
    assert option in capsys.readouterr().err


def test_bench_says_what_is_wrong(tmp_path, capsys):
    assert main(["bench", "--folder_to_device_mapping", "x", "--io_size", "1M"]) == 1
    assert "DIR:NUMBER" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["bench", "--folder", str(tmp_path / "file"), "--io_size", "1M"]) == 1
    assert "dsx-nvme bench: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "program, arguments, said",
    [
        ("ds_nvme_tune", ["--nvme_dir", "DIR", *SMALL, "--log_dir", "DIR/log"], "Best performance (GB/sec): read = "),
        ("ds_io", ["--folder", "DIR", "--io_size", "256K", "--loops", "1", "--read"], "Task Read Speed = "),
    ],
)
def test_the_second_names_of_the_programs(program, arguments, said, tmp_path):
    path = os.path.join(os.path.dirname(sys.executable), program)
    words = [word.replace("DIR", str(tmp_path)) for word in arguments]
    done = subprocess.run([path, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and said in done.stdout, done.stderr
    wrong = subprocess.run([path, "--nothing"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and f"usage: {program} " in wrong.stderr


def test_explain(tmp_path, capsys):
    assert main(["explain", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "native engines" in out and "cuFile" in out and f"{tmp_path}: engine " in out
    assert main(["explain", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["paths"][str(tmp_path)]["engine"] in found["engines"] or not found["native"]
    assert main(["explain", str(tmp_path / "none")]) == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "are required: {tune,bench,explain}"),
        (["--help"], 0, "measure reads and writes"),
        (["--version"], 0, f"dsx-nvme {dsx_nvme.__version__}"),
        (["tuna"], 2, "did you mean tune?"),
    ],
)
def test_the_command_itself(words, code, said, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code and said in "".join(capsys.readouterr())


def test_sizes_pictures_and_bars():
    assert [parse_size(t) for t in ("400M", "1g", "4096", "1.5K", "2MiB", 7)] == [
        400 << 20,
        1 << 30,
        4096,
        1536,
        2 << 20,
        7,
    ]
    assert [size_text(n) for n in (1 << 20, 4096, 100)] == ["1M", "4K", "100"]
    for wrong in ("", "M", "-1", "1.3"):
        with pytest.raises(ValueError):
            parse_size(wrong)
    assert "&lt;x&gt;" in svg_bars("<x>", [("a", [("read", 1.0)])], "GB/s")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    bar = Progress("tuning", terminal)
    bar.update(0.5, "half")
    bar.finish()
    assert "[##############..............]  50%" in terminal.getvalue() and terminal.getvalue().endswith("\n")
