"""One model and its training, by plain PyTorch and by dsx, for the programs of `tools/dev.py gpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dsx_testkit.benches import GPT, batch

LENGTH = 32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
CLIP, SCALE = 0.5, 1024.0
PLACES = ("none", "optimizer on host", "parameters on host", "disk")
Step = Callable[[int], torch.Tensor]


def small_model() -> torch.nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    return GPT(width=64, layers=3, heads=4, length=LENGTH)


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The micro-batch of a step, on the device."""
    ids, targets = batch(step, 0, size=2, length=LENGTH)
    return ids.cuda(), targets.cuda()


def cases() -> list[tuple[int, str, str]]:
    """(stage, dtype, place of the states): all that there are. Parameters are placed elsewhere at stage 3 only, and
    stage 0 keeps everything on the device.
    """
    allowed = {0: PLACES[:1], 1: PLACES[:2], 2: PLACES[:2], 3: PLACES}
    return [(stage, dtype, place) for stage in range(4) for dtype in DTYPES for place in allowed[stage]]


def config(stage: int, dtype: str, place: str, folder: str, clip: float = CLIP) -> dict[str, Any]:
    """The configuration of `dsx.initialize` for a case."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    host = {"device": "cpu", "pin_memory": True}
    if place in ("optimizer on host", "parameters on host"):
        zero["offload_optimizer"] = host
    if place == "parameters on host":
        zero["offload_param"] = host
    if place == "disk":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
        zero["offload_param"] = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0, "pin_memory": True}
    half = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "loss_scale": SCALE}}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
        "zero_optimization": zero,
        **half.get(dtype, {}),
    }


def engine_of(model: torch.nn.Module, settings: dict[str, Any]) -> Any:
    """An engine of dsx."""
    import dsx

    return dsx.initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]


def engine_step(engine: Any, data: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = tokens) -> Step:
    """One update; the loss stays on the device."""

    def step(number: int) -> torch.Tensor:
        loss = engine(*data(number))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def plain_step(dtype: str) -> Step:
    """The same training by PyTorch alone: parameters of the dtype, and AdamW on copies of them in fp32."""
    model = small_model().cuda().to(DTYPES[dtype])
    masters = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, **ADAM)
    scale = SCALE if dtype == "fp16" else 1.0

    def step(number: int) -> torch.Tensor:
        loss = model(*tokens(number))
        (loss * scale).backward()
        for master, parameter in zip(masters, model.parameters()):
            assert parameter.grad is not None  # noqa: S101  every parameter of this model has a gradient
            master.grad, parameter.grad = parameter.grad.float() / scale, None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters()):
                parameter.copy_(master)
        return loss.detach()

    return step
