"""Faults that make a job hang, injected one by one: does `dsx_verify.watch` name each one, and how soon?

    python packages/dsx-verify/bench/hang_faults.py [--only NAME] [--json FILE]

A job of two or three processes trains two right steps; then one rank does what it should not. The report must name the
rank, the collective and its sizes, and the module in which the rank is. A sample is in the suite
(`test_verify_hang_faults.py`). Calls with other sizes are not here: gloo ends the program itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from dsx_testkit.results import add_json_option
from dsx_verify import watch

LIMIT, MOST = 0.5, 5.0  # seconds without progress until a report; until a report must be there


@dataclass(frozen=True)
class HangFault:
    """One fault.

    Attributes:
        world: processes; `bad`: the rank that does what it should not.
        run: (job) -> hangs.
        kind: kinds of `Hang` that are right.
        operation: a part of the collective's name and sizes.
        place: a part of the line of the rank that is not there: its module or function; "": it is there.
        backend: of the job; its tensors are on the backend's device.
    """

    name: str
    world: int
    bad: int
    run: Callable[[Job], Any]
    kind: tuple[str, ...]
    operation: str
    place: str = ""
    backend: str = "gloo"


class Job:
    """One rank of a job: model, samples, process group and watch."""

    def __init__(self, fault: HangFault, rank: int, folder: str, port: int) -> None:
        self.rank, self.world, self.is_bad = rank, fault.world, rank == fault.bad
        self.device, self.folder = torch.device("cpu" if fault.backend == "gloo" else "cuda:0"), folder
        self.began, self.work = 0.0, 0.0
        torch.manual_seed(0)
        os.environ.pop("TORCH_FR_BUFFER_SIZE", None)
        layers = (torch.nn.Linear(4, 8), Talk(self), torch.nn.Linear(8, 2))
        self.model = torch.nn.Sequential(*layers).to(self.device)
        self.watching = watch(self.model, limit=60.0, on_hang=self.named)
        limit = timedelta(seconds=60)
        self.store = dist.TCPStore("127.0.0.1", port, fault.world, is_master=False, timeout=limit)
        dist.init_process_group(fault.backend, store=self.store, rank=rank, world_size=fault.world, timeout=limit)

    def named(self, hang: Any) -> None:
        """Write what was told, and end this process: its main thread waits for ever."""
        used = time.process_time() - self.work
        told = {"seconds": time.monotonic() - self.began, "cpu": used, "kind": hang.kind, "ranks": hang.ranks}
        told = {**told, "operation": hang.operation, "text": hang.text}
        Path(self.folder, f"told-{self.rank}.json").write_text(json.dumps(told))
        os._exit(0)

    def tensor(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Any:
        """A tensor of ones on the job's device."""
        return torch.ones(*sizes, device=self.device, dtype=dtype)

    def begin(self) -> None:
        """The fault begins now, in a job that has trained for a while."""
        while not self.watching.ready:
            time.sleep(0.02)
        self.store.add("begun", 1)
        while self.store.add("begun", 0) < self.world:
            time.sleep(0.02)
        self.watching.limit = LIMIT
        self.began, self.work = time.monotonic(), time.process_time()

    def hold(self, seconds: float = 50.0) -> None:
        """Wait for nothing, as a rank that reads a slow file does."""
        time.sleep(seconds)

    def step(self, model: Any, rows: int = 3) -> Any:
        """One training step without an optimizer."""
        loss = model(self.tensor(rows, 4)).sum()
        loss.backward()
        return loss


class Talk(torch.nn.Module):
    """A layer that may call a collective in its forward, as tensor parallelism does."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.call: Callable[[Job], Any] = lambda job: None
        self.job = job

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The tanh, after the call."""
        self.call(self.job)
        return torch.tanh(x)


# - Collectives by name: (job, number of elements) -> one call


def all_reduce(job: Job, count: int) -> None:
    dist.all_reduce(job.tensor(count))


def broadcast(job: Job, count: int) -> None:
    dist.broadcast(job.tensor(count), 0)


def all_gather(job: Job, count: int) -> None:
    dist.all_gather([job.tensor(count) for _ in range(job.world)], job.tensor(count))


