"""Memory and traffic of the ZeRO stages, counted, beside their formulas.

    python packages/dsx-zero/bench/accounting.py [--backend gloo|dsx] [--tiers] [--json FILE]

Nothing is timed: bytes of model state are counted on unique storages (with gradients present, after a step), bytes sent
in wire dtype by dsx_comm, on 1 to 4 ranks, accumulation 1 and 4. Psi is the number of parameters, N of ranks, a the
accumulation. Two tables, one row a case, with measured / formula. `--tiers`: bytes by tier of every stage with offload
instead.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import dsx_comm  # registers the dsx backend
import torch
from dsx_testkit import run_ranks
from dsx_testkit.results import Table, add_json_option
from torch import nn

MEASURED = {"bytes per parameter": "{:.3f}", "formula": "{:.3f}", "measured / formula": "{:.4f}"}
STAGES, WORLDS, ACCUMULATIONS = (0, 1, 2, 3), (1, 2, 3, 4), (1, 4)


def model(dtype: torch.dtype) -> nn.Module:
    """A stack of blocks with odd sizes; about a million parameters."""
    torch.manual_seed(0)
    width = 193
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(3)
    )

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks
            self.head = nn.Linear(width, 11)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    return Stack().to(dtype)


def measure(rank: int, world: int, stage: int, accumulation: int, keep: bool, low: bool) -> dict[str, Any]:
    """One rank: train two steps, count the third."""
    import dsx_zero
    from dsx_zero.config import ZeroConfig

    config = ZeroConfig.model_validate(
        {"stage": stage, "keep_full_gradients": keep, "stage3_param_persistence_threshold": 0}
    )
    dtype = torch.bfloat16 if low else torch.float32
    module = model(dtype)
    psi = sum(p.numel() for p in module.parameters())
    sharded, optimizer = dsx_zero.shard(module, lambda p: torch.optim.AdamW(p, lr=1e-3), stage=stage, config=config)

    def backwards() -> None:
        for micro in range(accumulation):
            x = torch.randn(2, 193, dtype=dtype, generator=torch.Generator().manual_seed(rank * 100 + micro))
            last = micro == accumulation - 1
            with optimizer.no_sync() if (stage < 2 or keep) and not last else torch.enable_grad():
                sharded(x).float().square().mean().backward()

    for _ in range(2):
        backwards()
        optimizer.step()
        optimizer.zero_grad()
    with dsx_comm.count_traffic() as traffic:
        backwards()
        held = optimizer.state_bytes()
        optimizer.step()
    buffers = held.pop("buffers")  # no model state: what is kept for messages between backwards
    return {"psi": psi, "bytes": sum(held.values()), "buffers": buffers, "sent": traffic.sent_bytes()}


def memory_formula(stage: int, n: int, low: bool) -> float:
    """Bytes per parameter: Adam's K = 8 (fp32) or 12 (16-bit with fp32 master)."""
    if low:
        return {0: 16, 1: 4 + 12 / n, 2: 2 + 14 / n, 3: 16 / n}[stage]
    return {0: 16, 1: 8 + 8 / n, 2: 4 + 12 / n, 3: 16 / n}[stage]


def traffic_formula(stage: int, n: int, a: int, keep: bool) -> float:
    """Elements sent per parameter, rank and optimizer step."""
    factor = {0: 2, 1: 2, 2: 2 if keep else a + 1, 3: 2 * a + 1 if keep else 3 * a}[stage]
    return factor * (n - 1) / n


