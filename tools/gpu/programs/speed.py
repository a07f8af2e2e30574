"""`speed.py SIZE SYSTEM [--trace FILE]`: step time, tokens per second and peak of one system at one size, bf16.

Systems: torch (fp32 parameters under autocast), fsdp2 (fp32 shards, bf16 in the gathers), dsx0, dsx2, dsx3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from dsx_testkit.benches import GPT, batch
from records import SIMULATED, one_rank, record, recorded
from training import ADAM, Step, config, engine_of, engine_step

# (width, layers, heads, vocabulary, length, micro-batch)
SIZES = {"350M": (1024, 24, 16, 50304, 1024, 8), "1.3B": (2048, 24, 16, 50304, 1024, 4)}
SMALL = (64, 2, 4, 256, 32, 2)
STEPS, WARM = (2, 1) if SIMULATED else (12, 4)


def shape(size: str) -> tuple[int, ...]:
    """The model's; a small one on the simulated device, where only the way is tried."""
    return SMALL if SIMULATED else SIZES[size]


def model_of(size: str) -> torch.nn.Module:
    """The model, on the host."""
    width, layers, heads, vocabulary, length, _ = shape(size)
    torch.manual_seed(0)
    return GPT(width, layers, heads, vocabulary, length)


def data_of(size: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One micro-batch on the device, used by every step."""
    *_, length, micro = shape(size)
    ids, targets = batch(0, 0, size=micro, length=length)
    return ids.cuda(), targets.cuda()


def settings(size: str, stage: int, place: str = "none", folder: str = "") -> dict:
    """The configuration of dsx for a size."""
    found = config(stage, "bf16", place, folder, clip=1.0)
    found["train_micro_batch_size_per_gpu"] = shape(size)[-1]
    del found["zero_optimization"]["stage3_param_persistence_threshold" if stage == 3 else "stage"]
    found["zero_optimization"]["stage"] = stage
    return found


def by_torch(size: str, sharded: bool) -> Step:
    """Plain torch, or FSDP2."""
    model = model_of(size).cuda()
    if sharded:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=None if SIMULATED else True, **ADAM)
    data = data_of(size)

    def step(number: int) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=not sharded):
            loss = model(*data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def step_of(size: str, system: str) -> Step:
    """The step of a system."""
    if not system.startswith("dsx"):
        return by_torch(size, sharded=system == "fsdp2")
    data = data_of(size)
    return engine_step(engine_of(model_of(size), settings(size, int(system[-1]))), lambda number: data)


def trace(step: Step, path: Path) -> None:
    """Two steps under torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([] if SIMULATED else [ProfilerActivity.CUDA])
    with profile(activities=kinds) as seen:
        for number in range(2):
            step(number)
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(path))
    record(f"trace {path.name}", "noted", f"open {path.name} in https://ui.perfetto.dev")


def main() -> int:
    """One system."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("system", choices=("torch", "fsdp2", "dsx0", "dsx2", "dsx3"))
    parser.add_argument("--trace", type=Path)
    chosen = parser.parse_args()
    name = f"{chosen.size}, {chosen.system}"
    with one_rank(), recorded(name):
        step = step_of(chosen.size, chosen.system)
        seconds, loss = [], torch.zeros(())
        for number in range(WARM + STEPS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss = step(number)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds[WARM:])
        *_, length, micro = shape(chosen.size)
        finite = bool(torch.isfinite(loss).item())
        record(
            name, "noted" if finite else "bad", "" if finite else "the loss is not finite", ms=1e3 * median,
            tokens_per_second=micro * length / median, peak_bytes=torch.cuda.max_memory_allocated(), loss=loss.item(),
        )  # fmt: skip
        if chosen.trace:
            trace(step, chosen.trace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
