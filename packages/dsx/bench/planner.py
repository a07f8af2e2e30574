"""How right the planner is, in three parts, each with its goal beside the figure. Without words all three are taken.

    python packages/dsx/bench/planner.py [real] [published] [wide] [--small] [--json FILE]

`real`: this machine is calibrated, then 18 configurations of a small GPT run on two processes (stages, micro-batches,
accumulation, optimizer states in host memory). Printed are predicted over measured step times, their median error and
the rank correlation. A few minutes; nothing else should run.

`published`: the rows are those of MosaicML's table "H100 80GB BF16" (llm-foundry,
scripts/train/benchmarking/README.md): MPT models, FSDP's FULL_SHARD, 8 devices a host, with micro-batch, accumulation,
recomputation and tokens per second and device. Every row is replayed once at ZeRO stage 3; the five constants are then
searched on the even rows and judged on the odd ones. A few minutes.

`wide`: a 405 B model at 1024 ranks, and how long its plan takes. About a minute.

`--small`: four configurations, four rows, only to see that it runs. With `--json FILE` each part writes its table to a
file of its own, `FILE-real.json` and so on for `FILE.json`.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from dsx.planned import PlannedEngine
from dsx.planning import Constants, Machine, plan
from dsx_plan.configs import ready
from dsx_plan.cost import simulate
from dsx_plan.replay import MOST_MICRO_BATCHES, Question, Replay, replay
from dsx_testkit import run_ranks
from dsx_testkit.benches import GPT, batch, run_parts
from dsx_testkit.results import Table
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 50368
SIZES = {
    "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40),
    "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
"""Width, layers, heads. With biases, learned positions and tied embeddings they have the table's parameter counts."""


@dataclass(frozen=True)
class Row:
    """A line of the published table."""

    model: str
    length: int
    devices: int
    micro: int
    accumulation: int
    recomputes: bool
    tokens_per_second: float  # of each device


ROWS = (
    Row("760m", 2048, 8, 24, 2, False, 63147),
    Row("760m", 4096, 8, 12, 2, False, 55459),
    Row("1b", 2048, 8, 14, 1, False, 45455),
    Row("1b", 8192, 8, 3, 4, False, 29157),
    Row("1b", 2048, 64, 20, 1, False, 44402),
    Row("1b", 512, 8, 56, 4, False, 52275),
    Row("3b", 2048, 16, 10, 3, False, 24142),
    Row("3b", 2048, 64, 6, 3, False, 22525),
    Row("3b", 8192, 8, 3, 6, False, 16578),
    Row("3b", 1024, 8, 20, 6, False, 27046),
    Row("7b", 2048, 8, 6, 1, False, 10643),
    Row("7b", 4096, 8, 16, 2, True, 8611),
    Row("7b", 8192, 8, 8, 2, True, 6935),
    Row("13b", 2048, 8, 2, 1, False, 4792),
    Row("13b", 4096, 8, 10, 3, True, 4717),
    Row("13b", 2048, 64, 2, 1, False, 4800),
    Row("30b", 2048, 32, 14, 3, True, 2308),
    Row("30b", 4096, 8, 1, 21, True, 1802),
    Row("70b", 2048, 64, 8, 4, True, 1039),
    Row("30b", 2048, 8, 3, 21, True, 2002),
)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.mix(self.first(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class MPT(nn.Module):
    def __init__(self, row: Row) -> None:
        super().__init__()
        width, layers, heads = SIZES[row.model]
        self.again = row.recomputes
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(row.length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), tokens.flatten())


def settings(row: Row) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": row.micro,
        "gradient_accumulation_steps": row.accumulation,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }


def replayed(row: Row) -> Replay:
    prepared = ready(settings(row), row.devices, PlannedEngine())
    steps = min(row.accumulation, MOST_MICRO_BATCHES)
    question = Question(
        engine=PlannedEngine(), make=lambda: MPT(row),
        config={**prepared.config, "gradient_accumulation_steps": steps},
        world_size=row.devices, rank=0, ranks_per_host=8, batch=torch.zeros(row.micro, row.length, dtype=torch.int64),
        micro=row.micro, accumulation=row.accumulation,
    )  # fmt: skip
    return replay(question)


