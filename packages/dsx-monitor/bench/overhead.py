"""What watching costs: events without a backend, with all local ones, the profiled step, the import.

    python packages/dsx-monitor/bench/overhead.py [events|writers|comet|wandb|profile|import ...] [--json FILE]

Costs are CPU time of the process (all threads), medians of interleaved rounds, so that a busy machine disturbs them
little. Each line has its goal beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from dsx_testkit.results import Table, add_json_option

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "dsx" / "examples"))


def engine(**changes: Any) -> Any:
    import dsx

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": None,
        **changes,
    }
    return dsx.initialize(model=torch.nn.Linear(8, 8), config=config)[0]


def observing(built: Any, steps: int = 2000) -> float:
    """Microseconds that an engine's hooks and observers take per step, called with a real step's report."""
    x = torch.randn(2, 8)
    loss = built(x).mean()
    built.backward(loss)
    built.step()
    parts, report = built._parts, built.last_step

    def watch() -> None:
        for hook in parts.hooks:
            hook.before_forward((x,), {})
        with parts.clock.range("forward"):
            pass
        for hook in parts.hooks:
            hook.before_backward(loss, True)
        with parts.clock.range("backward"):
            pass
        for hook in parts.hooks:
            hook.before_update()
        with parts.clock.range("step"):
            pass
        for observer in parts.observers:
            observer.after_step(report)

    rounds = []
    for _ in range(7):
        start = time.process_time()
        for _ in range(steps):
            watch()
        rounds.append((time.process_time() - start) / steps * 1e6)
    return median(rounds)


def events(table: Table) -> None:
    from dsx_monitor import MonitorMaster

    monitor = MonitorMaster({}, rank=0)
    batch = [(f"Train/Samples/{i}", float(i), 1) for i in range(12)]
    rounds = []
    for _ in range(7):
        start = time.process_time()
        for _ in range(20000):
            monitor.write_events(batch)
        rounds.append((time.process_time() - start) / 20000 * 1e6)
    table.add("write_events of 12 events, no backend", f"{median(rounds):.2f} us", "<= 20 us")
    table.add(
        "engine: all hooks and observers of a step, nothing configured", f"{observing(engine()):.2f} us", "<= 20 us"
    )
    breakdown = observing(engine(wall_clock_breakdown=True))
    table.add("engine: with wall_clock_breakdown, no backend", f"{breakdown:.2f} us", "<= 20 us")


def writers(table: Table) -> None:
    """Steps that sleep 50 ms, with 16 events each: the rest of the process' CPU time is the writing, all threads."""
    for names in (("jsonl",), ("csv_monitor",), ("tensorboard",), ("tensorboard", "csv_monitor", "jsonl")):
        quiet, _ = _sleeping((), 60)
        spent, held = _sleeping(names, 100)
        share = 100 * (spent - quiet) / 0.050
        table.add(f"16 events a step to {', '.join(names)}: CPU time of all threads, share of a step of 50 ms",
                  f"{share:.2f} % ({(spent - quiet) * 1e6:.0f} us; write_events returns after {held * 1e6:.0f} us)",
                  "<= 1 %")  # fmt: skip


def comet(table: Table) -> None:
    """The same to Comet's offline archive: every value, and with the default of one value per label in 100 samples."""
    for interval, what in ((1, "every value sent"), (100, "a label once in 100 samples, the default")):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["COMET_OFFLINE_DIRECTORY"] = folder
            section = {"enabled": True, "online": False, "samples_log_interval": interval}
            quiet, _ = _sleeping((), 60)
            # Comet describes the machine and its packages when an experiment begins: half a second once, not per step.
            spent, _ = _sleeping((), 100, {"comet": section}, settle=6.0)
        share = 100 * (spent - quiet) / 0.050
        table.add(f"16 events a step to Comet, offline, {what}",
                  f"{share:.2f} % ({(spent - quiet) / 16 * 1e6:.0f} us per event)", "<= 1 %")  # fmt: skip


