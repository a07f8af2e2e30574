"""Whole searches, with a program that plays the engine: it needs no time, and the best configuration is known."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree

import pytest
from dsx.autotuning import Autotuner, AutotuningError, Job
from dsx.config import DsxConfigError, load_config

MICRO = "train_micro_batch_size_per_gpu"

# Reads its configuration, and answers as the engine would. Throughput rises with the micro-batch up to 8 and is best at
# stage 1; micro-batches above 16 do not fit. Words on the command line make it fail.
PROGRAM = """
import json, os, pathlib, sys, time
HERE = pathlib.Path(sys.argv[0]).parent
at = sys.argv.index("--deepspeed_config") + 1
config = json.loads(pathlib.Path(sys.argv[at]).read_text())
section = config["autotuning"]
folder = pathlib.Path(section["metric_path"]).parent
with open(HERE / "starts.log", "a") as log:
    log.write(folder.name + "\\n")
if "never" in sys.argv:
    sys.exit(0)
(folder / "started.json").write_text("{}")
stage, micro = config["zero_optimization"]["stage"], config["train_micro_batch_size_per_gpu"]
steps = config.get("gradient_accumulation_steps", 1)
first = "model_info" in section
if "all-oom" in sys.argv or micro > 16:
    sys.exit("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
if "crash" in sys.argv and stage == 2 and not first:
    sys.exit("[dsx] rank 1 failed on localhost (pid 7): ValueError: no stage 2 here")
if "hang" in sys.argv and stage == 2 and not first:
    time.sleep(600)
if "short" in sys.argv and stage == 2 and not first:
    sys.exit(0)
if "die" in sys.argv and not first and not (HERE / "died").exists():
    (HERE / "died").touch()
    os.kill(os.getppid(), 9)
    time.sleep(600)
ranks, batch = 2, micro * steps * 2
seconds = (0.2 + micro * steps * (0.1 if micro <= 8 else 0.2)) * {0: 1.1, 1: 1.0, 2: 1.2, 3: 1.5}[stage]
facts = {"num_params": 1000, "trainable_num_params": 1000, "activation_mem_per_gpu": 1000 * micro,
         "peak_bytes": 1000 * micro, "memory_bytes": 10**9, "device": "cpu", "world_size": ranks,
         "data_parallel": ranks, "ranks_per_host": ranks,
         "sixteen_bit": False, "step_seconds": seconds, "pass_seconds": seconds - 0.2, "flops_per_sample": 5e9}
if "no-flops" in sys.argv:
    del facts["flops_per_sample"]
if first:
    pathlib.Path(section["model_info_path"]).write_text(json.dumps(facts))
    if "plans" in sys.argv:
        asked = json.loads((folder / "candidates.json").read_text())
        plans = {one["key"]: [1000 * one["micro"] if one["micro"] <= 16 else 10**12, 0.5 + 0.1 * one["micro"]]
                 for one in asked}
        (folder / "plans.json").write_text(json.dumps({"plans": plans, "reason": ""}))
metrics = {"fwd": None, "bwd": None, "step": None, "latency": seconds, "throughput": batch / seconds,
           "peak_bytes": 1000 * micro}
(folder / "metrics.json.part").write_text(json.dumps(metrics))
os.replace(folder / "metrics.json.part", folder / "metrics.json")
"""


ENDED_FROM_OUTSIDE = {"hang", "die"}


class Ended:
    """The program has run in this process, and stands for a process of its own that has ended."""

    def __init__(self, args, err):
        before, sys.argv = sys.argv, [str(arg) for arg in args]
        try:
            exec(CODE, {"__name__": "__main__"})
            self.returncode = 0
        except SystemExit as end:
            self.returncode = int(isinstance(end.code, str)) if not isinstance(end.code, int) else end.code
            err.write(f"{end.code}\n".encode())
        finally:
            sys.argv = before

    def wait(self, timeout=None):
        return self.returncode

    def poll(self):
        return self.returncode


CODE = compile(PROGRAM, "train.py", "exec")


class Playground:
    """A folder with the program and its configuration."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "train.py").write_text(PROGRAM)
        self.said: list[str] = []
        self.ran: list[list[str]] = []

    def write(self, document=None, **section):
        config = {MICRO: 1, "zero_optimization": {"stage": "all"}, **(document or {})}
        if section:
            config["autotuning"] = {"enabled": True, "results_dir": str(self.folder / "results"),
                                    "exps_dir": str(self.folder / "exps"), **section}  # fmt: skip
        (self.folder / "dsx.json").write_text(json.dumps(config))

    def tuner(self, *words, ranks=2):
        args = ("--deepspeed_config", str(self.folder / "dsx.json"), *words)

        def start(args, out, err):
            command = [str(self.folder / "train.py"), *args]
            if not ENDED_FROM_OUTSIDE & set(words):
                return Ended(command, err)
            return subprocess.Popen([sys.executable, "-S", *command], stdout=out, stderr=err, cwd=self.folder)

        def job(nodes, devices):
            return Job(
                script=str(self.folder / "train.py"), args=args, world_size=devices or ranks,
                start=start, run=lambda args: self.ran.append(list(args)) or 0,
                shown=lambda args: " ".join(["run", *args]), say=self.said.append,
            )  # fmt: skip

        return Autotuner(args, job)

    @property
    def starts(self):
        log = self.folder / "starts.log"
        return log.read_text().split() if log.exists() else []

    def read(self, name):
        return (self.folder / "results" / name).read_text()


@pytest.fixture
def play(tmp_path):
    return Playground(tmp_path)


BEST = {"throughput": (1, 8), "FLOPS": (1, 8), "latency": (1, 1)}


@pytest.mark.parametrize(
    ("kind", "metric"),
    [("gridsearch", "throughput"), ("random", "latency"), ("model_based", "FLOPS"), ("model_based", "latency")],
)
def test_every_tuner_finds_the_best(play, kind, metric):
    sizes = [1, 8] if metric == "latency" else [8, 16]
    play.write(
        {MICRO: sizes, "zero_optimization": {"stage": [1, 2, 3]}},
        tuner_type=kind,
        metric=metric,
        tuner_early_stopping=0,
    )
    result = play.tuner("plans").tune()
    best = result.best
    assert (best.candidate.stage, best.candidate.micro) == BEST[metric]
    assert len(result.rows) == len(set(play.starts)) == len(play.starts)
    measured = [result.score(row) for row in result.rows]
    assert result.score(best) == max(measured)


def test_what_a_search_leaves(play):
    play.write({"optimizer": {"type": "Adam"}}, metric_path=str(play.folder / "best.json"),
               model_info_path=str(play.folder / "facts.json"), max_train_micro_batch_size_per_gpu=8)  # fmt: skip
    tuner = play.tuner("plans")
    result = tuner.tune()
    found = json.loads(play.read("ds_config_optimal.json"))
    assert found == {
        MICRO: 8,
        "zero_optimization": {"stage": 1},
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam"},
    }
    assert load_config(found, world_size=2).batch.train == 16
    assert (
        play.read("cmd_optimal.txt") == f"run --deepspeed_config {play.folder}/results/ds_config_optimal.json plans\n"
    )
    assert json.loads((play.folder / "best.json").read_text())["latency"] == result.best.outcome.metrics["latency"]
    assert json.loads((play.folder / "facts.json").read_text())["num_params"] == 1000
    summary = play.read("summary.txt")
    assert re.search(r"^tuning_space +num_experiments +best_metric_val +best_exp_name$", summary, re.MULTILINE)
    assert re.search(r"^z1 +\d+ +16 +z1_mbs8_gas1$", summary, re.MULTILINE)
    assert "The search ended" in summary and "times the first experiment" in summary
    data = json.loads(play.read("results.json"))
    assert data["best"] == "z1_mbs8_gas1" and len(data["experiments"]) == len(result.rows)
    assert {row["predicted_by"] for row in data["experiments"][1:]} == {"planner"}
    tree = xml.etree.ElementTree.fromstring(play.read("plot.svg"))
    dots = [one for one in tree.iter() if one.get("class") == "measured"]
    assert len(dots) == len(result.rows) and "http" not in play.read("plot.svg").replace(
        "http://www.w3.org/2000/svg", ""
    )
    folder = play.folder / "exps" / "z1_mbs8_gas1"
    assert {"ds_config.json", "command.txt", "metrics.json", "stdout.log", "stderr.log"} <= {
        p.name for p in folder.iterdir()
    }
    tuner.print_tuning_results()
    assert "Best: z1_mbs8_gas1" in play.said[-1]
    assert tuner.run_after_tuning() == 0
    assert play.ran == [["--deepspeed_config", f"{play.folder}/results/ds_config_optimal.json", "plans"]]


def test_a_second_search_starts_nothing_and_overwrite_starts_anew(play):
    play.write({"zero_optimization": {"stage": [1, 2]}}, max_train_micro_batch_size_per_gpu=4)
    first = play.tuner().tune()
    started = play.starts
    again = play.tuner().tune()
    assert play.starts == started and again == first
    play.write({"zero_optimization": {"stage": [1, 2]}}, max_train_micro_batch_size_per_gpu=4, overwrite=True)
    play.tuner().tune()
    assert play.starts == started * 2 and (play.folder / "results" / "journal.1.jsonl").exists()


def test_more_of_a_search_uses_what_there_is(play):
    stages = {"zero_optimization": {"stage": [1, 2]}}
    play.write(stages, max_train_micro_batch_size_per_gpu=4, num_tuning_micro_batch_sizes=1)
    play.tuner().tune()
    before = play.starts
    play.write(
        stages,
        max_train_micro_batch_size_per_gpu=4,
        num_tuning_micro_batch_sizes=3,
        tuner_type="gridsearch",
        metric="latency",
    )
    play.tuner().tune()
    assert len(play.starts) > len(before) and len(set(play.starts)) == len(play.starts)


def test_results_of_another_script_are_refused_and_stay(play):
    play.write(max_train_micro_batch_size_per_gpu=2)
    play.tuner().tune()
    kept = play.read("ds_config_optimal.json"), play.read("journal.jsonl")
    with pytest.raises(AutotuningError, match=r"another search .arguments"):
        play.tuner("more").tune()
    play.write({"gradient_clipping": 0.5}, max_train_micro_batch_size_per_gpu=2)
    with pytest.raises(AutotuningError, match=r"configuration gradient_clipping null there, 0.5 now"):
        play.tuner().tune()
    assert kept == (play.read("ds_config_optimal.json"), play.read("journal.jsonl"))


def test_a_trial_that_dies_is_named_and_the_search_goes_on(play):
    play.write(
        {"zero_optimization": {"stage": [1, 2]}, MICRO: [8, 4, 1]}, tuner_type="gridsearch", tuner_early_stopping=0
    )
    result = play.tuner("crash").tune()
    failed = [row for row in result.rows if row.outcome.metrics is None]
    assert {row.candidate.stage for row in failed} == {2} and len(failed) == 2
    assert all("exit code 1: [dsx] rank 1 failed on localhost" in row.outcome.reason for row in failed)
    assert result.best.name == "z1_mbs8_gas1"
    assert "no stage 2 here" in play.read("summary.txt")
    assert any("no stage 2 here" in line for line in play.said)


def test_a_trial_that_hangs_is_ended(play):
    play.write({"zero_optimization": {"stage": [1, 2]}, MICRO: [8, 4]}, tuner_type="gridsearch", trial_timeout=2)
    began = time.monotonic()
    result = play.tuner("hang").tune()
    hung = next(row for row in result.rows if row.candidate.stage == 2 and not row.first)
    assert "no end within 2 s (after initialize)" in hung.outcome.reason
    assert result.best.name == "z1_mbs8_gas1" and time.monotonic() - began < 60


def test_a_trial_that_ends_too_early_is_named(play):
    play.write({"zero_optimization": {"stage": [1, 2]}, MICRO: [8, 4]}, tuner_type="gridsearch")
    result = play.tuner("short").tune()
    assert any("ended before update autotuning.end_profile_step" in row.outcome.reason for row in result.rows)


def test_memory_that_runs_out_shuts_out_larger_micro_batches(play):
    play.write(
        {MICRO: [4, 32, 64, 128], "zero_optimization": {"stage": [0, 1]}},
        tuner_type="gridsearch",
        tuner_early_stopping=0,
    )
    result = play.tuner().tune()
    failed = [row for row in result.rows if row.outcome.out_of_memory]
    assert {row.candidate.micro for row in failed} == {32} and len(failed) == 2
    assert result.best.candidate.micro == 4


def test_plans_that_do_not_fit_are_never_tried(play):
    play.write(
        {"zero_optimization": {"stage": [0, 1]}},
        max_train_micro_batch_size_per_gpu=256,
        num_tuning_micro_batch_sizes=2,
        tuner_type="gridsearch",
    )
    result = play.tuner("plans").tune()
    assert not [row for row in result.rows if row.outcome.out_of_memory]
    assert {row.candidate.micro for row in result.rows[1:]} == {8, 16}
    assert "would need more than" in play.read("summary.txt")


def test_a_first_micro_batch_that_does_not_fit_gives_way_to_the_safest(play):
    play.write(
        {MICRO: 32, "zero_optimization": {"stage": [1, 3]}},
        max_train_micro_batch_size_per_gpu=32,
        num_tuning_micro_batch_sizes=9,
    )
    result = play.tuner().tune()
    assert play.starts[:2] == ["first_z3_mbs32_gas1", "first_z3_mbs1_gas1"]
    assert result.rows[0].candidate.micro == 1 and result.best.candidate.micro in (8, 16)


def test_nothing_fits(play):
    play.write({MICRO: 2}, max_train_micro_batch_size_per_gpu=2)
    with pytest.raises(
        AutotuningError, match=r"(?s)first experiment did not work.*out of memory.*smaller micro-batches"
    ):
        play.tuner("all-oom").tune()
    assert play.starts == ["first_z3_mbs2_gas1", "first_z3_mbs1_gas1"]
    with pytest.raises(AutotuningError):
        play.tuner("all-oom").tune()
    assert len(play.starts) == 4, "a first experiment that failed is tried again: the script may be mended"


def test_a_script_that_never_calls_initialize(play):
    play.write({MICRO: 2}, max_train_micro_batch_size_per_gpu=2)
    with pytest.raises(
        AutotuningError, match=r"ended without calling dsx.initialize with the configuration it was given"
    ):
        play.tuner("never").tune()
    assert len(play.starts) == 1


def test_operations_that_were_not_counted(play):
    play.write(metric="flops")
    with pytest.raises(AutotuningError, match="operations of this program could not be counted"):
        play.tuner("no-flops").tune()


def test_a_tuner_that_is_killed_goes_on(play):
    play.write({"zero_optimization": {"stage": [1, 2]}, MICRO: [2, 8]}, tuner_type="gridsearch")
    code = f"""
import sys
sys.path[:0] = {[*sys.path, os.path.dirname(__file__)]!r}
from pathlib import Path
from test_autotuning_search import Playground
Playground.write = None
play = Playground(Path({str(play.folder)!r}))
play.tuner("die").tune()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(play.starts) == 2  # the first experiment, and the one that took the tuner with it
    result = play.tuner("die").tune()
    assert play.starts.count(play.starts[0]) == 1 and play.starts.count(play.starts[1]) == 2
    assert len(result.rows) == 4 and result.best.name == "z1_mbs8_gas1"


def test_batch_sizes_on_the_command_line_follow(play):
    play.write({MICRO: "auto", "train_batch_size": "auto"}, max_train_micro_batch_size_per_gpu=8,
               arg_mappings={MICRO: "--per_device_train_batch_size",
                             "gradient_accumulation_steps": "--accumulate"})  # fmt: skip
    result = play.tuner("--per_device_train_batch_size", "4").tune()
    assert result.rows[0].candidate.micro == 4, "the command line's size is where the search begins"
    command = (play.folder / "exps" / result.best.name / "command.txt").read_text()
    assert "--per_device_train_batch_size 8 --accumulate 1" in command
    assert "--per_device_train_batch_size 8" in play.read("cmd_optimal.txt")
    assert json.loads(play.read("ds_config_optimal.json"))["train_batch_size"] == "auto"


def test_a_global_batch_is_in_the_result(play):
    play.write({"train_batch_size": 32, "zero_optimization": {"stage": 1}}, tuner_early_stopping=0)
    play.tuner().tune()
    found = json.loads(play.read("ds_config_optimal.json"))
    assert found["train_batch_size"] == 32 == found[MICRO] * found["gradient_accumulation_steps"] * 2


def test_fewer_devices_for_the_search(play):
    play.write(num_gpus=1, max_train_micro_batch_size_per_gpu=1)
    assert "on 1 ranks" in play.tuner().describe()
    play.write(mp_size=2, max_train_micro_batch_size_per_gpu=1)
    assert play.tuner()._ranks == 1


def test_combinations_that_a_configuration_cannot_have_are_left_out(play):
    play.write({"zero_optimization": {"stage": "all", "offload_optimizer": {"device": ["none", "cpu"]}}, MICRO: [1]})
    play.write({"zero_optimization": {"stage": [1, 0], "offload_optimizer": {"device": ["none", "cpu"]}}, MICRO: [1]},
               tuner_type="gridsearch")  # fmt: skip
    result = play.tuner().tune()
    assert len(result.rows) == 3 and "Left out: 1 combinations" in play.read("summary.txt")


@pytest.mark.parametrize(
    ("document", "section", "error", "text"),
    [
        ({}, {"enabled": False}, AutotuningError, "enabled: got false"),
        ({"elasticity": {"enabled": True}}, {"fast": True}, AutotuningError, "both choose the batch sizes"),
        ({}, {"mp_size": 3}, AutotuningError, "mp_size: got 3 for 2 ranks"),
        ({}, {"metric": "speed"}, DsxConfigError, "autotuning.metric"),
        ({}, {"end_profile_step": 2}, DsxConfigError, "autotuning.end_profile_step: it is below"),
        (
            {},
            {"metric": "FLOPS", "start_profile_step": 1},
            DsxConfigError,
            "operations are counted in the first update",
        ),
        (
            {},
            {"max_train_micro_batch_size_per_gpu": 1, "min_train_micro_batch_size_per_gpu": 2},
            DsxConfigError,
            "below",
        ),
        ({}, {"tuner_typ": "random"}, DsxConfigError, "tuner_type"),
        ({"gradient_cliping": 1}, {"fast": True}, DsxConfigError, "gradient_clipping"),
        ({"zero_optimization": {"stage": 7}}, {"fast": True}, AutotuningError, "got 7"),
    ],
)
def test_mistakes_are_named_before_anything_starts(play, document, section, error, text):
    play.write(document, **section)
    with pytest.raises(error, match=text):
        play.tuner().tune()
    assert play.starts == [] and not (play.folder / "results" / "journal.jsonl").exists()
