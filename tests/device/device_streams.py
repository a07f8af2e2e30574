"""Bodies of `device_program.py` without an engine: compressed collectives, memory that another stream still uses."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIMULATED = torch.cuda.is_available()
DEVICE = "cuda" if SIMULATED else "cpu"
FOLDER = Path(sys.argv[1])
STEPS = 4


def numbers(losses: list[torch.Tensor]) -> list[float]:
    """Losses as Python numbers, read behind training."""
    return [float(loss) for loss in losses]


def aside() -> Any:
    """A stream of its own, which goes on behind the current one."""
    if not SIMULATED:
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def compressed(settings: dict[str, Any]) -> list[float]:
    """Collectives that send fewer bytes, while the computation goes on: sums of what they give."""
    import dsx_comm

    world, rank, size = dist.get_world_size(), dist.get_rank(), 4096
    generator = torch.Generator().manual_seed(rank)
    given = [torch.randn(world * size, generator=generator).to(DEVICE) for _ in range(STEPS)]
    feedback = dsx_comm.ErrorFeedback([world * size], device=DEVICE)
    hierarchy = dsx_comm.make_hierarchy(settings["devices_per_node"])
    sums, busy = [], torch.zeros(64, 64, device=DEVICE)
    for values in given:
        part, whole = torch.empty(size, device=DEVICE), torch.empty(world * size, device=DEVICE)
        first = dsx_comm.quantized_reduce_scatter(part, values * 2, hierarchy, bits=8, async_op=True)
        busy = busy @ busy + 1e-3
        first.wait()
        second = dsx_comm.quantized_all_gather(whole, part, bits=8, async_op=True)
        third = dsx_comm.compressed_all_reduce(values, feedback, async_op=True)
        busy = busy @ busy + 1e-3
        second.wait()
        third.wait()
        sums += [part.square().mean(), whole.square().mean(), values.abs().mean()]
    return numbers(sums)


def let_go(settings: dict[str, Any]) -> list[float]:
    """Memory is let go, and made again, while another stream still uses it."""
    held = {"copies": _copies_let_go, "steps": _steps_let_go, "hops": _hops_let_go}[settings["what"]]()
    if SIMULATED:
        torch.cuda.synchronize()
    return [float(value.float().mean()) for value in held]


def _copies_let_go() -> list[torch.Tensor]:
    """A save copies what was made on a stream of its own."""
    from dsx_checkpoint.behind import HostSlot
    from dsx_checkpoint.boxes import Region
    from dsx_checkpoint.format import TensorSpec
    from dsx_checkpoint.snapshot import Piece

    slot, spec = HostSlot(), TensorSpec("values", "F32", (50_000,))
    with aside():
        values = [torch.full((50_000,), 3.0, device=DEVICE)]
        if SIMULATED:
            torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())
            stream = torch.cuda.current_stream()
    copied, wait = slot.copy([Piece("model", spec, Region.whole(spec.shape), values.pop)], FOLDER)
    with torch.cuda.stream(stream) if SIMULATED else nullcontext():
        torch.full((50_000,), 7.0, device=DEVICE)
    wait()
    return [piece.fetch() for piece in copied]


def _steps_let_go() -> list[torch.Tensor]:
    """Nobody waits for a reduction, whose tensors are dropped."""
    import dsx_comm

    world, hierarchy = dist.get_world_size(), dsx_comm.make_hierarchy(1)
    for value in (3.0, 5.0):
        given, part = torch.full((world * 4096,), value, device=DEVICE), torch.empty(4096, device=DEVICE)
        dsx_comm.quantized_reduce_scatter(part, given, hierarchy, bits=8, async_op=True)
        del given, part
        made = torch.full((world * 4096,), 7.0, device=DEVICE)
    return [made]


def _hops_let_go() -> list[torch.Tensor]:
    """Nobody waits for a transfer of tokens, whose rows are dropped."""
    import dsx_comm
    from dsx_moe.exchange import HierarchicalExchange

    world = dist.get_world_size()
    exchange = HierarchicalExchange(dsx_comm.make_hierarchy(1))
    traffic = torch.full((world, world), 16)
    for value in (3.0, 5.0):
        rows = torch.full((world * 16, 64), value, device=DEVICE)
        exchange.start(rows, traffic)
        del rows
        made = torch.full((world * 16, 64), 7.0, device=DEVICE)
    return [made]