def measure_tiers(rank: int, world: int, stage: int, where: str) -> dict[str, Any]:
    """One rank: bytes by tier after a step, with gradients, of bf16 parameters with fp32 masters."""
    import tempfile

    import dsx_nvme
    import dsx_zero

    place = {"device": "nvme" if where == "disk" else "cpu"}
    config: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, "offload_optimizer": place}
    if stage == 3:
        config["offload_param"] = place | ({"max_in_cpu": 0} if where == "disk" else {})
    module = model(torch.bfloat16)
    psi = sum(p.numel() for p in module.parameters())
    with tempfile.TemporaryDirectory() as folder:
        store = dsx_nvme.TensorStore(folder, keep=False) if where == "disk" else None
        sharded, optimizer = dsx_zero.shard(module, lambda p: torch.optim.AdamW(p, lr=1e-3), config=config, store=store)
        for step in range(2):
            sharded(torch.randn(2, 193).to(torch.bfloat16)).float().square().mean().backward()
            if not step:
                optimizer.step()
                optimizer.zero_grad()
        held = optimizer.state_bytes_by_tier()
        optimizer.release()
        if store is not None:
            store.close()
    found: dict[str, int] = {}
    for kind in ("params", "grads", "master", "optimizer"):
        for tier, nbytes in held[kind].items():
            found[tier] = found.get(tier, 0) + nbytes
    return {"psi": psi, "tiers": found}


def tier_formula(stage: int, n: int, where: str) -> dict[str, float]:
    """Bytes per parameter by tier: 2 for parameters and for gradients, 4 for masters, 8 for Adam."""
    if stage == 3:
        return {where: 16 / n}
    if stage == 2:
        on_host = {"host": 14 / n} if where == "host" else {"host": 2 / n, "disk": 12 / n}
        return {"device": 2.0, **on_host}
    return {"device": 4.0, where: 12 / n}


def tiers() -> Table:
    """The table of `--tiers`."""
    table = Table({"stage": "", "ranks": "", "offload to": "", "tier": "", **MEASURED}, "tiers")
    for stage, world, where in itertools.product((1, 2, 3), (1, 2), ("host", "disk")):
        rows = run_ranks(measure_tiers, world, stage, where)
        for tier, formula in tier_formula(stage, world, where).items():
            per = max(row["tiers"].get(tier, 0) for row in rows) / rows[0]["psi"]
            table.add(stage, world, where, tier, per, formula, per / formula)
    return table


def memory(run: Callable[..., list[dict[str, Any]]]) -> Table:
    """Bytes of model state."""
    table = Table({"stage": "", "ranks": "", "dtype": "", **MEASURED, "and message buffers": "{:.2f}"}, "memory")
    worst = 0.0
    for low, stage, world in itertools.product((False, True), STAGES, WORLDS):
        rows = run(measure, world, stage, 1, False, low)
        per, formula = max(r["bytes"] for r in rows) / rows[0]["psi"], memory_formula(stage, world, low)
        buffers = max(r["buffers"] for r in rows) / rows[0]["psi"]
        table.add(stage, world, "bf16" if low else "fp32", per, formula, per / formula, buffers)
        worst = max(worst, abs(per / formula - 1))
    table.goal("within 2 % of the formula", f"{worst:.2%} at most", met=worst <= 0.02)
    return table


def traffic(run: Callable[..., list[dict[str, Any]]]) -> Table:
    """Elements sent in a step."""
    columns = {"elements sent per parameter": "{:.4f}", "formula": "{:.4f}", "measured / formula": "{:.4f}"}
    table = Table({"stage": "", "ranks": "", "a": "", "keep full gradients": "", **columns}, "traffic")
    worst = 0.0
    for stage, world, a, keep in itertools.product(STAGES, WORLDS[1:], ACCUMULATIONS, (False, True)):
        if keep and stage < 2:
            continue
        rows = run(measure, world, stage, a, keep, False)
        per, formula = max(r["sent"] for r in rows) / 4 / rows[0]["psi"], traffic_formula(stage, world, a, keep)
        table.add(stage, world, a, "yes" if keep else "no", per, formula, per / formula)
        worst = max(worst, abs(per / formula - 1))
    table.goal("within 1 % of the formula", f"{worst:.2%} at most", met=worst <= 0.01)
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "dsx"), help="dsx: buffers lie in shared memory")
    parser.add_argument("--tiers", action="store_true", help="bytes by tier, with offload")
    add_json_option(parser)
    arguments = parser.parse_args()
    if arguments.tiers:
        tiers().save(arguments.json)
        return
    run = functools.partial(run_ranks, backend=arguments.backend)
    torch.set_num_threads(1)
    for table in (memory, traffic):
        table(run).save(arguments.json)


if __name__ == "__main__":
    main()