def predicted(row: Row, found: Replay, machine: Machine) -> float:
    """Tokens per second and device."""
    timing = simulate(found.trace, found.segments, machine, ranks_per_host=8)
    return row.micro * row.accumulation * row.length / timing.step


def error(rows: list[tuple[Row, Replay]], machine: Machine) -> float:
    shares = [predicted(row, found, machine) / row.tokens_per_second for row, found in rows]
    return statistics.fmean(abs(share - 1.0) for share in shares)


def fitted(rows: list[tuple[Row, Replay]], machine: Machine) -> Machine:
    """The constants with the least mean error, one after the other, three times round."""
    best = machine
    choices = {
        "products": [0.45 + 0.025 * i for i in range(20)],
        "memory": [0.4 + 0.05 * i for i in range(13)],
        "links": [0.3 + 0.1 * i for i in range(8)],
        "operator_seconds": [0.0, 1e-6, 2e-6, 4e-6, 8e-6],
        "message_seconds": [2e-6, 5e-6, 1e-5, 2e-5, 5e-5],
    }
    for _ in range(2):
        for name, values in choices.items():
            tried = [replace(best, constants=replace(best.constants, **{name: value})) for value in values]
            best = min([best, *tried], key=lambda found: error(rows, found))
    return best


def correlation(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation."""

    def ranks(values: list[float]) -> list[int]:
        return [sorted(values).index(value) for value in values]

    return statistics.correlation(ranks(a), ranks(b))


def wide(small: bool) -> Table:
    """A large plan, which takes its minute when `small` too."""
    import json
    import tempfile
    from pathlib import Path

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248,
        "num_attention_heads": 128, "num_key_value_heads": 8, "num_hidden_layers": 126, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip
    row = Row("405b", 8192, 1024, 1, 1, True, 0)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        start, cpu = time.perf_counter(), time.process_time()
        found = plan(
            folder, settings(row), world_size=1024, machine="H100-SXM", sequence=8192, recompute=True, changes=False
        )
        took, cpu = time.perf_counter() - start, time.process_time() - cpu
    columns = {"parameters, B": "{:.1f}", "ranks": "", "planned in s": "{:.1f}", "s of one core": "{:.1f}"}
    planned = {"peak, GiB": "{:.1f}", "s per step": "{:.1f}", "MFU": "{:.1%}"}
    table = Table({**columns, **planned}, "wide")
    table.add(found.parameters / 1e9, 1024, took, cpu, found.peak_bytes / 2**30, found.step_seconds, found.mfu)
    table.goal("planned in 60 s of one core", f"{cpu:.1f} s", met=cpu <= 60)
    return table


# - Against real runs

REAL = {"width": 256, "layers": 4, "heads": 4}
LENGTH, WARM_UP, UPDATES = 128, 4, 5


def real_cases() -> dict[str, dict[str, Any]]:
    """Configurations that differ in what a planner must tell apart."""
    found: dict[str, dict[str, Any]] = {}
    for stage in (0, 1, 2, 3):
        for micro, accumulation in ((2, 1), (8, 1), (2, 4), (16, 1)):
            found[f"stage {stage}, {micro} x {accumulation}"] = real_case(micro, accumulation, stage=stage)
    host = {"device": "cpu"}
    found["stage 2, 4 x 2, states in host memory"] = real_case(4, 2, stage=2, offload_optimizer=host)
    found["stage 3, 4 x 2, all in host memory"] = real_case(4, 2, stage=3, offload_optimizer=host, offload_param=host)
    return found


def real_case(micro: int, accumulation: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }


def measured(rank: int, world: int, cases: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds of an update by case, the median of some; both ranks begin and end together."""
    import dsx

    torch.set_num_threads(1)
    found = {}
    for name, config in cases.items():
        torch.manual_seed(0)
        engine, *_ = dsx.initialize(model=GPT(**REAL), config=copy.deepcopy(config))
        accumulation, times = config["gradient_accumulation_steps"], []
        data = [batch(i, rank, config["train_micro_batch_size_per_gpu"], LENGTH) for i in range(accumulation)]
        for _ in range(WARM_UP + UPDATES):
            dsx.comm.barrier()
            began = time.perf_counter()
            for ids, targets in data:
                engine.backward(engine(ids, targets))
                engine.step()
            dsx.comm.barrier()
            times.append(time.perf_counter() - began)
        engine.destroy()
        found[name] = statistics.median(times[WARM_UP:])
        if rank == 0:
            sys.stderr.write(f"{name}: {1e3 * found[name]:.1f} ms\n")
    return found


def real(small: bool) -> Table:
    """Plans of small configurations beside what they take on this machine."""
    from dsx_plan.calibrate import calibrate

    torch.set_num_threads(1)  # as each rank has one
    cases = real_cases()
    if small:
        cases = dict(list(cases.items())[::5])
    machine = calibrate(report=lambda text: sys.stderr.write(f"calibrating: {text}\n"))
    # Without a group: dsx.initialize makes the one that the launcher's ranks get.
    times = run_ranks(measured, 2, cases, backend=None, timeout=1800)[0]
    said = {}
    for name, config in cases.items():
        example = batch(0, 0, config["train_micro_batch_size_per_gpu"], LENGTH)
        found = plan(lambda: GPT(**REAL), config, world_size=2, machine=machine, batch=example, changes=False)
        said[name] = found.step_seconds
    print(f"\n{machine.name}: {machine.constants}\n")
    columns = {"measured ms": "{:.1f}", "predicted ms": "{:.1f}", "predicted / measured": "{:.3f}"}
    table = Table({"configuration on two processes": "", **columns}, "real")
    for name, seconds in times.items():
        table.add(name, 1e3 * seconds, 1e3 * said[name], said[name] / seconds)
    errors = [abs(said[name] / seconds - 1.0) for name, seconds in times.items()]
    judge(table, "step time", errors, correlation(list(times.values()), [said[name] for name in times]))
    return table


def judge(table: Table, what: str, errors: list[float], correlated: float) -> None:
    """The two goals of step times. `errors`: relative ones."""
    middle = statistics.median(errors)
    found = f"{middle:.1%}, {max(errors):.1%} at most"
    table.goal(f"{what} within 10 % in the median", found, met=middle <= 0.1)
    table.goal(f"{what}: rank correlation 0.9", f"{correlated:.3f}", met=correlated >= 0.9)


def published(small: bool) -> Table:
    """Plans beside a published table, on the half that was not used to fit the constants."""
    rows = ROWS[2:6] if small else ROWS
    pairs = []
    for row in rows:
        start = time.process_time()
        pairs.append((row, replayed(row)))
        sys.stderr.write(f"{row.model} {row.length}: {time.process_time() - start:.1f} s\n")
    machine = fitted(pairs[::2], Machine.named("H100-SXM"))
    shares = [predicted(row, found, machine) / row.tokens_per_second for row, found in pairs]
    print(f"\nconstants fitted on the even rows: {machine.constants}; the table has {Constants()}\n")
    columns = {"model": "", "length": "", "devices": "", "published tokens/s/device": ""}
    table = Table({**columns, "predicted / published": "{:.3f}", "used to fit": ""}, "published")
    for place, ((row, _), share) in enumerate(zip(pairs, shares)):
        table.add(row.model, row.length, row.devices, row.tokens_per_second, share, "no" if place % 2 else "yes")
    fitting = [abs(share - 1.0) for share in shares[::2]]
    print(f"fitted half: median error {statistics.median(fitting):.1%}, largest {max(fitting):.1%}")
    given = [row.tokens_per_second for row, _ in pairs[1::2]]
    said = [share * row.tokens_per_second for (row, _), share in zip(pairs[1::2], shares[1::2])]
    judge(table, "the half that was not fitted", [abs(share - 1.0) for share in shares[1::2]], correlation(given, said))
    return table


if __name__ == "__main__":
    run_parts({"real": real, "published": published, "wide": wide}, __doc__)
