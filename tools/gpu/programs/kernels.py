"""The CUDA modules that are here; with `run`, one call of what they hold, for compute-sanitizer to watch."""

from __future__ import annotations

import sys

import torch
from records import record, recorded


def modules() -> bool:
    """Whether the kernels of dsx-ops are here."""
    from dsx_ops.cuda import loader

    here = loader.module() is not None
    record("dsx_ops CUDA module", "good" if here else "skipped", "" if here else str(loader.reason()))
    return here


def run() -> None:
    """Steps of the optimizers that have kernels, over sizes with ugly ends."""
    import dsx_ops

    for rule in ("FusedAdam", "FusedLion", "FusedLamb", "Adam8bit"):
        for dtype in (torch.float32, torch.bfloat16):
            with recorded(f"{rule}, {dtype}"):
                parameters = [torch.ones(n, device="cuda", dtype=dtype, requires_grad=True) for n in (1, 257, 16385)]
                optimizer = getattr(dsx_ops, rule)(parameters, lr=1e-2)
                for _ in range(2):
                    for parameter in parameters:
                        parameter.grad = torch.ones_like(parameter)
                    optimizer.step()
                torch.cuda.synchronize()
                record(f"{rule}, {dtype}", "good")


if __name__ == "__main__":
    found = modules()
    if sys.argv[1:] == ["run"]:
        run()
    elif sys.argv[1:] == ["demanded"] and not found:
        sys.exit(1)
