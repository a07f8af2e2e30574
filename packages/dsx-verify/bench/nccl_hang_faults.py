"""Faults that make a job over NCCL hang, on simulated CUDA: does `dsx_verify.watch` name each one?

    python -m dsx_simcuda packages/dsx-verify/bench/nccl_hang_faults.py [--only NAME] [--json FILE]

As `hang_faults.py` over gloo, with what only NCCL does without an error: other sizes, other dtypes, two groups in
another order. Then right jobs, of which nothing may be told: false alarms. A sample is in the suite
(`test_verify_hang_faults.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hang_faults
import torch
import torch.distributed as dist
from dsx_testkit.results import add_json_option
from hang_faults import CALLS, LIMIT, WRAPPED, HangFault, Job, in_forward

Call = Callable[[Job], Any]


def differing(name: str, right: Call, wrong: Call, kind: str, operation: str, bad: int = 1) -> HangFault:
    """Three ranks are in a layer's forward, and one of them calls the collective in another way."""
    return HangFault(name, 3, bad, in_forward(right, wrong), (kind,), operation)


def other_size(name: str, bad: int) -> HangFault:
    """Two elements more on one rank."""
    call, said = CALLS[name]
    right, wrong = (lambda job: call(job, 7)), (lambda job: call(job, 9))
    return differing(f"other size in {name}", right, wrong, "other sizes", said, bad)


def other_dtype(name: str, bad: int) -> HangFault:
    """Half of the bytes on one rank."""
    into = {"all_reduce": lambda job, x: dist.all_reduce(x), "broadcast": lambda job, x: dist.broadcast(x, 0)}
    call = into[name]
    right = lambda job: call(job, job.tensor(7))  # noqa: E731
    wrong = lambda job: call(job, job.tensor(7, dtype=torch.bfloat16))  # noqa: E731
    return differing(f"other dtype in {name}", right, wrong, "other dtypes", name, bad)


def other_order(bad: int) -> HangFault:
    """Two collectives of one group, which one rank calls the other way round."""

    def calls(*names: str) -> Call:
        return lambda job: [CALLS[name][0](job, 7) for name in names]

    right, wrong = calls("all_reduce", "broadcast"), calls("broadcast", "all_reduce")
    return differing("two collectives in another order", right, wrong, "other collective", "", bad)


def skips(bad: int) -> HangFault:
    """One rank leaves out the first of two collectives: its second one meets the others' first."""

    def right(job: Job) -> None:
        CALLS["all_reduce"][0](job, 7)
        CALLS["all_gather_into_tensor"][0](job, 7)

    wrong = lambda job: CALLS["all_gather_into_tensor"][0](job, 7)  # noqa: E731
    return differing("a collective is skipped", right, wrong, "other collective", "", bad)


def dies(wrap: str, bad: int) -> HangFault:
    """A rank that ends in the middle of training, without a word."""
    run = hang_faults.training(wrap, lambda job, model: os._exit(1))
    return HangFault(f"{wrap}: rank {bad} dies", 2, bad, run, ("missing",), "", "did not answer")


def right_job(wrap: str, world: int) -> HangFault:
    """Steps, a pause that is longer than the limit, and steps: nothing may be told."""

    def run(job: Job) -> None:
        model = WRAPPED[wrap](job)
        for _ in range(2):
            job.step(model)
        job.begin()
        for _ in range(2):
            time.sleep(3 * LIMIT)
            for call, _ in CALLS.values():
                call(job, 7)
            job.step(model)
        torch.cuda.synchronize()
        dist.barrier()

    return HangFault(f"{wrap}: {world} ranks that do nothing wrong", world, 0, run, (), "", backend="nccl")


def nccl_faults() -> list[HangFault]:
    """The faults over simulated NCCL."""
    names = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter", "all_to_all", "barrier")
    found = [hang_faults.missing(name, 2, 1) for name in names]
    found += [hang_faults.missing("all_reduce", 3, 1), hang_faults.missing("reduce", 3, 2)]
    found += [hang_faults.other_call("all_reduce", "broadcast", 1)]
    found += [hang_faults.other_call("reduce_scatter", "all_gather_into_tensor", 2)]
    found += [other_size("all_reduce", 1), other_size("all_gather_into_tensor", 2), other_size("broadcast", 1)]
    found += [other_dtype("all_reduce", 1), other_dtype("broadcast", 2)]
    found += [other_order(1), skips(2), dies("DDP", 1), dies("FSDP2", 0)]
    found += [hang_faults.ends_early("DDP", 2, 1), hang_faults.ends_early("FSDP2", 2, 0)]
    found += [hang_faults.no_backward("DDP", 1)]
    crossed = ("other order",)
    found += [
        HangFault("two groups in another order", 3, 1, hang_faults.crossed_groups, crossed, "all_reduce of [[9]]")
    ]
    return [replace(fault, backend="nccl") for fault in found]


def good_jobs() -> list[HangFault]:
    """Jobs without a fault."""
    return [right_job(wrap, world) for wrap in ("DDP", "FSDP2") for world in (2, 3)]


def main() -> int:
    """Inject all faults and run the right jobs; print what is wrong, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults and right jobs whose name contains this")
    add_json_option(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device: start it with `python -m dsx_simcuda`")
    faults = [fault for fault in nccl_faults() if options.only in fault.name]
    good = [job for job in good_jobs() if options.only in job.name]
    named, alarms, slowest = 0, 0, 0.0
    for fault in (*faults, *good):
        wrong, seconds, _ = hang_faults.inject(fault)
        named, slowest = named + bool(fault.kind and not wrong), max(slowest, seconds)
        alarms += bool(wrong and not fault.kind)
        print(f"{'WRONG' if wrong else 'right'} {seconds:5.1f} s  {fault.name}  {wrong}", flush=True)
    print(f"{named} of {len(faults)} named; {alarms} false alarms in {len(good)} right jobs; slowest {slowest:.1f} s")
    if options.json:
        from dsx_testkit.results import Table

        columns = {"backend": "", "faults": "", "named": "", "right jobs": "", "false alarms": ""}
        table = Table({**columns, "slowest, s": "{:.1f}"})
        table.add("nccl (simulated)", len(faults), named, len(good), alarms, round(slowest, 1))
        table.save(options.json)
    return 0 if named == len(faults) and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
