"""How right the planner is, in parts, each with its goal beside the figure. Without words all are taken.

    python packages/dsx/bench/planner.py [real] [published] [layouts] [stages] [claims] [fit] [wide] [deep] [--small]
        [--json FILE]

`real`: this machine is calibrated, then 18 configurations of a small GPT run on two processes (stages, micro-batches,
accumulation, optimizer states in host memory). Printed are predicted over measured step times, their median error and
the rank correlation. A few minutes; nothing else should run.

`published`: the rows of `_published_rows.py`, planned with the constants that `dsx plan` has for their device. Judged
are the rows of models and sources to which these constants were not fitted. A few minutes.

`layouts`: the rows of `_published_layouts.py` without pipelines (FP8, compiled blocks, context, tensor and expert
parallelism, peaks of memory), planned as `dsx plan` plans them. No constant of the table is fitted to them but one,
which its row says. A row that cannot be planned stands there with its reason. Ten minutes.

`stages`: the rows with pipelines: 70B, 175B, 405B, DeepSeek-V3, Qwen3 235B, up to 12,288 devices. Minutes for a row.

`claims`: the models that ZeRO-Offload and ZeRO-Infinity report to train: do their plans fit? A minute.

`fit`: the constants of a device, fitted to the rows that are marked for it: what `dsx_plan/devices.py` has. It starts
with the constants of the table and moves one after the other. A few minutes.

`wide`: a 405 B model at 1024 ranks, and how long its plan takes. About a minute.

`deep`: 10^12 parameters in 10^5 tensors over 10,000 ranks, planned by blocks that are alike. Under a minute.

`--small`: four configurations, four rows, only to see that it runs. With `--json FILE` each part writes its table to a
file of its own, `FILE-real.json` and so on for `FILE.json`.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from _published_claims import CLAIMS, in_folder, llama
from _published_layouts import LAYOUTS, Layout, family, planned
from _published_rows import ROWS, Row, example, maker, settings
from dsx.planning import Constants, Machine, PlanError, plan
from dsx_plan.configs import ready
from dsx_plan.cost import simulate, stragglers
from dsx_plan.engine import engine_to_plan
from dsx_plan.replay import MOST_MICRO_BATCHES, Question, Replay, replay
from dsx_testkit import run_ranks
from dsx_testkit.benches import GPT, batch, run_parts
from dsx_testkit.results import Table


def replayed(row: Row) -> Replay:
    prepared = ready(settings(row), row.devices, engine_to_plan())
    steps = min(row.accumulation, MOST_MICRO_BATCHES)
    question = Question(
        engine=engine_to_plan(), make=maker(row), config={**prepared.config, "gradient_accumulation_steps": steps},
        world_size=row.devices, rank=0, ranks_per_host=8, batch=example(row), micro=row.micro,
        accumulation=row.accumulation,
    )  # fmt: skip
    start = time.process_time()
    found = replay(question)
    sys.stderr.write(f"{row.model} {row.length}: {time.process_time() - start:.1f} s\n")
    return found


def predicted(row: Row, found: Replay, machine: Machine) -> float:
    """Tokens per second and device, over the published ones."""
    timing = simulate(found.trace, found.segments, machine, ranks_per_host=8)
    seconds = timing.step * (1.0 + stragglers(machine, row.devices))
    return row.micro * row.accumulation * row.length / seconds / row.tokens_per_second


def fitted(rows: list[tuple[Row, Replay]], machine: Machine) -> Machine:
    """The constants with the least mean square of the logarithm: each is moved in turn, by less and less."""

    def loss(constants: Constants) -> float:
        tried = replace(machine, constants=constants)
        return statistics.fmean(math.log(predicted(row, found, tried)) ** 2 for row, found in rows)

    best = machine.constants
    least, step = loss(best), 0.2
    while step > 0.01:
        moved = False
        for name, most in (("products", 1.0), ("memory", 1.0), ("attention", 1.0), ("interference", 0.5)):
            for factor in (1.0 + step, 1.0 / (1.0 + step)):
                tried = replace(best, **{name: min(most, getattr(best, name) * factor)})
                if (error := loss(tried)) < least:
                    best, least, moved = tried, error, True
                    break
        step = step if moved else step / 2
        sys.stderr.write(f"{math.sqrt(least):.4f}: {best}\n")
    return replace(machine, constants=best)


def fit(small: bool) -> Table:
    """Constants of every device for which there are rows to fit them to."""
    table = Table({"device": "", "constant": "", "in the table": "{:.3f}", "fitted": "{:.3f}"}, "fit")
    for name in dict.fromkeys(row.machine for row in ROWS if row.fits):
        machine = Machine.named(name)
        rows = [row for row in ROWS if row.fits and row.machine == name]
        found = fitted([(row, replayed(row)) for row in (rows[:2] if small else rows)], machine)
        for constant in ("products", "memory", "attention", "interference"):
            table.add(name, constant, getattr(machine.constants, constant), getattr(found.constants, constant))
    return table


def correlation(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation."""

    def ranks(values: list[float]) -> list[int]:
        return [sorted(values).index(value) for value in values]

    return statistics.correlation(ranks(a), ranks(b))