def all_gather_into(job: Job, count: int) -> None:
    dist.all_gather_into_tensor(job.tensor(count * job.world), job.tensor(count))


def reduce_scatter(job: Job, count: int) -> None:
    dist.reduce_scatter_tensor(job.tensor(count), job.tensor(count * job.world))


def all_to_all(job: Job, count: int) -> None:
    dist.all_to_all_single(job.tensor(count * job.world), job.tensor(count * job.world))


def reduce(job: Job, count: int) -> None:
    dist.reduce(job.tensor(count), job.world - 1 if job.world == 2 else 0)


def gather(job: Job, count: int) -> None:
    into = [job.tensor(count) for _ in range(job.world)] if job.rank == 0 else None
    dist.gather(job.tensor(count), into, dst=0)


def scatter(job: Job, count: int) -> None:
    parts = [job.tensor(count) for _ in range(job.world)] if job.rank == job.world - 1 else None
    dist.scatter(job.tensor(count), parts, src=job.world - 1)


def barrier(job: Job, count: int) -> None:
    del count
    dist.barrier()


CALLS: dict[str, tuple[Callable[[Job, int], None], str]] = {
    "all_reduce": (all_reduce, "all_reduce"),
    "broadcast": (broadcast, "broadcast"),
    "all_gather": (all_gather, "all_gather"),
    "all_gather_into_tensor": (all_gather_into, "all_gather"),
    "reduce_scatter": (reduce_scatter, ""),
    "all_to_all": (all_to_all, "all_to_all"),
    "barrier": (barrier, "barrier"),
    "reduce": (reduce, "reduce"),
    "gather": (gather, "gather"),
    "scatter": (scatter, "scatter"),
}


def in_forward(right: Callable[[Job], Any], wrong: Callable[[Job], Any]) -> Callable[[Job], None]:
    """Two right forwards, and one in which the bad rank does something else inside of layer 1."""

    def run(job: Job) -> None:
        layer = job.model[1]
        layer.call = right
        for _ in range(2):
            job.model(job.tensor(3, 4))
        job.begin()
        layer.call = wrong if job.is_bad else right
        job.model(job.tensor(3, 4))
        job.hold()

    return run


def missing(name: str, world: int, bad: int) -> HangFault:
    """A rank that waits in a layer's forward, while the others call a collective there."""
    call, said = CALLS[name]
    run = in_forward(lambda job: call(job, 7), lambda job: job.hold())
    return HangFault(f"rank {bad} of {world} is not in {name}", world, bad, run, ("missing",), said, "in forward of 1")


def other_call(name: str, other: str, bad: int) -> HangFault:
    """A rank that calls another collective."""
    run = in_forward(lambda job: CALLS[name][0](job, 7), lambda job: CALLS[other][0](job, 7))
    return HangFault(f"rank {bad} calls {other}, not {name}", 3, bad, run, ("other collective",), "")


# - Faults of training programs


def wrapped_ddp(job: Job) -> Any:
    return torch.nn.parallel.DistributedDataParallel(job.model)


def wrapped_fsdp2(job: Job) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in (job.model[0], job.model[2]):
        fully_shard(layer)
    return fully_shard(job.model)


def wrapped_fsdp1(job: Job) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(job.model, device_id=job.device, use_orig_params=True)


WRAPPED = {"DDP": wrapped_ddp, "FSDP1": wrapped_fsdp1, "FSDP2": wrapped_fsdp2}


def training(wrap: str, wrong: Callable[[Job, Any], Any], right: Callable[[Job, Any], Any] | None = None) -> Any:
    """Two right steps of a wrapped model; then the bad rank does `wrong`, and the others `right` (a step)."""

    def run(job: Job) -> None:
        model = WRAPPED[wrap](job)
        for _ in range(2):
            job.step(model)
        job.begin()
        (wrong if job.is_bad else right or Job.step)(job, model)
        job.hold()

    return run


