"""What the simulated device costs: its build, a step of a GPT against the CPU, a test of dsx with its imports,
and the sample of dsx in the suite. All parts together take about three minutes on two free cores.

    python packages/dsx-simcuda/bench/simulator.py [build|step|test|sample ...] [--small] [--json FILE]

Everything that is timed runs in processes of its own, so that this one needs no device. With `--json FILE` each part
goes to a file of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from dsx_testkit.benches import run_parts
from dsx_testkit.results import Table

WIDTH, LAYERS, HEADS, LENGTH, MICRO = 256, 4, 4, 128, 4
ROUNDS = 3

TRAINING = """
import json, sys, time
import torch
from dsx_testkit.benches import GPT, batch

width, layers, heads, length, micro, steps = json.loads(sys.argv[1])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = GPT(width=width, layers=layers, heads=heads, length=length).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids, targets = (t.to(device) for t in batch(0, 0, size=micro, length=length))
seconds = []
for _ in range(steps):
    began = time.perf_counter()
    loss = model(ids, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
    seconds.append(time.perf_counter() - began)
print(json.dumps(seconds[steps // 3 :]))
"""

FOUR_STEPS = """
import torch, dsx

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
engine = dsx.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
})[0]
for _ in range(4):
    loss = engine(torch.ones(2, 32, device=engine.device)).mean()
    engine.backward(loss)
    engine.step()
print(loss.item())
"""


def run(*arguments: str, simulated: bool, mode: str = "eager", **more: str) -> tuple[str, float]:
    """What a program printed, and the seconds that its process took. Raises CalledProcessError where it failed."""
    start = [sys.executable, *(["-m", "dsx_simcuda", "--mode", mode] if simulated else [])]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    began = time.perf_counter()
    done = subprocess.run([*start, *arguments], env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout, time.perf_counter() - began


def build(small: bool) -> Table:
    """The native library, once, into an empty cache."""
    table = Table({"round": "", "seconds": "{:.1f}"}, "build")
    with tempfile.TemporaryDirectory() as cache:
        found = run("--build", simulated=True, DSX_SIMCUDA_CACHE=cache)[1]
    table.add(1, found)
    table.goal("build in at most 60 s on two cores", f"{found:.1f} s on {os.cpu_count()} cores", met=found <= 60)
    return table


def step(small: bool) -> Table:
    """A step of a GPT of width 256, in turns on the CPU and on the device, eager and with random delays."""
    shape = [64, 2, 2, 32, 2, 3] if small else [WIDTH, LAYERS, HEADS, LENGTH, MICRO, 12]
    seconds: dict[str, list[float]] = {"CPU": [], "eager": [], "random": []}
    for _ in range(1 if small else ROUNDS):
        for name, found in seconds.items():
            said, _ = run("-c", TRAINING, json.dumps(shape), simulated=name != "CPU", mode=name)
            found.append(median(json.loads(said.splitlines()[-1])))
    table = Table({"where": "", "ms per step": "{:.1f}", "of the CPU's": "{:.2f}x"}, "step")
    cpu = median(seconds["CPU"])
    for name, found in seconds.items():
        table.add(f"simulated, {name}" if name != "CPU" else name, median(found) * 1e3, median(found) / cpu)
    ratio = median(seconds["random"]) / cpu
    table.goal(
        "a step of a GPT with d = 256 takes at most 3 times its time on the CPU", f"{ratio:.2f}x", met=ratio <= 3
    )
    return table


def test(small: bool) -> Table:
    """A program of dsx with its imports: four steps at stage 3 on one rank."""
    run("--build", simulated=True)
    seconds = [run("-c", FOUR_STEPS, simulated=True, mode="random")[1] for _ in range(1 if small else ROUNDS)]
    table = Table({"round": "", "seconds": "{:.2f}"}, "test")
    for number, found in enumerate(seconds):
        table.add(number + 1, found)
    table.goal("four steps of dsx with imports in at most 4 s", f"{median(seconds):.2f} s", met=median(seconds) <= 4)
    return table


def sample(small: bool) -> Table:
    """The cases of dsx that the ordinary suite runs on the device. `small`: they are only collected."""
    run("--build", simulated=True)
    file = str(Path(__file__).resolve().parents[3] / "tests/device/test_device_matrix.py")
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "sample", *(["--collect-only"] if small else [])]
    said, seconds = run(*arguments, file, simulated=False)
    table = Table({"what": "", "seconds": "{:.0f}"}, "sample")
    table.add(said.strip().splitlines()[-1], seconds)
    table.goal("the sample of dsx in at most 240 s", f"{seconds:.0f} s", met=seconds <= 240)
    return table


if __name__ == "__main__":
    run_parts({"build": build, "step": step, "test": test, "sample": sample}, __doc__)
