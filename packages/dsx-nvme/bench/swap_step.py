"""An Adam step whose states lie on disk: time against what the disk needs for the bytes, and the memory it takes.

    python packages/dsx-nvme/bench/swap_step.py [--parameters 100000000] [--budget-mib 512] [--rounds 3]
        [--adam dsx-ops] [--folder DIR] [--json FILE]

Three fp32 states of 4 bytes are read and written per step: 24 bytes per parameter. In each round three things run in
turn, and ratios are taken within the round: the same reads and writes without any computation, in the same pieces (the
disk's time for these bytes); the step with Adam; the Adam computation alone. Gradients are bf16 in memory. Goal: step
<= 1.10 x the disk's time, computation hidden, resident memory under the budget plus gradients.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import time

import dsx_nvme
import torch
from dsx_nvme import OptimizerSwapper
from dsx_nvme.swap import Visit
from dsx_testkit.results import Table, add_json_option

MIB = 1 << 20


def resident() -> float:
    """MiB of this process in memory now."""
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / MIB


class TorchAdam:
    """Updates a piece with torch's fused AdamW, which wants gradients of the master's dtype."""

    def __init__(self, grads: torch.Tensor) -> None:
        self.grads = grads
        self.step = 0
        # A fresh tensor per piece would cost more in page faults than Adam.
        self.scratch = torch.empty(0)

    def __call__(self, visit: Visit) -> None:
        s, grad = visit.states, self.grads[visit.start : visit.stop]
        step = torch.tensor(float(self.step))
        if self.scratch.numel() < grad.numel():
            self.scratch = torch.empty(grad.numel())
        wide = self.scratch[: grad.numel()].copy_(grad)
        torch._fused_adamw_(
            [s["master"]], [wide], [s["exp_avg"]], [s["exp_avg_sq"]], [], [step], lr=1e-3, beta1=0.9, beta2=0.999,
            weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip


class DsxAdam:
    """Updates a piece with dsx-ops' AdamW, which takes bf16 gradients as they are."""

    def __init__(self, grads: torch.Tensor) -> None:
        from dsx_ops import CPUAdam

        self.grads = grads
        self.step = 0
        self.scratch = torch.empty(0)
        self.optimizer = CPUAdam([torch.nn.Parameter(torch.zeros(1))], lr=1e-3, weight_decay=0.01, adamw_mode=True)

    def __call__(self, visit: Visit) -> None:
        s = visit.states
        state = {"step": self.step - 1, "exp_avg": s["exp_avg"], "exp_avg_sq": s["exp_avg_sq"]}
        self.optimizer.step_flat(s["master"], self.grads[visit.start : visit.stop], state, offset=visit.start)


ADAMS = {"dsx-ops": DsxAdam, "torch": TorchAdam}


def timed(swapper: OptimizerSwapper, update: object) -> tuple[float, float, float, float]:
    """Seconds of a pass: whole, waiting for reads, waiting for writes, updating."""
    t = swapper.times
    before, start = (t.reading, t.writing, t.updating), time.perf_counter()
    swapper.step(update)  # type: ignore[arg-type]
    whole = time.perf_counter() - start
    return (whole, *(a - b for a, b in zip((t.reading, t.writing, t.updating), before)))


def alone(adam: TorchAdam | DsxAdam, states: dict[str, torch.Tensor], total: int) -> float:
    """Seconds of the same arithmetic on memory, piece by piece."""
    piece = states["master"].numel()
    adam(Visit("g", 0, piece, states))
    start = time.perf_counter()
    for at in range(0, total, piece):
        n = min(piece, total - at)
        adam(Visit("g", at, at + n, {k: v[:n] for k, v in states.items()}))
    return time.perf_counter() - start


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--budget-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--adam", choices=ADAMS, default="dsx-ops", help="whose arithmetic")
    parser.add_argument("--folder", default=None)
    add_json_option(parser)
    args = parser.parse_args()
    ADAMS[args.adam](torch.zeros(1))  # what its libraries take is not counted
    base = resident()
    grads = torch.zeros(args.parameters, dtype=torch.bfloat16).uniform_(-1, 1)
    adam = ADAMS[args.adam](grads)
    rows: list[dict[str, float]] = []
    table = Table({"round": "", "step s": "{:.3f}", "disk s": "{:.3f}", "compute s": "{:.3f}", "step / disk": "{:.3f}",
                   "waiting s": "{:.3f}", "updating s": "{:.3f}", "GB/s": "{:.2f}", "resident MiB": "{:.0f}",
                   })  # fmt: skip
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="dsx-nvme-swap-") as folder:
        print(dsx_nvme.explain(folder))
        with OptimizerSwapper(
            folder, {"g": args.parameters}, buffer_count=4, buffer_size=args.budget_mib * MIB // 4 // 4,
            pipeline_read=True,
            pipeline_write=True, fast_init=True,
        ) as swapper:  # fmt: skip
            piece = max(p.numel for p in swapper.plan.pieces)
            print(
                f"{len(swapper.plan.pieces)} pieces of up to {piece} elements, pool {swapper.pool.budget / MIB:.0f} MiB"
            )
            spare = {name: torch.zeros(piece) for name in swapper.states}
            swapper.initialize(lambda key, state, a, b: None)
            timed(swapper, lambda visit: None)
            for number in range(args.rounds):
                adam.step = number + 1
                disk = timed(swapper, lambda visit: None)[0]
                whole, reading, writing, updating = timed(swapper, adam)
                disk = (disk + timed(swapper, lambda visit: None)[0]) / 2  # before and after: the disk drifts
                compute = alone(adam, spare, args.parameters)
                gb = swapper.plan.file_bytes * 2 / 1e9
                rows.append({
                    "step_s": whole, "disk_s": disk, "compute_s": compute, "ratio": whole / disk,
                    "waiting_s": reading + writing,
                    "updating_s": updating, "gbps": gb / whole, "rss_mib": resident() - base,
                })  # fmt: skip
                table.add(number + 1, *rows[-1].values())
    median = {k: statistics.median(r[k] for r in rows) for k in rows[0]}
    hidden = 1 - (median["step_s"] - median["disk_s"]) / median["compute_s"]
    limit = args.budget_mib + grads.numel() * 2 / MIB + (3 * piece + adam.scratch.numel()) * 4 / MIB
    table.add("median", *median.values())
    text = "a step at most 1.10 of the time of the same bytes without computation"
    table.goal(text, f"{median['ratio']:.3f}, {hidden:.0%} of the computation hidden", met=median["ratio"] <= 1.10)
    table.goal(
        "resident over the start at most what buffers, gradients and the bench's own pieces take",
        f"{median['rss_mib']:.0f} of {limit:.0f} MiB",
        met=median["rss_mib"] <= limit,
    )
    table.save(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