def ends_early(wrap: str, world: int, bad: int) -> HangFault:
    """A rank whose loader has one batch less: it goes on behind the loop."""
    run = training(wrap, lambda job, model: job.hold())
    return HangFault(f"{wrap}: rank {bad} of {world} has one batch less", world, bad, run, ("missing",), "", "in hold")


def loader_waits(wrap: str, bad: int) -> HangFault:
    """A rank that waits for its samples, with a lock that nobody gives back."""

    def wrong(job: Job, model: Any) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=50.0)

    return HangFault(
        f"{wrap}: rank {bad} waits for its loader", 2, bad, training(wrap, wrong), ("missing",), "", "in wrong"
    )


def no_backward(wrap: str, bad: int) -> HangFault:
    """A rank that leaves out backward, as one does for a loss that is not finite, and then waits."""

    def wrong(job: Job, model: Any) -> None:
        model(job.tensor(3, 4))
        job.hold()

    return HangFault(
        f"{wrap}: rank {bad} leaves out backward", 2, bad, training(wrap, wrong), ("missing",), "", "in hold"
    )


def only_one_rank(name: str, bad: int, calls: Callable[[Job, Any], Any], wrap: str, operation: str) -> HangFault:
    """The bad rank alone calls something that all have to call: all the others are missing."""
    run = training(wrap, calls, lambda job, model: job.hold())
    return HangFault(
        f"{wrap}: only rank {bad} {name}", 2, 1 - bad, _with_bad(run, bad), ("missing",), operation, "in hold"
    )


def _with_bad(run: Callable[[Job], None], bad: int) -> Callable[[Job], None]:
    def start(job: Job) -> None:
        job.is_bad = job.rank == bad
        run(job)

    return start


def gathers_object(job: Job, model: Any) -> None:
    dist.all_gather_object([None] * job.world, {"loss": 1.0})


def whole_state(job: Job, model: Any) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def evaluates(job: Job, model: Any) -> None:
    with torch.no_grad():
        model(job.tensor(3, 4))


def waits_at_barrier(job: Job, model: Any) -> None:
    dist.barrier()


def clips(job: Job, model: Any) -> None:
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm.full_tensor()


def crossed_groups(job: Job) -> None:
    """Two groups of the same ranks, called in another order by one rank."""
    first, second = dist.new_group(list(range(job.world))), dist.new_group(list(range(job.world)))
    for group in (first, second):
        dist.all_reduce(job.tensor(3), group=group)
    job.begin()
    for group in (second, first) if job.is_bad else (first, second):
        dist.all_reduce(job.tensor(9), group=group)
    job.hold()


def pair_waits(job: Job) -> None:
    """A pair inside the world: its second rank goes to the world's barrier at once."""
    pair = dist.new_group([0, 1])
    if job.rank < 2:
        dist.all_reduce(job.tensor(3), group=pair)
    dist.barrier()
    job.begin()
    if job.rank == 0:
        dist.all_reduce(job.tensor(11), group=pair)
    dist.barrier()
    job.hold()


def gloo_faults() -> list[HangFault]:
    """The fifty faults over gloo."""
    names = list(CALLS)
    found = [missing(name, 2, 1 if name != "scatter" else 0) for name in names]
    found += [missing(name, 3, 1) for name in names]
    found += [missing(name, 3, 2) for name in ("all_reduce", "all_gather", "reduce_scatter", "barrier")]
    found += [other_call("all_reduce", "barrier", 1), other_call("barrier", "all_reduce", 1)]
    found += [other_call("reduce_scatter", "barrier", 0)]
    found += [ends_early(wrap, 2, bad) for wrap in WRAPPED for bad in (0, 1)]
    found += [ends_early("DDP", 3, 1), ends_early("FSDP2", 3, 2)]
    found += [loader_waits(wrap, 1) for wrap in WRAPPED]
    found += [no_backward("DDP", 1), no_backward("FSDP2", 0), no_backward("FSDP1", 1)]
    found += [only_one_rank("gathers an object", 0, gathers_object, "DDP", "all_gather")]
    found += [only_one_rank("gathers an object", 1, gathers_object, "FSDP2", "all_gather")]
    found += [only_one_rank("reads the whole state", 0, whole_state, "FSDP2", "")]
    found += [
        only_one_rank("evaluates", 0, evaluates, "FSDP2", ""),
        only_one_rank("evaluates", 1, evaluates, "FSDP1", ""),
    ]
    found += [only_one_rank("waits at a barrier", 0, waits_at_barrier, "DDP", "barrier")]
    found += [only_one_rank("clips", 1, clips, "FSDP2", "")]
    found += [HangFault("two groups in another order", 3, 1, crossed_groups, ("missing",), "all_reduce of [[9]]")]
    found += [HangFault("a pair inside the world", 3, 1, pair_waits, ("missing",), "all_reduce of [[11]]")]
    return found