def wandb(table: Table) -> None:
    """The same to W&B's offline run. Its service writes in a process of its own, which is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(WANDB_MODE="offline", WANDB_DIR=folder, WANDB_SILENT="true")
        quiet, _ = _sleeping((), 60)
        spent, _ = _sleeping((), 100, {"wandb": {"enabled": True, "project": "overhead"}}, settle=6.0)
    table.add(
        "16 events a step to W&B, offline, without its service process",
        f"{100 * (spent - quiet) / 0.050:.2f} %",
        "<= 1 %",
    )


def _sleeping(
    names: tuple[str, ...], steps: int, more: dict[str, Any] | None = None, settle: float = 0.0
) -> tuple[float, float]:
    """CPU seconds of the process per step, and the median length of `write_events`."""
    from dsx_monitor import MonitorMaster

    with tempfile.TemporaryDirectory() as folder:
        config = {name: {"enabled": True, "output_path": folder, "job_name": name} for name in names} | (more or {})
        with MonitorMaster(config, rank=0) as monitor:
            labels = [f"Train/Samples/value_{i}" for i in range(16)]
            monitor.write_events([(label, 0.5, 0) for label in labels], flush=True)
            time.sleep(settle)
            held = []
            start = time.process_time()
            for step in range(1, steps + 1):
                began = time.perf_counter()
                monitor.write_events([(label, 0.5 * step, step) for label in labels])
                held.append(time.perf_counter() - began)
                time.sleep(0.050)
            return (time.process_time() - start) / steps, median(held)


def _paired(first: Callable[[], None], second: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Median CPU seconds of both, taken in turns."""
    spent: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        order = ((0, first), (1, second)) if number % 2 else ((1, second), (0, first))
        for place, work in order:
            start = time.process_time()
            work()
            spent[place].append(time.process_time() - start)
    return median(spent[0]), median(spent[1])


def _bare(step: Callable[[], None], rounds: int) -> tuple[float, int]:
    """CPU seconds of a step under a mode that only passes operators on, and how many they are.

    Counting at dispatch cannot cost less.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passes(TorchDispatchMode):
        count = 0

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    def watched() -> None:
        with mode:
            step()

    mode = Passes()
    watched()
    operators = mode.count
    return _paired(watched, watched, rounds)[0], operators


def profile(table: Table) -> None:
    from dsx_monitor import FlopsProfiler
    from gpt import GPT, GPTConfig

    torch.set_num_threads(1)
    for name, config, batch in (
        ("GPT of 0.2 M parameters, 2 x 32 tokens", GPTConfig(layers=4, width=64, heads=4, context=32), 2),
        ("GPT of 1.4 M parameters, 8 x 128 tokens", GPTConfig(), 8),
        ("GPT of 19 M parameters, 4 x 128 tokens", GPTConfig(layers=6, width=512, heads=8), 4),
    ):
        model, tokens = GPT(config), torch.randint(0, 256, (batch, config.context))

        def step(model: Any = model, tokens: Any = tokens) -> None:
            model.zero_grad()
            model(tokens, tokens).backward()

        profiler = FlopsProfiler(model)

        def profiled(step: Any = step, profiler: Any = profiler) -> None:
            profiler.start_profile()
            step()
            profiler.stop_profile()

        step()
        profiled()
        rounds = {2: 60, 8: 7, 4: 5}[batch]
        plain, watched = _paired(step, profiled, rounds=rounds)
        table.add(f"profiled step, {name}", f"{watched / plain:.2f}x of {plain * 1e3:.0f} ms", "<= 1.5x")
        if batch == 2:
            bare, operators = _bare(step, rounds)
            table.add(
                f"the same under a dispatch mode that does nothing, {operators} operators", f"{bare / plain:.2f}x", ""
            )
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    table.add("profiler off: hooks and modes left", str(hooks), "0")


def imports(table: Table) -> None:
    rounds: list[float] = []
    code = "import time; s = time.process_time(); import dsx_monitor; print(time.process_time() - s)"
    for _ in range(15):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        rounds.append(float(done.stdout) * 1e3)
    table.add("import dsx_monitor", f"{median(rounds):.1f} ms", "< 30 ms")


def main() -> None:
    parts: dict[str, Callable[[Table], None]] = {
        "events": events,
        "writers": writers,
        "comet": comet,
        "wandb": wandb,
        "profile": profile,
        "import": imports,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(parts)} (default: all)")
    add_json_option(parser)
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in parts]
    if unknown:
        parser.error(f"got the part {unknown[0]!r}, expected some of {', '.join(parts)}")
    table = Table({"what": "", "cost": "", "goal": ""})
    for name in options.parts or parts:
        parts[name](table)
    table.save(options.json)


if __name__ == "__main__":
    main()
