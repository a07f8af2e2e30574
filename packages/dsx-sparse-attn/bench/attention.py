"""Block-sparse attention beside dense SDPA and compiled FlexAttention: time, share of the FMA peak, memory, goals.

    python packages/dsx-sparse-attn/bench/attention.py [--part NAME ...] [--rounds 7] [--threads 2] [--json FILE]

Parts: `peak` (kernels against the machine's fused multiply-adds, one thread; two against one), `long` (n = 8192,
BigBird, forward and backward), `flex` (forward against FlexAttention compiled), `dense` (density 1.0), `small`
(overhead at n = 512), `memory` (peak extra memory of forward and backward, each in a process of its own), `longest`
(which length fits the memory that materialised attention takes at 1024). Contenders of a part run interleaved, in a new
order each round; medians are compared.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from dsx_sparse_attn import BigBirdSparsityConfig, Layout, block_sparse_attention, native
from dsx_sparse_attn.attention import Options, checked
from dsx_sparse_attn.backends import flex, native_cpu
from dsx_testkit.results import Table, add_json_option
from torch.nn.functional import scaled_dot_product_attention

Run = Callable[[], object]


def inputs(heads: int, seq: int, dim: int = 64) -> tuple[torch.Tensor, ...]:
    """q, k, v that want gradients, and the gradient of the output."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, seq, dim, requires_grad=True) for _ in range(3))
    return q, k, v, torch.randn(1, heads, seq, dim)


def big_bird(heads: int, seq: int, block: int = 64) -> Layout:
    """3 sliding, 1 global, 1 random."""
    random.seed(0)
    return BigBirdSparsityConfig(heads, block=block).make_layout(seq)


def window(heads: int, seq: int, block: int = 64) -> Layout:
    """Five blocks around the diagonal and the first column: density 17 to 18 % at n = 2048."""
    blocks = seq // block
    at = torch.arange(blocks)
    mask = ((at[:, None] - at).abs() <= 2) | (at == 0)
    return Layout.from_mask(mask, block, heads=heads)


def medians(contenders: dict[str, Run], rounds: int) -> dict[str, float]:
    """Seconds per contender, run alternately."""
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            start = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def trains(attend: Callable[..., torch.Tensor], q, k, v, dout) -> Run:
    """One forward and backward pass."""
    return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), dout)


class Report(Table):
    """The table: one figure a row, with its goal beside it."""

    def __init__(self) -> None:
        super().__init__({"what": "", "measured": "{:.3f}", "unit": "", "goal": ""})

    def line(self, what: str, value: float, unit: str, goal: str = "", met: bool | None = None) -> None:
        """One figure, with its goal."""
        mark = "" if met is None else (": met" if met else ": missed")
        self.add(what, value, unit, goal.removeprefix("goal ") + mark)


def kernels(heads: int, seq: int, layout: Layout, threads: int) -> dict[str, Run]:
    """The two native kernels alone, on memory that is already there."""
    module = native.module()
    q, k, v, dout = (t.detach() for t in inputs(heads, seq))
    call = checked(q, k, v, layout, Options())
    torch.set_num_threads(threads)
    prepared = native_cpu._Prepared(call)
    out, lse = torch.empty_like(q), torch.empty(1, heads, seq)
    forward = prepared.kernel_args(out, lse, [0] * 12, 0, [0, 0], 0)
    module.forward(forward, call.scale, 1.0)
    kept = [torch.empty_like(k), torch.empty_like(v), torch.zeros(heads, seq, 64), torch.empty(1, heads, seq)]
    dk, dv, dq, delta = kept
    grads = [x for t in (dout, dk, dv) for x in native_cpu._tensor(t)]
    backward = prepared.kernel_args(out, lse, grads, delta.data_ptr(), [dq.data_ptr(), 0], 0)
    keep_alive = (prepared, out, lse, dout, kept)
    return {
        f"forward {threads}": lambda: (module.forward(forward, call.scale, 1.0), keep_alive),
        f"backward {threads}": lambda: (module.backward(backward, call.scale, 1.0, 1), keep_alive),
    }


