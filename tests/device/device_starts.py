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
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": settings,
    }
    engine, *_ = dsx.initialize(model=model, config=config)
    losses = []
    for number in range(4):
        numbers = torch.arange(64.0, dtype=torch.float32, device=engine.device).view(4, 16)
        loss = engine(numbers.mul(number + 1 + dist.get_rank()).sin()).square().mean()
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


def main() -> None:
    way, file = sys.argv[1], Path(sys.argv[2])
    begin(way)
    found = {name: trained(settings, file.with_suffix(f".{name[0]}")) for name, settings in STAGES.items()}
    found["reports"] = [str(report) for report in dsx_simcuda.reports()]
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
