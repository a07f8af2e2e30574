"""Time of a whole training step of an 8-layer GPT (19 M parameters) in two pipeline stages, as users write it.

    python packages/dsx-pipe/bench/gpt.py [--rounds 3] [--steps 5] [--precision bf16] [--only 1F1B] [--json FILE]

A step is forward and backward of 8 micro-batches, clipping to a norm of 1 over all stages, and AdamW. dsx trains by
`dsx.initialize` and `train_batch`, torch by `torch.distributed.pipelining` with its own clipping and fused AdamW,
DeepSpeed by its engine; all cut the layers at the same places. Each system runs in processes of its own with one thread
each, started by torchrun; the rows "dsx launch" are started by dsx's launcher. Systems take turns in each round. There
is a table for fp32 and one for bf16, in which rows that a peer beats come first.

The ideal is that of the run: the step of one process, times (micro-batches + stages - 1) / micro-batches / stages. "Own
ideal" is simulated with the stage times that dsx measured in its last step, forward and backward alone. Goals on a
quiet machine: 1F1B is at least as fast as torch's, 1.05 times as fast as DeepSpeed's, and takes at most 1.05 of the
ideal; ZB-H1 is faster than 1F1B.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from dsx_testkit import benches
from dsx_testkit.benches import PRECISIONS, Block, losers_first, report_and_leave, run_systems
from dsx_testkit.results import Table, add_json_option
from torch import nn

WIDTH, HEADS, LAYERS, VOCAB, SEQUENCE, MICRO, STAGES = 448, 7, 8, 256, 256, 8, 2
ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
BOUNDS = {1: (0, 10), 2: (0, 5, 10), 4: (0, 3, 5, 7, 10)}
"""Where the layers are cut into so many stages: by parameters, which is dsx's and DeepSpeed's default."""


class Embed(nn.Module):
    """Tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQUENCE, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [batch, length] int64 -> [batch, length, width]."""
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))


def layers() -> list[nn.Module]:
    """The same weights for every system."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))
    return [Embed(), *(Block(WIDTH, HEADS) for _ in range(LAYERS)), head]


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of all micro-batches, [MICRO * rows, SEQUENCE] int64."""
    ids = torch.randint(0, VOCAB, (MICRO * rows, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@dataclass(frozen=True)
class Training:
    """A system that is ready: `step` does a whole step; `report` tells what the system itself says about the last."""

    step: Callable[[], Any]
    report: Callable[[], dict[str, float]] = dict


def one_process(precision: str, rows: int) -> Training:
    """No library: the same micro-batches one after the other."""
    model = nn.Sequential(*layers())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    x, y = batch(rows)

    def step() -> None:
        for a, b in zip(x.chunk(MICRO), y.chunk(MICRO)):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = loss_fn(model(a), b)
            (loss / MICRO).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Training(step)


def engine_config(precision: str, rows: int) -> dict[str, Any]:
    """What dsx and DeepSpeed are given."""
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 1.0,
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
    }


def dsx_pipeline(precision: str, rows: int, schedule: str) -> Training:
    """dsx's engine, as its pages show it."""
    import dsx

    module = dsx.pipe.PipelineModule(layers(), num_stages=STAGES, loss_fn=loss_fn, schedule=schedule)
    config = engine_config(precision, rows)
    engine: Any = dsx.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
    x, y = batch(rows)

    def report() -> dict[str, float]:
        found = engine.pipeline_report()
        return {"own ideal": 1e3 * found.ideal.length, "over own ideal": found.over_ideal}

    return Training(lambda: engine.train_batch(iter(list(zip(x.chunk(MICRO), y.chunk(MICRO))))), report)


def torch_pipelining(precision: str, rows: int, schedule: str) -> Training:
    """torch's own runtime, with the norm over all stages as its users write it."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

    dist.init_process_group()
    rank, count = dist.get_rank(), 2 * STAGES if schedule == "zbv" else STAGES
    built = layers()
    modules = [nn.Sequential(*built[a:b]) for a, b in itertools.pairwise(BOUNDS[count])]
    mine = (rank, 2 * STAGES - 1 - rank) if schedule == "zbv" else (rank,)
    stages: Any = [PipelineStage(modules[s], s, count, torch.device("cpu")) for s in mine]
    if schedule == "zbv":
        runtime: Any = ScheduleZBVZeroBubble(stages, MICRO, loss_fn=loss_fn)
    else:
        runtime = Schedule1F1B(stages[0], MICRO, loss_fn=loss_fn)
    parameters = [p for s in mine for p in modules[s].parameters()]
    optimizer = torch.optim.AdamW(parameters, fused=True, **ADAM)
    x, y = batch(rows)
    arguments, named = ((x,) if 0 in mine else ()), ({"target": y} if count - 1 in mine else {})

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            runtime.step(*arguments, **named)
        square = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()

    return Training(step)


def deepspeed_pipeline(precision: str, rows: int) -> Training:
    """DeepSpeed's engine."""
    os.environ.setdefault("LOCAL_SIZE", str(STAGES))
    deepspeed = benches.deepspeed()
    from deepspeed.pipe import PipelineModule  # pyright: ignore[reportMissingImports]

    deepspeed.init_distributed("gloo")
    module = PipelineModule(layers(), num_stages=STAGES, loss_fn=loss_fn)
    config = engine_config(precision, rows)
    config["optimizer"]["params"]["torch_adam"] = True  # its own needs a compile at run time
    config["zero_force_ds_cpu_optimizer"] = False
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    x, y = batch(rows)
    return Training(lambda: engine.train_batch(iter(list(zip(x.chunk(MICRO), y.chunk(MICRO))))))


