"""For programs over Hugging Face's Trainer: the engine's arguments, and the loss of each step where a call trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from common import RANK, report


def engine_settings(stage: int, **zero: Any) -> dict[str, Any]:
    """Arguments of the Trainer with an engine of this stage, whose process group exists then, or without one (-1).

    Args:
        **zero: more keys of `zero_optimization`.
    """
    if stage < 0:
        return {"ddp_backend": "gloo", "use_cpu": True}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate import PartialState  # lazy import: it reads the environment

    PartialState(backend="gloo")
    zero |= {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    return {
        "deepspeed": {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": zero,
        },
        "accelerator_config": {"use_configured_state": True},
    }


def record_losses() -> list[torch.Tensor]:
    """A list that gets the loss of every training step: the mean over the ranks, before the log rounds it."""
    from transformers import Trainer

    losses: list[torch.Tensor] = []
    step = Trainer.training_step

    def recorded(self, *args, **kwargs):
        loss = step(self, *args, **kwargs)
        mean = loss.detach().double().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean / torch.distributed.get_world_size())
        return loss

    Trainer.training_step = recorded
    return losses


def report_run(losses: list[torch.Tensor], saved: Path) -> None:
    """Leave the curve, and shapes and norms of what the framework saved."""
    from safetensors.torch import load_file

    found = load_file(saved) if RANK == 0 else {}
    assert RANK or (found and all(value.numel() for value in found.values()))
    report(
        curve=[loss.item() for loss in losses],
        saved={name: [list(v.shape), v.double().norm().item()] for name, v in found.items()},
    )