def wide(small: bool) -> Table:
    """A large plan, which takes its minute when `small` too."""
    row = Row("", "405b", "H100-SXM", 8192, 1024, 1, 1, True, 0)
    with in_folder({**llama(16384, 53248, 126, 128), "max_position_embeddings": 131072}) as folder:
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
    judge(table, "step time", errors, correlation(list(times.values()), [said[name] for name in times]), (0.06, 0.95))
    return table


def judge(table: Table, what: str, errors: list[float], correlated: float, goals: tuple[float, float]) -> None:
    """The goals of step times. `errors`: relative ones. `goals`: median error and rank correlation."""
    middle, most = statistics.median(errors), max(errors)
    found = f"{middle:.1%}, {most:.1%} at most"
    table.goal(f"{what} within {goals[0]:.0%} in the median", found, met=middle <= goals[0])
    table.goal(f"{what}: rank correlation {goals[1]}", f"{correlated:.3f}", met=correlated >= goals[1])


def published(small: bool) -> Table:
    """Plans beside published step times, with the constants that `dsx plan` has."""
    rows = ROWS[2:6] if small else ROWS
    shares = [predicted(row, replayed(row), Machine.named(row.machine)) for row in rows]
    columns = {"source": "", "model": "", "device": "", "length": "", "devices": "", "published tokens/s/device": ""}
    table = Table({**columns, "predicted / published": "{:.3f}", "used to fit": "", "assumed": ""}, "published")
    for row, share in zip(rows, shares):
        fits = "yes" if row.fits else "no"
        values = (row.machine, row.length, row.devices, row.tokens_per_second, share, fits, row.assumed)
        table.add(row.source.partition(",")[0], row.model, *values)
    held = [(row, share) for row, share in zip(rows, shares) if not row.fits]
    held = held or list(zip(rows, shares))  # with --small
    errors = [abs(share - 1.0) for _, share in held]
    given = [row.tokens_per_second for row, _ in held]
    said = [share * row.tokens_per_second for row, share in held]
    judge(table, "rows that were held back", errors, correlation(given, said), (0.07, 0.95))
    table.goal("the worst of them within 15 %", f"{max(errors):.1%}", met=max(errors) <= 0.15)
    return table


def layouts(small: bool) -> Table:
    """Plans beside published rates and peaks of other layouts."""
    rows = [row for row in LAYOUTS if row.pipe == 1]
    return held("layouts", [row for row in rows if row.quick][:2] if small else rows)


def stages(small: bool) -> Table:
    """Plans of pipelines beside published rates and peaks."""
    rows = [row for row in LAYOUTS if row.pipe > 1]
    return held("stages", rows[:1] if small else rows)


