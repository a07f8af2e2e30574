"""The systems of the step-time bench: each builds its training step around the same model, data and AdamW.

Every builder returns `step(ids, targets) -> loss`. What is timed is one whole optimizer step: forward, backward,
clipping to norm 1 and AdamW with learning rate 3e-4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from dsx_testkit.benches import GPT

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def _plain(model: Any, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> Step:
    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def raw() -> Step:
    """One process, no library."""
    model = GPT()
    return _plain(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM), list(model.parameters()))


def ddp() -> Step:
    """torch DistributedDataParallel."""
    model = torch.nn.parallel.DistributedDataParallel(GPT())
    return _plain(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM), list(model.parameters()))


def fsdp2() -> Step:
    """torch fully_shard, one unit a block."""
    from torch.distributed.fsdp import fully_shard

    model = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return _plain(model, torch.optim.AdamW(model.parameters(), **ADAM), list(model.parameters()))


def _config(stage: int, host: bool = False) -> dict[str, Any]:
    offload = {"offload_optimizer": {"device": "cpu"}} if host else {}
    return {
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own needs a compile at run time
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"]), "torch_adam": True}},
        "zero_optimization": {"stage": stage, **offload},
    }


def _engine(library: Any, stage: int, config: dict[str, Any]) -> Step:
    model = GPT()
    engine, *_ = library.initialize(model=model, model_parameters=list(model.parameters()), config=config)

    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = engine(ids, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def deepspeed(stage: int, host: bool = False) -> Step:
    """DeepSpeed on its CPU accelerator, with torch's AdamW (its own needs a compile at run time)."""
    import deepspeed as library  # pyright: ignore[reportMissingImports]

    return _engine(library, stage, _config(stage, host))


def dsx(stage: int, host: bool = False) -> Step:
    """dsx as configured by the same JSON; its optimizer choice is its own."""
    import dsx as library

    config = _config(stage, host)
    del config["optimizer"]["params"]["torch_adam"], config["zero_force_ds_cpu_optimizer"]
    return _engine(library, stage, config)


@dataclass(frozen=True)
class System:
    """A row of the table. `stage`: of ZeRO, where there is one; `backend` None: the library makes its process group
    itself.
    """

    processes: int
    build: Callable[[], Step]
    stage: int | None = None
    backend: str | None = "gloo"


SYSTEMS: dict[str, System] = {
    "raw, 1 process": System(1, raw),
    "dsx stage 0, 1 process": System(1, lambda: dsx(0)),
    "torch DDP": System(2, ddp),
    "torch FSDP2": System(2, fsdp2),
    **{f"deepspeed stage {s}": System(2, lambda s=s: deepspeed(s), s, None) for s in range(4)},
    **{f"dsx stage {s}": System(2, lambda s=s: dsx(s), s) for s in range(4)},
    "deepspeed stage 2, host optimizer": System(2, lambda: deepspeed(2, host=True), 2, None),
    **{f"dsx stage {s}, host optimizer": System(2, lambda s=s: dsx(s, host=True), s) for s in (1, 2, 3)},
    **{f"dsx stage {s}, shared memory": System(2, lambda s=s: dsx(s), s, "dsx") for s in range(4)},
}
