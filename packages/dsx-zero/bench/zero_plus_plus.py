"""ZeRO++ on 2 x 2 "nodes" of processes: bytes between nodes, loss against exact training, step time over a slow link.

    python packages/dsx-zero/bench/zero_plus_plus.py bytes   # counted against the closed form
    python packages/dsx-zero/bench/zero_plus_plus.py loss    # three seeds of a small GPT on Python's standard library
    python packages/dsx-zero/bench/zero_plus_plus.py link    # sleeping compute, a paced link between the nodes

`--small` runs everything at a size that shows that it works. With `--json FILE` each part writes its table to a file of
its own, `FILE-bytes.json` and so on for `FILE.json`. Four ranks, of which each pair says that it is a node.

Bytes between nodes are counted by dsx_comm per call and group. A collective over all ranks counts as crossing once for
each value and node, (nodes - 1) / (N - 1) of what its ranks send, which is the least that any algorithm sends: for M
bytes of bf16 parameters exact stage 3 crosses 3 M (two gathers and a reduce-scatter), ZeRO++ 0.75 M (8-bit gathers for
the forward alone, 4-bit gradients), those with 2 and 4 bits, or 4 and 2, 0.375 M, all times
(nodes - 1) / nodes, and with a scale of 4 bytes for each block.
"""

from __future__ import annotations

import statistics
import sysconfig
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dsx_comm
import dsx_zero
import torch
from dsx_comm.compressed.blocks import BlockFormat
from dsx_testkit import Nodes, PacedLink, SleepingLinear, run_ranks, tiny
from dsx_testkit.benches import run_parts
from dsx_testkit.results import Table
from dsx_zero.config import GRADIENT_BLOCK
from dsx_zero.groups import AuxiliaryGroups
from dsx_zero.params.flat import FlatGroup
from dsx_zero.transports.chosen import PlainTransports, ZeroPlusPlus
from dsx_zero.transports.levels import SecondaryGather
from dsx_zero.transports.plain import PlainGather
from dsx_zero.transports.protocol import Then
from dsx_zero.transports.quantized import BLOCK, QuantizedGather
from torch import nn

RANKS, DEVICES = 4, 2
NODES = RANKS // DEVICES
EXACT = {"stage": 3, "stage3_param_persistence_threshold": 0}
OURS = {
    **EXACT,
    "zero_hpz_partition_size": DEVICES,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
}
FORMS = {
    "ZeRO++": (BlockFormat(8, BLOCK), BlockFormat(4, GRADIENT_BLOCK)),
    "ZeRO++, blocks of 2048": (BlockFormat(8, BLOCK), BlockFormat(4, 2048)),
    "parameters in 2 bits": (BlockFormat(2, BLOCK), BlockFormat(4, GRADIENT_BLOCK)),
    "parameters in 2 bits, blocks of 2048": (BlockFormat(2, BLOCK), BlockFormat(4, 2048)),
    "4 and 2 bits, error feedback": (BlockFormat(4, BLOCK), BlockFormat(2, GRADIENT_BLOCK)),
}
"""Of parameters and gradients."""


def config_of(name: str) -> dict[str, Any]:
    """The section of a row of the tables."""
    if name not in FORMS:
        return EXACT
    weights, gradients = FORMS[name]
    return {
        **OURS,
        "zero_quantized_weights_bits": weights.bits,
        "zero_quantized_gradients_bits": gradients.bits,
        "zero_quantized_gradients_block_size": gradients.block,
        "zero_quantized_error_feedback": gradients.bits == 2,
    }


ROWS = ("exact", *FORMS)
CONTROL, FEEDBACK = "control: no feedback", "4 and 2 bits, error feedback"


