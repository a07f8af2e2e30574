"""A training program on two ranks that starts torch in one of the ways users do; rank 0 writes what it found.

`device_starts.py WAY FILE`. The ways differ in what `init_process_group` is given, and in the defaults of the process.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import dsx
import dsx_simcuda
import torch
import torch.distributed as dist
from torch import nn

OFFLOAD = {
    "offload_param": {"device": "cpu", "pin_memory": True},
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
}
CONFIG = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
STAGES = {"0": {"stage": 0}, "2": {"stage": 2}, "3, offloaded": {"stage": 3, **OFFLOAD}}


def begin(way: str) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if way != "no current device":
        torch.cuda.set_device(device)
    if way == "bound device":
        dist.init_process_group(device_id=device)
    elif way == "dsx":
        dsx.init_distributed()
    else:
        dist.init_process_group(*(["nccl"] if way == "nccl" else []))
    if way == "default device":
        torch.set_default_device(device)
    if way == "default dtype":
        torch.set_default_dtype(torch.float64)
    if way == "deterministic":
        torch.use_deterministic_algorithms(True)


def trained(settings: dict, folder: Path) -> dict:
    torch.manual_seed(0)
    kind: Any = {"device": "cpu", "dtype": torch.float32}  # so that all ways begin with the same values
    model = nn.Sequential(nn.Linear(16, 32, **kind), nn.GELU(), nn.Linear(32, 1, **kind))
    config = {**CONFIG, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "zero_optimization": settings}
    engine, *_ = dsx.initialize(model=model, config=config)
    losses = []
    for number in range(4):
        loss = engine(inputs(number + dist.get_rank(), engine.device)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    engine.save_checkpoint(str(folder))
    engine.load_checkpoint(str(folder))
    with torch.inference_mode():
        losses.append(engine(torch.ones(4, 16, dtype=torch.float32, device=engine.device)).sum())
    device = str(engine.device)
    engine.destroy()
    return {"losses": [loss.item() for loss in losses], "device": device}


def with_experts() -> dict:
    import dsx_moe

    torch.manual_seed(0)
    kind: Any = {"device": "cpu", "dtype": torch.float32}
    expert = nn.Sequential(nn.Linear(16, 32, **kind), nn.ReLU(), nn.Linear(32, 16, **kind))

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("cpu"):
                self.moe = dsx_moe.MoE(16, expert, num_experts=4, ep_size=2, k=1).float()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, balance, *_ = self.moe(x)
            return out.square().mean() + 0.01 * balance

    engine, *_ = dsx.initialize(model=Routed(), config=CONFIG)
    losses = []
    for number in range(3):
        losses.append(engine(inputs(number + dist.get_rank(), engine.device)))
        engine.backward(losses[-1])
        engine.step()
    found = {"losses": [loss.item() for loss in losses], "device": str(engine.device)}
    engine.destroy()
    return found


def in_stages() -> dict:
    import dsx_pipe

    torch.manual_seed(0)
    kind: Any = {"device": "cpu", "dtype": torch.float32}
    layers = [nn.Linear(16, 16, **kind), nn.Tanh(), nn.Linear(16, 16, **kind), nn.Tanh()]
    model = dsx_pipe.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    engine, *_ = dsx.initialize(model=model, config={**CONFIG, "gradient_accumulation_steps": 4})
    data = iter([(inputs(number, "cpu"), torch.zeros(4, 16, dtype=torch.float32, device="cpu")) for number in range(8)])
    found = {"losses": [float(engine.train_batch(data)) for _ in range(2)], "device": str(engine.device)}
    engine.destroy()
    return found


def inputs(number: int, device: Any) -> torch.Tensor:
    return torch.arange(64.0, dtype=torch.float32, device=device).view(4, 16).mul(number + 1).sin()


def main() -> None:
    way, file = sys.argv[1], Path(sys.argv[2])
    begin(way)
    found = {name: trained(settings, file.with_suffix(f".{name[0]}")) for name, settings in STAGES.items()}
    found |= {"experts": with_experts(), "pipeline": in_stages()}
    found["reports"] = [str(report) for report in dsx_simcuda.reports()]
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