def part_peak(report: Report, rounds: int, threads: int) -> None:
    """Share of the fused multiply-adds' peak, and what a second thread gives."""
    module, heads, seq = native.module(), 2, 2048
    layout = window(heads, seq)
    work = 4.0 * heads * seq * seq * 64 * layout.density
    runs = {
        "peak": lambda: module.peak(400_000),
        **kernels(heads, seq, layout, 1),
        **kernels(heads, seq, layout, threads),
    }
    t = medians(runs, max(rounds, 21))
    peak = statistics.median(module.peak(400_000) for _ in range(15))
    print(
        f"n = 2048, 2 heads x 64, block 64, density {layout.density:.3f}, {module.isa()}, "
        f"FMA peak {peak / 1e9:.0f} GF/s a thread"
    )
    for name, operations in (("forward", work), ("backward", 2.5 * work)):
        share = operations / t[f"{name} 1"] / peak
        seconds = t[f"{name} 1"]
        what = f"{name}: {seconds * 1e3:.2f} ms, {operations / seconds / 1e9:.0f} GF/s, one thread"
        report.line(what, 100 * share, "%", "goal >= 75 % of peak", share >= 0.75)
        gain = t[f"{name} 1"] / t[f"{name} {threads}"]
        report.line(f"{name}: {threads} threads over one", gain, "x", "goal >= 1.8", gain >= 1.8)


def part_long(report: Report, rounds: int, threads: int) -> None:
    """n = 8192, BigBird, forward and backward."""
    q, k, v, dout = inputs(4, 8192)
    layout = big_bird(4, 8192)
    sparse = lambda q, k, v: block_sparse_attention(q, k, v, layout)  # noqa: E731
    runs = {
        "dense": trains(scaled_dot_product_attention, q, k, v, dout),
        "sparse": trains(sparse, q, k, v, dout),
        "dense forward": lambda: scaled_dot_product_attention(q.detach(), k.detach(), v.detach()),
        "sparse forward": lambda: sparse(q.detach(), k.detach(), v.detach()),
    }
    t = medians(runs, rounds)
    print(f"n = 8192, 4 heads x 64, block 64, BigBird, density {layout.density:.4f}, {threads} threads, float32")
    print(" ".join(f"{name} {1e3 * s:.1f} ms;" for name, s in t.items()))
    ratio = t["dense"] / t["sparse"]
    report.line("forward + backward: dense SDPA / sparse", ratio, "x", "goal >= 10", ratio >= 10)
    share = t["sparse"] / t["dense"] / layout.density
    report.line("sparse / (density x dense)", share, "x", "goal <= 2.0", share <= 2.0)
    report.line("forward: dense SDPA / sparse", t["dense forward"] / t["sparse forward"], "x")


def part_flex(report: Report, rounds: int, threads: int) -> None:
    """Forward against FlexAttention compiled for the shape."""
    for seq in (1024, 8192):
        q, k, v, _ = (t.detach() for t in inputs(4, seq))
        layout = big_bird(4, seq)
        call = checked(q, k, v, layout, Options())
        mask = flex.block_mask(call)
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        ours = lambda: block_sparse_attention(q, k, v, layout)  # noqa: B023, E731
        theirs = lambda: compiled(q, k, v, block_mask=mask)  # noqa: B023, E731
        with torch.no_grad():
            error = (ours() - theirs()).abs().max().item()
            t = medians({"ours": ours, "flex": theirs}, max(rounds, 11))
        print(
            f"n = {seq}, BigBird, density {layout.density:.4f}, forward: ours {1e3 * t['ours']:.2f} ms, "
            f"flex compiled {1e3 * t['flex']:.2f} ms, difference of results {error:.1e}"
        )
        ratio = t["flex"] / t["ours"]
        report.line(f"forward n = {seq}: FlexAttention compiled / sparse", ratio, "x", "goal >= 1.5", ratio >= 1.5)