SCHEDULES = {"1F1B": "1f1b", "ZB-H1": "zb-h1", "ZBV": "zbv"}
SYSTEMS: dict[str, tuple[int, str, Callable[[str, int], Training]]] = {
    "one process": (1, "torchrun", one_process),
    **{f"dsx, {n}": (2, "torchrun", partial(dsx_pipeline, schedule=s)) for n, s in SCHEDULES.items()},
    **{f"dsx, {n}, dsx launch": (2, "dsx", partial(dsx_pipeline, schedule=s)) for n, s in SCHEDULES.items()},
    "torch, 1F1B": (2, "torchrun", partial(torch_pipelining, schedule="1f1b")),
    "torch, ZBV": (2, "torchrun", partial(torch_pipelining, schedule="zbv")),
    "DeepSpeed, 1F1B": (2, "torchrun", deepspeed_pipeline),
}
"""By name: processes, launcher, and what builds it from a precision and the rows of a micro-batch."""


def worker(arguments: argparse.Namespace) -> NoReturn:
    """One rank of one system."""
    torch.set_num_threads(1)
    training = SYSTEMS[arguments.worker][2](arguments.precision, arguments.rows)
    times = []
    for _ in range(arguments.steps + 2):
        began = time.perf_counter()
        training.step()
        times.append(1e3 * (time.perf_counter() - began))
    report_and_leave(arguments.out, {"ms": statistics.median(times[2:]), **training.report()})


def table(precision: str, results: dict[str, list[dict[str, Any]]]) -> Table:
    """The figures of a precision and their goals."""
    ms = {name: statistics.median(row["ms"] for row in rows) for name, rows in results.items() if rows}
    ideal = ms["one process"] * (MICRO + STAGES - 1) / MICRO / STAGES if "one process" in ms else None
    found = Table(
        {"system": "", "transport": "", "ms per step": "{:.0f}", "of the ideal": "{:.3f}",
         "vs torch, same schedule": "{:.2f}x", "vs DeepSpeed": "{:.2f}x", "over own ideal": "{:.3f}"},
        "" if precision == "fp32" else precision,
    )  # fmt: skip
    rows = []
    for name, took in ms.items():
        ours = name.startswith("dsx")
        peers = [ms.get(f"torch, {name.split(', ')[1]}"), ms.get("DeepSpeed, 1F1B")] if ours else [None, None]
        over = took / ideal if ideal and "1F1B" in name else None  # the bubble of the others is smaller
        ratios = [peer and peer / took for peer in peers]
        last = results[name][-1]
        rows.append((name, last["transport"], took, over, *ratios, last.get("over own ideal")))
    for row in losers_first(rows, 4, 5):
        found.add(*row)
    main = "dsx, 1F1B"
    for text, peer, least in (
        ("1F1B at least 1.0x torch's", "torch, 1F1B", 1.0), ("1F1B at least 1.05x DeepSpeed's", "DeepSpeed, 1F1B", 1.05)
    ):  # fmt: skip
        if {main, peer} <= ms.keys():
            found.goal(f"{precision}: {text}", f"{ms[peer] / ms[main]:.2f}x", met=ms[peer] / ms[main] >= least)
    if ideal and main in ms:
        ratio = ms[main] / ideal
        text = f"{precision}: 1F1B at most 1.05 of the ideal of {ideal:.0f} ms"
        found.goal(text, f"{ratio:.3f}", met=ratio <= 1.05)
    if {main, "dsx, ZB-H1"} <= ms.keys():
        ratio = ms["dsx, ZB-H1"] / ms[main]
        found.goal(f"{precision}: ZB-H1 faster than 1F1B", f"{ratio:.3f} of its time", met=ratio < 1)
    return found


def main() -> None:
    """Parse arguments and run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1, help="sequences per micro-batch")
    parser.add_argument("--precision", choices=PRECISIONS, help="default: both")
    parser.add_argument("--only", default="", help="systems whose name contains this text")
    add_json_option(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
    results = run_systems(
        {name: (processes, launcher) for name, (processes, launcher, _) in SYSTEMS.items() if arguments.only in name},
        lambda name, precision: [
            __file__, "--worker", name, "--precision", precision, "--steps", str(arguments.steps),
            "--rows", str(arguments.rows),
        ],
        rounds=arguments.rounds,
        precisions=[arguments.precision] if arguments.precision else PRECISIONS,
    )  # fmt: skip
    for precision, found in results.items():
        table(precision, found).save(arguments.json)


if __name__ == "__main__":
    main()
