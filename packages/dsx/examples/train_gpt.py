"""Train a byte-level GPT with dsx: sharded state, any number of processes, from a config file.

    python train_gpt.py                                         # one process
    dsx launch --num_procs 2 train_gpt.py --out runs/gpt        # two processes on CPU; without --num_procs: every GPU
    dsx launch --num_procs 2 train_gpt.py --stage 3 --data ~/books --seconds 600
    python train_gpt.py --resume runs/gpt --stage 1 --generate 400   # go on, with any stage and number of processes

The output directory gets checkpoints, `events.jsonl` and `csv/` (metrics), `memory/` (per process) and `report.html`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import dsx
import torch
from gpt import GPT, GPTConfig, Windows, generate, load_text
from progress import progress_display

HERE = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--deepspeed_config", default=str(HERE / "gpt.json"), metavar="FILE", help="JSON configuration of the engine"
    )
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    parser.add_argument("--data", type=Path, help="file or folder of text (default: Python's standard library)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="output directory")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from this output directory's last checkpoint")
    parser.add_argument("--stage", type=int, help="ZeRO stage (default: the config's)")
    parser.add_argument("--steps", type=int, help="length of the schedule in optimizer steps (default: the config's)")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="stop there, to be resumed later")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after that much training")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="print a sample of N bytes at the end")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in vars(GPTConfig()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"of the model (default: {value})")
    options = parser.parse_args()
    if options.resume is None and (options.out / "meta.json").exists():
        parser.error(
            f"--out {options.out}: an earlier run is there; go on with --resume {options.out}, or name another"
        )
    options.out = options.resume or options.out
    return options


def configuration(options: argparse.Namespace) -> dict:
    """The config file, with what the command line overrides. `dsx.initialize` would also take the path itself."""
    config = json.loads(Path(options.deepspeed_config).read_text(encoding="utf-8"))
    if options.stage is not None:
        config.setdefault("zero_optimization", {})["stage"] = options.stage
    schedule = config["scheduler"]["params"]
    schedule["total_num_steps"] = options.steps = options.steps or schedule["total_num_steps"]
    return config


def bits_per_byte(engine: dsx.Engine, text: Windows, samples: int = 128, batch: int = 32) -> float:
    """Mean cross entropy on windows spread over the held-out text; every process measures its share."""
    chosen = torch.linspace(0, len(text) - 1, samples).long().tolist()[engine.global_rank :: engine.world_size]
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    engine.eval()
    with torch.no_grad():
        for start in range(0, len(chosen), batch):
            windows = [text[i] for i in chosen[start : start + batch]]
            tokens, targets = (torch.stack(part).to(engine.device) for part in zip(*windows))
            total += torch.tensor([float(engine(tokens, targets)) * len(windows), len(windows)], device=engine.device)
    engine.train()
    if engine.world_size > 1:
        dsx.comm.all_reduce(total)
    return float(total[0] / total[1]) / math.log(2)


def out_of_time(engine: dsx.Engine, deadline: float) -> bool:
    """Whether any process is past the deadline; all get the same answer, so that they stop at the same step."""
    late = torch.tensor([float(time.monotonic() > deadline)], device=engine.device)
    if engine.world_size > 1:
        dsx.comm.all_reduce(late)
    return bool(late > 0)


def writers(out: Path) -> dict:
    """Metrics go to `events.jsonl`, which the report is made from, and to one CSV file each. TensorBoard, W&B and Comet
    are further sections of the same kind."""
    return {
        "jsonl": {"enabled": True, "output_path": str(out), "job_name": ""},
        "csv_monitor": {"enabled": True, "output_path": str(out), "job_name": "csv"},
    }


def train(engine: dsx.Engine, loader, held_out: Windows, options: argparse.Namespace) -> float:
    """Train up to the last step and return the validation loss in bits per byte."""
    last_step = min(options.steps, options.stop_at or options.steps)
    deadline = time.monotonic() + options.seconds
    speed = dsx.monitor.ThroughputTimer(engine.train_batch_size(), tokens_per_sample=options.context)
    monitor = dsx.monitor.MonitorMaster(writers(options.out))  # only rank 0 writes
    memory = dsx.monitor.MemoryLog(options.out)  # every rank writes its own file
    display = progress_display(engine, last_step)
    batches = iter(dsx.RepeatingLoader(loader))

    def validate() -> float:
        with speed.pause():
            bits = bits_per_byte(engine, held_out)
        monitor.write_events([("Validation/Samples/bits_per_byte", bits, engine.global_samples)])
        display.note(f"step {engine.global_steps:4d}  validation {bits:.3f} bits per byte")
        return bits

    with monitor, memory, display:
        validate()
        while engine.global_steps < last_step:
            tokens, targets = (part.to(engine.device, non_blocking=True) for part in next(batches))
            loss = engine(tokens, targets)
            engine.backward(loss)
            update = engine.is_gradient_accumulation_boundary()
            engine.step()
            report, samples = engine.last_step, engine.global_samples
            if not update or report is None:
                continue  # gradients are still being accumulated

            speed.step()
            memory.record(samples)
            figures = {"train_loss": report.loss, "lr": report.lr[0], "grad_norm": report.grad_norm}
            events = [(f"Train/Samples/{name}", value, samples) for name, value in figures.items() if value is not None]
            monitor.write_events(events + speed.events(samples))
            display.step(report, speed.tokens_per_second)
            if engine.global_steps % 40 == 0 and engine.global_steps < last_step:
                validate()
            if engine.global_steps % 10 == 0 and out_of_time(engine, deadline):
                display.note(f"stopped after {options.seconds:.0f} s")
                break
        return validate()


def main() -> None:
    """Build, resume if asked to, train, save, report."""
    options = arguments()
    config = configuration(options)
    torch.manual_seed(options.seed)
    text, held_out = load_text(options.data)  # tensors of bytes
    model = GPT(GPTConfig(options.layers, options.width, options.heads, options.context))
    parameters = sum(p.numel() for p in model.parameters())

    # Everything dsx needs to know: the model, the data, the config. The engine moves the model to this process' device.
    engine, _, loader, _ = dsx.initialize(model=model, training_data=Windows(text, options.context), config=config)

    client_state = {}
    if options.resume is not None:
        folder, client_state = engine.load_checkpoint(str(options.out / "checkpoints"))
        if folder is None:
            raise SystemExit(f"--resume {options.resume}: there is no checkpoint in {options.out / 'checkpoints'}")
    if engine.global_rank == 0:
        dsx.monitor.start_run(
            options.out,
            title=f"Byte-level GPT, {parameters / 1e6:.2f} M parameters",
            config=config,
            world_size=engine.world_size,
            step=engine.global_samples,
            facts={"parameters": parameters, "training text, bytes": len(text), "device": str(engine.device)},
        )
    if client_state and engine.global_rank == 0:
        print(f"resumed at step {engine.global_steps}, saved with {client_state['bits']:.4f} bits per byte")

    bits = train(engine, loader, Windows(held_out, options.context), options)
    engine.save_checkpoint(str(options.out / "checkpoints"), client_state={"bits": bits})

    sample = b""
    if options.generate:
        sample = generate(engine.eval(), b"def ", length=options.generate, context=options.context)
    if engine.global_rank == 0:
        if sample:
            print(f"--- a sample of {options.generate} bytes\n{sample.decode(errors='replace')}\n---")
        print(f"report: {dsx.monitor.write_report(options.out)}")
    engine.destroy()


if __name__ == "__main__":
    main()
