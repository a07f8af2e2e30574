"""The systems of the step-time bench: each builds its training step around the same model, data and AdamW.

Every builder takes the precision, "fp32" or "bf16", and returns `step(ids, targets) -> loss`. What is timed is one
whole optimizer step: forward, backward, clipping to norm 1 and AdamW with learning rate 3e-4. bf16 is what each
system's users write: autocast for a plain loop and for DDP, `MixedPrecisionPolicy` for FSDP2, `"bf16": {"enabled":
true}` for the engines. All of these keep fp32 weights for the optimizer. Nothing else is set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from dsx_testkit import benches
from dsx_testkit.benches import GPT

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def _plain(model: Any, optimizer: torch.optim.Optimizer, *, autocast: bool = False) -> Step:
    parameters = list(model.parameters())

    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def raw(precision: str) -> Step:
    """One process, no library."""
    model = GPT()
    return _plain(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM), autocast=precision == "bf16")


def ddp(precision: str) -> Step:
    """torch DistributedDataParallel."""
    torch.distributed.init_process_group()
    model = torch.nn.parallel.DistributedDataParallel(GPT())
    return _plain(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM), autocast=precision == "bf16")


def fsdp2(precision: str) -> Step:
    """torch fully_shard, one unit a block."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group()
    low = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low)
    model = GPT()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return _plain(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM))


def _config(stage: int, precision: str, host: bool) -> dict[str, Any]:
    offload = {"offload_optimizer": {"device": "cpu"}} if host else {}
    return {
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own needs a compile at run time
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
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


def deepspeed(precision: str, stage: int, host: bool = False) -> Step:
    """DeepSpeed on its CPU accelerator, with torch's AdamW (its own needs a compile at run time)."""
    return _engine(benches.deepspeed(), stage, _config(stage, precision, host))


def dsx(precision: str, stage: int, host: bool = False) -> Step:
    """dsx as configured by the same JSON; its optimizer choice is its own."""
    import dsx as library

    config = _config(stage, precision, host)
    del config["optimizer"]["params"]["torch_adam"], config["zero_force_ds_cpu_optimizer"]
    return _engine(library, stage, config)


@dataclass(frozen=True)
class System:
    """A row of the table.

    Attributes:
        processes: how many.
        build: makes the step of a precision. It makes the process group, too, as a program does.
        stage: of ZeRO, where there is one.
        launcher: "torchrun", or "dsx": `dsx launch`.
    """

    processes: int
    build: Callable[[str], Step]
    stage: int | None = None
    launcher: str = "torchrun"


STAGES = range(4)
SYSTEMS: dict[str, System] = {
    "raw, 1 process": System(1, raw),
    "dsx stage 0, 1 process": System(1, partial(dsx, stage=0)),
    "torch DDP": System(2, ddp),
    "torch FSDP2": System(2, fsdp2),
    **{f"deepspeed stage {s}": System(2, partial(deepspeed, stage=s), s) for s in STAGES},
    **{f"dsx stage {s}": System(2, partial(dsx, stage=s), s) for s in STAGES},
    "deepspeed stage 2, host optimizer": System(2, partial(deepspeed, stage=2, host=True), 2),
    **{f"dsx stage {s}, host optimizer": System(2, partial(dsx, stage=s, host=True), s) for s in (1, 2, 3)},
    **{f"dsx stage {s}, dsx launch": System(2, partial(dsx, stage=s), s, "dsx") for s in STAGES},
}