# - Running them


def rank_main(fault: HangFault, rank: int, folder: str, port: int) -> None:
    """One rank of a job with a fault. Does not return where the fault was named."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the report goes there, too
    job = Job(fault, rank, folder, port)
    try:
        fault.run(job)
    except RuntimeError:  # simulated NCCL tells the host of a call that would hang
        if fault.backend == "gloo" or not fault.kind:
            raise
        job.hold()
    os._exit(3)


def inject(fault: HangFault) -> tuple[str, float, float]:
    """Run a job with a fault.

    Returns:
        ("", or what is wrong with the report; seconds until the last rank told it; the most CPU seconds that a rank
        used until then, which say how much of the time was other programs').
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives every rank
    with tempfile.TemporaryDirectory(prefix="dsx-hang-") as folder:
        started = [_start(fault, rank, folder, store.port) for rank in range(fault.world)]
        for process in started:
            _wait(process, 90.0)
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("told-*.json"))]
        codes = [process.exitcode for process in started]
    if not fault.kind:  # a right job
        return "" if not told and set(codes) == {3} else f"told {told}, exit codes {codes}", 0.0, 0.0
    if not told:
        return "nothing was told", 0.0, 0.0
    return _judge(fault, told[0]), max(one["seconds"] for one in told), max(one["cpu"] for one in told)


def _start(fault: HangFault, rank: int, folder: str, port: int) -> Any:
    process = multiprocessing.get_context("fork").Process(target=rank_main, args=(fault, rank, folder, port))
    process.start()
    return process


def _wait(process: Any, seconds: float) -> None:
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()


def _judge(fault: HangFault, told: dict[str, Any]) -> str:
    wrong = []
    if told["kind"] not in fault.kind:
        wrong.append(f"kind {told['kind']}, expected {' or '.join(fault.kind)}")
    if told["ranks"] != [fault.bad]:
        wrong.append(f"ranks {told['ranks']}, expected {fault.bad}")
    if fault.operation not in told["operation"]:
        wrong.append(f"operation {told['operation']}, expected {fault.operation}")
    line = next((line for line in told["text"].splitlines() if line.startswith(f"  rank {fault.bad}:")), "")
    if fault.place not in line:
        wrong.append(f"place {line.strip()!r}, expected {fault.place}")
    return "; ".join(wrong)


def main() -> int:
    """Inject all faults; print what is not named, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    add_json_option(parser)
    options = parser.parse_args()
    faults = [fault for fault in gloo_faults() if options.only in fault.name]
    named, slowest, most = 0, 0.0, 0.0
    for fault in faults:
        wrong, seconds, cpu = inject(fault)
        named, slowest, most = named + (not wrong), max(slowest, seconds), max(most, cpu)
        said = "named" if not wrong else "WRONG"
        print(f"{said:6} {seconds:5.1f} s, CPU {cpu:4.2f}  {fault.name}  {wrong}", flush=True)
    print(
        f"{named} of {len(faults)} named; the slowest took {slowest:.1f} s (goal {MOST:g}), {most:.1f} s of CPU at most"
    )
    if options.json:
        from dsx_testkit.results import Table

        table = Table(
            {"backend": "", "faults": "", "named": "", "slowest, s": "{:.1f}", "most CPU of a rank, s": "{:.1f}"}
        )
        table.add("gloo", len(faults), named, round(slowest, 1), round(most, 1))
        table.save(options.json)
    return 0 if named == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