class Crossing:
    """Bytes that this rank sends to other nodes (an observer of dsx_comm)."""

    def __init__(self) -> None:
        self.between = 0.0

    def begin(self, call: Any) -> None:
        nodes: dict[int, int] = {}
        for rank in dsx_comm.get_all_ranks_from_group(call.group):
            nodes[rank // DEVICES] = nodes.get(rank // DEVICES, 0) + 1
        self.between += call.sent / call.per * (len(nodes) - 1) / max(1, call.size - 1)

    def end(self, token: Any, call: Any, result: Any, is_async: bool) -> None:
        """Nothing to do."""


def crossed(rank: int, world: int, name: str, small: bool) -> tuple[float, float]:
    """Bytes between nodes of one step of bf16, per rank: counted, and by the closed form."""
    with Nodes(world, DEVICES).environment(rank):
        width = 64 if small else 256
        model = tiny.TinyGPT(vocab=256, width=width, layers=2 if small else 4, heads=4, context=32).bfloat16()
        config = {**config_of(name), "stage3_prefetch_bucket_size": 0}
        model, optimizer = dsx_zero.shard(model, lambda p: torch.optim.AdamW(p, lr=1e-3), config=config)
        for step in range(3):
            crossing = Crossing()
            stop = dsx_comm.observe(crossing)
            model.loss(*model.example(2, seed=10 * step + rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            stop()
        shards = [g.layout.shard_numel for u in optimizer.runtime.units for g in u.groups]
    if name == "exact":
        return crossing.between, sum(3 * 2 * shard for shard in shards) * (NODES - 1)
    weights, gradients = FORMS[name]
    return crossing.between, sum(weights.message_bytes(s) + gradients.message_bytes(s) for s in shards) * (NODES - 1)


def count_bytes(small: bool) -> Table:
    """The table of bytes."""
    exact = worst = 0.0
    columns = {"MB between nodes per rank and step": "{:.4f}", "closed form, scales included": "{:.4f}"}
    ratios = {"counted / closed form": "{:.4f}", "fewer than exact": "{:.2f}x"}
    table = Table({"mode": "", **columns, **ratios}, "bytes")
    for name in ROWS:
        found = run_ranks(crossed, RANKS, name, small, timeout=600)
        counted, closed = (sum(values) / RANKS for values in zip(*found))
        exact = exact or counted
        table.add(name, counted / 1e6, closed / 1e6, counted / closed, exact / counted)
        worst = max(worst, abs(counted / closed - 1))
        if name in FORMS:
            fewer = 3 * 16 / sum(form.bits for form in FORMS[name])  # the codes alone; scales come on top
            share = exact / counted / fewer
            table.goal(f"{name}: {fewer:.0f}x fewer than exact, within 0.5 %", f"{share - 1:+.2%}", met=share >= 0.995)
    table.goal("counted bytes within 0.5 % of the closed form", f"{worst:.2%} at most", met=worst <= 0.005)
    return table


# - Loss


def text(nbytes: int) -> torch.Tensor:
    """The first bytes of the modules of Python's standard library, in the order of their names."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= nbytes:
            break
    return torch.tensor(list(found[:nbytes]))


def batch(data: torch.Tensor, rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of the text from random places, and the same one byte later."""
    starts = torch.randint(len(data) - length - 1, (rows,), generator=torch.Generator().manual_seed(seed))
    pieces = torch.stack([data[start : start + length + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def without_feedback(groups: AuxiliaryGroups) -> ZeroPlusPlus:
    """The control, which a configuration refuses: 4-bit parameters and 2-bit gradients whose errors are lost."""
    plain = PlainTransports(lambda dtype: dtype, 500_000_000)
    return ZeroPlusPlus(plain, groups, weight_bits=4, gradient_bits=2)


def trained(rank: int, world: int, name: str, seed: int, small: bool) -> float:
    """Validation loss after training, in nats per byte."""
    steps, length, rows = (20, 32, 2) if small else (300, 64, 8)
    data = text(200_000 if small else 1_500_000)
    cut = len(data) * 9 // 10
    with Nodes(world, DEVICES).environment(rank):
        torch.set_num_threads(1)
        model = tiny.TinyGPT(vocab=256, width=64 if small else 128, layers=2, heads=4, context=length, seed=seed)
        config = config_of(name) if name in ROWS else {**EXACT, "zero_hpz_partition_size": DEVICES}
        # Norms and biases stay whole, as they do by default: in a block with matrices they would set its scale.
        config = {**config, "stage3_param_persistence_threshold": 1000}
        own = without_feedback(AuxiliaryGroups()) if name not in ROWS else None
        model, optimizer = dsx_zero.shard(
            model, lambda p: torch.optim.AdamW(p, lr=3e-3, betas=(0.9, 0.95)), config=config, transports=own
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        for step in range(steps):
            loss = model.loss(*batch(data[:cut], rows, length, (seed * steps + step) * world + rank))
            loss.backward()
            optimizer.step(max_norm=1.0)
            optimizer.zero_grad()
            schedule.step()
        # The model that training leaves: the parameters themselves, not what a gather would send of them.
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
        if rank:
            return 0.0
        plain = tiny.TinyGPT(vocab=256, width=64 if small else 128, layers=2, heads=4, context=length, seed=seed)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(whole[name])
            losses = [plain.loss(*batch(data[cut:], 64, length, 10**9 + number)) for number in range(2 if small else 8)]
        return torch.stack(losses).mean().item()


def compare_loss(small: bool) -> Table:
    """The table of losses."""
    seeds = (0,) if small else (0, 1, 2)
    names = (*ROWS, CONTROL)
    losses: dict[str, list[float]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            losses[name].append(run_ranks(trained, RANKS, name, seed, small, timeout=3000)[0])
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
    columns = {f"loss, seed {seed}": "{:.4f}" for seed in seeds} | {f"gap, seed {seed}": "{:+.2%}" for seed in seeds}
    table = Table({"mode": "", **columns, "mean gap to exact": "{:+.2%}"}, "loss")
    means: dict[str, float] = {}
    for name, found in losses.items():
        gaps = [(ours - exact) / exact for ours, exact in zip(found, losses["exact"])]
        means[name] = statistics.mean(gaps)
        table.add(name, *found, *gaps, means[name])
    for name in FORMS:
        table.goal(f"{name}: within 0.5 % of exact", f"{means[name]:+.2%}", met=means[name] <= 0.005)
    gap = means[CONTROL] - means[FEEDBACK]
    table.goal("the control without feedback is worse than with it", f"{gap:+.2%} of exact", met=gap > 0)
    return table


# - Time over a link


class Paced:
    """What another transport sends between nodes takes its time on a link. `nbytes`: of a group, per rank."""

    def __init__(self, inner: Any, link: PacedLink, nbytes: Callable[[FlatGroup], float]) -> None:
        self._inner, self._link, self._nbytes = inner, link, nbytes

    def tensors(self) -> list[torch.Tensor]:
        return self._inner.tensors()

    def result_dtype(self, source: torch.dtype, group: FlatGroup) -> torch.dtype:
        return self._inner.result_dtype(source, group)

    def start(self, out: torch.Tensor, source: torch.Tensor, group: FlatGroup, label: str) -> Then:
        transfer = self._link.start(int(self._nbytes(group)))
        return Then([self._inner.start(out, source, group, label), transfer])


class OverLink:
    """Transports of exact stage 3 or of ZeRO++ whose bytes between nodes go over a paced link."""

    def __init__(self, link: PacedLink, quantised: bool) -> None:
        self._link, self._quantised = link, quantised
        plain = PlainTransports(lambda dtype: dtype, 500_000_000)
        self._inner: Any = ZeroPlusPlus(plain, AuxiliaryGroups(), gradient_bits=4) if quantised else plain

    def _bytes(self, bits: int) -> Callable[[FlatGroup], float]:
        form = BlockFormat(bits, BLOCK) if self._quantised else None

        def crossing(group: FlatGroup) -> float:
            shard = group.layout.shard_numel
            message = shard * group.key.dtype.itemsize if form is None else form.message_bytes(shard)
            return message * (NODES - 1)

        return crossing

    def gather(self, sets: Any) -> Any:
        if not self._quantised:
            return Paced(PlainGather(), self._link, self._bytes(8))
        return SecondaryGather(Paced(QuantizedGather(PlainGather(), BlockFormat(8, BLOCK)), self._link, self._bytes(8)))

    def reduce(self, op: Any, ranks: Any, *, scatters: bool) -> Any:
        return Paced(self._inner.reduce(op, ranks, scatters=scatters), self._link, self._bytes(4))


class Sleeper(nn.Module):
    """Blocks whose compute takes time and no core."""

    def __init__(self, layers: int, width: int, forward_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(SleepingLinear(width, forward_s) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stepped(rank: int, world: int, share: float, small: bool) -> dict[str, float]:
    """Median seconds of a step of each. `share`: seconds of exact stage 3's bytes on the link, of those of compute."""
    layers, width, forward_s, steps = (4, 64, 0.005, 3) if small else (8, 256, 0.05, 7)
    crossing = 3 * 4 * width * (width + 1) * layers / world * (NODES - 1)
    rate = crossing / (share * 3 * forward_s * layers)
    with ExitStack() as stack:
        stack.enter_context(Nodes(world, DEVICES).environment(rank))
        torch.set_num_threads(1)
        runs: dict[str, tuple[nn.Module, Any]] = {}
        for name, quantised in (("exact", False), ("ZeRO++", True)):
            config = {**EXACT, **({"zero_hpz_partition_size": DEVICES} if quantised else {})}
            own = OverLink(PacedLink(rate), quantised)
            model = Sleeper(layers, width, forward_s)
            runs[name] = dsx_zero.shard(model, lambda p: torch.optim.SGD(p, lr=0.0), config=config, transports=own)
        times: dict[str, list[float]] = {name: [] for name in runs}
        x = torch.randn(2, width)
        for step in range(steps + 2):
            for name, (model, optimizer) in runs.items():
                dsx_comm.barrier()
                began = time.perf_counter()
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
                dsx_comm.barrier()
                if step > 1:
                    times[name].append(time.perf_counter() - began)
        return {name: statistics.median(found) for name, found in times.items()}


def over_link(small: bool) -> Table:
    """Step times where the link is the limit (exact stage 3 sends four times as long as it computes), and where not."""
    table = Table({"link": "", "exact, ms": "{:.1f}", "ZeRO++, ms": "{:.1f}", "faster": "{:.2f}x"}, "link")
    for label, share, least in (("the limit", 4.0, 2.0), ("not the limit", 0.1, 0.97)):
        found = run_ranks(stepped, RANKS, share, small, timeout=600)[0]
        exact, ours = found["exact"], found["ZeRO++"]
        table.add(label, exact * 1e3, ours * 1e3, exact / ours)
        table.goal(f"{label}: at least {least}x exact", f"{exact / ours:.2f}x", met=exact / ours >= least)
    return table


if __name__ == "__main__":
    run_parts({"bytes": count_bytes, "loss": compare_loss, "link": over_link}, __doc__)
