"""Writes golden checkpoints with the dsx that is on the path: `python make.py FOLDER`.

Each version of the format has a folder here (`v1`, `v2`, ...), written once by the code of its time and never again:
`test_checkpoint_golden.py` loads all of them with the code of today. A case is a checkpoint folder,
`<case>.safetensors` with what its tensors must be (asked from the engine, not from the checkpoint) and `<case>.json`
with the numbers beside them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from dsx_testkit import run_ranks

WIDTH = 7


class Model(torch.nn.Module):
    """Odd sizes, a tied weight, a frozen block, a scalar parameter and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.outer = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer.weight = self.inner.weight
        self.gain = torch.nn.Parameter(torch.tensor(1.5))
        self.blocks[1].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.arange(5))

    def forward(self, x):
        self.seen += 1
        x = self.inner(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.gain * self.outer(x)


ADAMW = {"type": "AdamW", "params": {"lr": 0.05, "betas": [0.8, 0.95], "weight_decay": 0.02}}
CASES = {
    "adamw-fp32-stage2-2ranks": {
        "world": 2, "stage": 2, "optimizer": ADAMW, "states": ["exp_avg", "exp_avg_sq"],
        "client": True, "data": True,
        "more": {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 5}}},
    },
    "adamw-bf16-stage3-3ranks": {
        "world": 3, "stage": 3, "optimizer": ADAMW, "states": ["exp_avg", "exp_avg_sq"],
        "more": {"bf16": {"enabled": True}},
    },
    "sgd-fp16-stage0-1rank": {
        "world": 1, "stage": 0, "states": ["momentum_buffer"], "exclude_frozen": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "more": {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}},
    },
    "onebitadam-fp32-stage0-2ranks": {
        "world": 2, "stage": 0, "states": ["exp_avg", "exp_avg_sq"],
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}},
        "more": {},
    },
}  # fmt: skip
STEPS = 4


def build(case, stage=None):
    """An engine of a case; `stage` in place of the case's own."""
    import dsx

    spec = CASES[case]
    torch.manual_seed(3)
    model = Model()
    config = {
        "train_batch_size": 12,
        "optimizer": spec["optimizer"],
        "zero_optimization": {
            "stage": spec["stage"] if stage is None else stage, "stage3_param_persistence_threshold": 0
        },
        "gradient_clipping": 0 if spec["optimizer"]["type"] == "OneBitAdam" else 0.5,
        "steps_per_print": None,
        **spec["more"],
    }  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.arange(30)) if spec.get("data") else None
    parameters = [p for p in model.parameters() if p.requires_grad]
    return dsx.initialize(model=model, model_parameters=parameters, training_data=data, config=config)[0]


def train(engine, rank, world, first, count):
    """Mean losses over the ranks of `count` updates on batches that depend on the step alone."""
    import dsx_comm

    losses = []
    for step in range(first, first + count):
        x, y = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(step))
        mine = slice(rank * 12 // world, (rank + 1) * 12 // world)
        dtype = next(engine.module.parameters()).dtype
        loss = torch.nn.functional.mse_loss(engine(x[mine].to(dtype)), y[mine].to(dtype))
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        if world > 1:
            dsx_comm.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def state_of(engine, states):
    """Masters, optimizer states and buffers, whole; collective."""
    from dsx.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {f"weights/{name}": value.clone() for name, value in engine.module_state_dict().items()}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"master/{name}"] = safe_get_full_fp32_param(parameter).clone()
            for key in states:
                found[f"{key}/{name}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found


def client_state():
    """Everything that JSON alone cannot say."""
    return {
        "note": "here", "numbers": [1, 2.5, None, True, float("inf")], "pair": (1, ("a",)), 3: {"__odd": 1},
        "tensors": {
            "half": torch.arange(6).half().view(2, 3), "empty": torch.zeros(0, 2), "flags": torch.tensor([True])
        },
    }  # fmt: skip


def run(rank, world, case, folder):
    """Train, save, note what is there, go on."""
    spec = CASES[case]
    engine = build(case)
    losses = train(engine, rank, world, 0, STEPS)
    if spec.get("data"):
        loader = iter(engine.training_dataloader)
        next(loader)
    client = client_state() if spec.get("client") else None
    engine.save_checkpoint(folder, client_state=client, exclude_frozen_parameters=spec.get("exclude_frozen", False))
    tensors = state_of(engine, spec["states"])
    facts = {"losses": losses, "loss_scale": engine._parts.update.scaler.state_dict(), "lr": engine.get_lr()}
    facts["next_losses"] = train(engine, rank, world, STEPS, 2)
    return (tensors, facts) if rank == 0 else None


@dataclass
class Part:
    """One whole tensor with an optimizer state, for `dsx.checkpoint.save`."""

    name: str
    param: torch.Tensor
    shape: tuple = (6, 4)
    start: int = 0
    stop: int = 24
    aliases: tuple = ()
    trainable: bool = True
    ranges: tuple = ()

    @property
    def master(self):
        return self.param

    @property
    def states(self):
        return {"exp_avg": self.param * 2, "step": 3}


def write_split(folder):
    """A checkpoint of several files per kind."""
    from dsx.checkpoint import save
    from dsx_checkpoint.ranks import Solo

    parts = [Part(f"w{i}", torch.arange(24.0) + 100 * i) for i in range(5)]
    module = torch.nn.Module()
    save(folder, "split", module=module, slices=parts, state={"n": 5}, ranks=Solo(), max_file_bytes=200)


def write(folder):
    """All cases."""
    from safetensors.torch import save_file

    write_split(folder / "split")

    for case, spec in CASES.items():
        tensors, facts = run_ranks(run, spec["world"], case, str(folder / case))[0]
        save_file({name: t.contiguous().clone() for name, t in tensors.items()}, folder / f"{case}.safetensors")
        (folder / f"{case}.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True)
    write(target)
    sys.stdout.write("".join(f"{p.relative_to(target)} {p.stat().st_size}\n" for p in sorted(target.rglob("*.*"))))
