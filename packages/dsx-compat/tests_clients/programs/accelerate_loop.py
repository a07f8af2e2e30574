"""Accelerate: a DeepSpeedPlugin or a config file, a training loop, whole weights, a resume equal to an unbroken run."""

from __future__ import annotations

import argparse
import math

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import DummyOptim, DummyScheduler
from common import STEPS, close, data, model, plain_curve, report

MICRO = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--offload", default=None)
    parser.add_argument(
        "--config", default=None, help="a JSON file that names optimizer and scheduler, for the dummies"
    )
    parser.add_argument("--from-environment", action="store_true")
    parser.add_argument("--folder")
    parser.add_argument("--skip-load", action="store_true", help="negative control: forget to load the state")
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple:
    """A fresh accelerator's objects."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=False)
    if args.from_environment:
        plugin = None  # `accelerate launch` has told everything
    elif args.config:
        plugin = DeepSpeedPlugin(hf_ds_config=args.config)
    else:
        plugin = DeepSpeedPlugin(
            zero_stage=args.stage,
            gradient_accumulation_steps=args.accumulation,
            gradient_clipping=0.0,
            offload_optimizer_device=args.offload,
            offload_param_device=args.offload if args.stage == 3 else None,
            zero3_save_16bit_model=args.stage == 3,
        )
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulation,
        deepspeed_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        step_scheduler_with_optimizer=False,
    )
    net = model()
    if args.config:
        optimizer = DummyOptim(net.parameters(), lr=0.01)
        # Accelerate divides the number of all processes' steps by the number of processes.
        scheduler = DummyScheduler(optimizer, total_num_steps=STEPS * 2, warmup_num_steps=2)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    # In the order of the data: sample i of a global micro-batch goes to rank i.
    loader = torch.utils.data.DataLoader(data(STEPS * MICRO * 2 * args.accumulation), batch_size=MICRO, shuffle=False)
    return (accelerator, *accelerator.prepare(net, optimizer, loader, scheduler))


def train(accelerator, net, optimizer, loader, scheduler, *, first: int, last: int, accumulation: int) -> list[float]:
    """Mean losses of the updates `first` to `last`."""
    curve, losses = [], []
    for number, (x, y) in enumerate(loader):
        update = number // accumulation
        if not first <= update < last:
            continue
        with accelerator.accumulate(net):
            loss = torch.nn.functional.mse_loss(net(x), y)
            losses.append(loss.detach())
            accelerator.backward(loss)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        if len(losses) == accumulation:
            curve.append(accelerator.reduce(torch.stack(losses).mean(), "mean").item())
            losses = []
    return curve


def warmup_decay(counter: int, *, warmup: int, total: int) -> float:
    """The published factor at a counter; -1 is before the first step of the schedule."""
    if counter < warmup:
        return 0.0 if counter < 1 else math.log(counter + 1) / math.log(warmup)
    return max(0.0, (total - counter) / max(1, total - warmup))


def main() -> None:
    args = arguments()
    more = {"accumulation": args.accumulation}
    parts = build(args)
    accelerator, net = parts[:2]
    assert accelerator.distributed_type.value == "DEEPSPEED" and accelerator.num_processes == 2
    if args.config:
        # WarmupDecayLR as DeepSpeed's users know it: the first two updates have the rate 0, then it rises and decays.
        rate = lambda step: 0.01 * warmup_decay(step - 1, warmup=2, total=STEPS)  # noqa: E731
        curve = train(*parts, first=0, last=STEPS, **more)
        close(curve, plain_curve(STEPS, micro=MICRO, lr=rate, clip=1.0, **more), "by config")
        report(curve=curve)
        return
    expected = plain_curve(STEPS, micro=MICRO, lr=lambda step: 0.01 / (1 + step), **more)
    half = STEPS // 2
    curve = train(*parts, first=0, last=half, **more)
    accelerator.save_state(args.folder)
    curve += train(*parts, first=half, last=STEPS, **more)
    close(curve, expected, "unbroken")
    whole = accelerator.get_state_dict(net)
    bare = accelerator.unwrap_model(net)
    assert type(bare) is torch.nn.Sequential
    if accelerator.is_main_process:
        assert {name: tuple(value.shape) for name, value in whole.items()} == {
            name: tuple(value.shape) for name, value in model().state_dict().items()
        }
    accelerator.free_memory()
    parts = build(args)
    if not args.skip_load:
        parts[0].load_state(args.folder)
    resumed = train(*parts, first=half, last=STEPS, **more)
    close(resumed, expected[half:], "resumed")
    report(curve=curve)


main()