def part_dense(report: Report, rounds: int, threads: int) -> None:
    """Density 1.0: what sparse machinery costs where there is nothing to skip."""
    for seq in (1024, 4096):
        q, k, v, dout = inputs(4, seq)
        full = Layout.from_mask(torch.ones(seq // 64, seq // 64), 64, heads=4)
        runs = {
            "dense": trains(scaled_dot_product_attention, q, k, v, dout),
            "sparse": trains(lambda q, k, v: block_sparse_attention(q, k, v, full), q, k, v, dout),  # noqa: B023
        }
        t = medians(runs, max(3, rounds))
        ratio = t["dense"] / t["sparse"]
        report.line(f"density 1.0, n = {seq}, forward + backward: SDPA / ours ({1e3 * t['sparse']:.1f} ms)", ratio, "x",
                    "goal >= 0.8", ratio >= 0.8)  # fmt: skip


def part_small(report: Report, rounds: int, threads: int) -> None:
    """n = 512: the call against the kernels it makes."""
    q, k, v, dout = inputs(4, 512)
    layout = big_bird(4, 512)
    sparse = lambda q, k, v: block_sparse_attention(q, k, v, layout)  # noqa: E731
    bare = kernels(4, 512, layout, threads)
    runs = {
        "call": lambda: sparse(q.detach(), k.detach(), v.detach()),
        "training call": trains(sparse, q, k, v, dout),
        "SDPA": lambda: scaled_dot_product_attention(q.detach(), k.detach(), v.detach()),
        "training SDPA": trains(scaled_dot_product_attention, q, k, v, dout),
        **bare,
    }
    t = medians(runs, 20 * rounds)
    print("n = 512: " + " ".join(f"{name} {1e3 * s:.3f} ms;" for name, s in t.items()))
    over = 1e3 * (t["call"] - t[f"forward {threads}"])
    report.line("n = 512: call beyond its kernel, forward", over, "ms", "goal < 0.2", over < 0.2)
    over = 1e3 * (t["training call"] - t[f"forward {threads}"] - t[f"backward {threads}"])
    report.line("n = 512: call beyond its kernels, forward + backward", over, "ms", "goal < 0.2 each way", over < 0.4)


def _materialised(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def _peak_extra(kind: str, seq: int, pipe) -> None:
    """Bytes beyond the inputs at the highest point of a forward and backward pass."""
    torch.set_num_threads(2)
    for length in (1024, seq):  # the first pass brings code and thread stacks
        layout = big_bird(4, length)
        attend = {
            "sparse": lambda q, k, v: block_sparse_attention(q, k, v, layout),  # noqa: B023
            "SDPA": scaled_dot_product_attention,
            "materialised": _materialised,
        }[kind]
        run = trains(attend, *inputs(4, length))
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
        run()
    pipe.send(_status("VmHWM") - before)


def peak_extra(kind: str, seq: int) -> int:
    """`_peak_extra` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_peak_extra, args=(kind, seq, there))
    process.start()
    there.close()
    got = here.recv()
    process.join()
    return got


def part_memory(report: Report, rounds: int, threads: int) -> None:
    """Peak extra memory at n = 8192."""
    mib = {kind: peak_extra(kind, 8192) / 2**20 for kind in ("sparse", "SDPA")}
    print("peak extra memory of forward + backward, n = 8192: " + ", ".join(f"{k} {m:.0f} MiB" for k, m in mib.items()))
    ratio = mib["sparse"] / mib["SDPA"]
    report.line("peak extra memory: sparse / SDPA", ratio, "x", "goal <= 1.1", ratio <= 1.1)


def part_longest(report: Report, rounds: int, threads: int) -> None:
    """Materialised attention at one length against ours at sixteen times that."""
    short, factor = 2048, 16
    materialised, sparse = peak_extra("materialised", short), peak_extra("sparse", factor * short)
    print(
        f"materialised n = {short}: {materialised / 2**20:.0f} MiB; "
        f"sparse n = {factor * short}: {sparse / 2**20:.0f} MiB"
    )
    report.line(
        f"sparse at {factor}x the length / materialised",
        sparse / materialised,
        "x",
        "goal <= 1.0",
        sparse <= materialised,
    )


PARTS = {
    "peak": part_peak, "small": part_small, "flex": part_flex, "long": part_long, "dense": part_dense,
    "memory": part_memory, "longest": part_longest,
}  # fmt: skip


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    add_json_option(parser)
    arguments = parser.parse_args()
    if native.module() is None:
        print(f"the native kernels are not there: {native.missing()}", file=sys.stderr)
        return 1
    report = Report()
    for part in arguments.part:
        torch.set_num_threads(arguments.threads)
        PARTS[part](report, arguments.rounds, arguments.threads)
    report.save(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