def held(name: str, rows: list[Layout]) -> Table:
    """The table of published layouts. A plan that cannot be made has its reason in place of numbers."""
    columns = {"source": "", "model": "", "device": "", "devices": "", "length": "", "layout": ""}
    rates = {"published tokens/s/device": "", "predicted / published": "{:.3f}"}
    peaks = {"published GiB": "", "predicted GiB": "{:.1f}", "used to fit": "", "assumed or refused": ""}
    table = Table({**columns, **rates, **peaks}, name)
    speeds, memory = [], []
    for row in rows:
        found, refused = None, ""
        try:
            found = planned(row)
        except PlanError as error:
            refused = str(error).partition(";")[0]
        rate = found and found.tokens_per_second / row.devices
        nbytes = found and (found.peak_bytes + found.fragmentation_bytes) / 2**30
        if rate and not row.fits:
            speeds.append((row, rate))
        if nbytes and row.peak:
            memory.append(nbytes / row.peak)
        given = (row.source.partition(",")[0], row.model, row.machine, row.devices, row.length, row.words, row.rate)
        fits = "yes" if row.fits else "no"
        table.add(*given, rate and rate / row.rate, row.peak or "", nbytes, fits, refused or row.assumed)
        sys.stderr.write(f"{row.model} {row.words}: {refused or rate}\n")
    judge_families(table, speeds)
    if memory:
        off = [abs(share - 1.0) for share in memory]
        text = f"{statistics.median(off):.1%} in the median, {max(off):.1%} at most"
        table.goal("peaks within 5 % of the published ones", text, met=max(off) <= 0.05)
    return table


def judge_families(table: Table, speeds: list[tuple[Layout, float]]) -> None:
    """The goals of rates, over all rows, and what each family alone comes to."""
    if len(speeds) < 2:
        return
    errors = [abs(said / row.rate - 1.0) for row, said in speeds]
    rates = [row.rate for row, _ in speeds], [said for _, said in speeds]
    judge(table, "rates", errors, correlation(*rates), (0.07, 0.95))
    table.goal("the worst of them within 15 %", f"{max(errors):.1%}", met=max(errors) <= 0.15)
    for name in dict.fromkeys(family(row) for row, _ in speeds):
        mine = [error for (row, _), error in zip(speeds, errors) if family(row) == name]
        found = f"{statistics.median(mine):.1%} in the median of {len(mine)}, {max(mine):.1%} at most"
        table.goal(f"{name} within 7% in the median", found, met=statistics.median(mine) <= 0.07)


def claims(small: bool) -> Table:
    """Models that others report to train with states in host memory and on disk: does a plan of them fit?"""
    columns = {"source": "", "claim": "", "parameters, B": "{:.1f}", "device": "", "devices": ""}
    found = {"device GiB": "{:.1f}", "host GiB": "{:.0f}", "disk TB": "{:.1f}", "fits": ""}
    table = Table({**columns, **found, "published TFLOPS": "", "predicted TFLOPS": "{:.1f}"}, "claims")
    for claim in CLAIMS[:1] if small else CLAIMS:
        plan = claim.planned()
        tiers = [plan.peak.get(tier, 0) * plan.ranks_per_host for tier in ("host", "disk")]
        rate = (plan.flops - plan.recomputed_flops) / plan.step_seconds / 1e12
        table.add(
            claim.source, claim.words, plan.parameters / 1e9, claim.machine, claim.devices, plan.peak_bytes / 2**30,
            tiers[0] / 2**30, tiers[1] / 1e12, "yes" if plan.fits else "no", claim.teraflops or "", rate,
        )  # fmt: skip
        table.goal(f"{claim.words} fits", "yes" if plan.fits else f"no: {plan.short_of}", met=plan.fits)
    return table


def deep(small: bool) -> Table:
    """The plan of very many blocks that are alike, on very many ranks."""
    text = llama(2560, 8192, 320 if small else 11_200, 20)
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }  # fmt: skip
    with in_folder(text) as folder:
        cpu = time.process_time()
        found = plan(
            folder, config, world_size=10_000, machine="H100-SXM", sequence=4096, recompute=True, alike=True,
            changes=False,
        )  # fmt: skip
        cpu = time.process_time() - cpu
    columns = {"parameters, B": "{:.1f}", "tensors": "", "ranks": "", "s of one core": "{:.1f}"}
    planned = {"peak, GiB": "{:.1f}", "s per step": "{:.1f}", "MFU": "{:.1%}"}
    table = Table({**columns, **planned}, "deep")
    tensors = 9 * text["num_hidden_layers"] + 3
    numbers = (found.peak_bytes / 2**30, found.step_seconds, found.mfu)
    table.add(found.parameters / 1e9, tensors, found.world_size, cpu, *numbers)
    table.goal("planned in 60 s of one core", f"{cpu:.1f} s", met=cpu <= 60)
    return table


if __name__ == "__main__":
    parts = {"real": real, "published": published, "layouts": layouts, "stages": stages, "claims": claims}
    run_parts({**parts, "fit": fit, "wide": wide, "deep": deep}, __doc__)
