"""Runs cases of `device_matrix.py` in one process per rank, on the simulated device or on the CPU.

`device_program.py FOLDER MODES CASE,CASE,...`: RANK and WORLD_SIZE are set by whoever starts it (`device_runs.py`). One
line of JSON per case and mode goes to FOLDER/rank<RANK>.jsonl: the losses, the reports of the case, and how often the
host waited in the last step. In the place of a case "race:NAME" runs the case of a race of `planted_races.py` with it,
"alone:NAME" a case with one collective at a time on a device, and "swapped:NAME" the same, but the last rank issues its
gathers and reductions in another order than the others.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from device_matrix import CASES, dealt
from planted_races import RACES, SWAPPED
from torch import nn
from torch.nn import functional as F

SIMULATED = torch.cuda.is_available()
DEVICE = "cuda" if SIMULATED else "cpu"
FOLDER = Path(sys.argv[1])
STEPS = 4
waits: list[Any] = []
"""The host's waits of the last step of the case that runs, where the body marks them."""


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a layer norm and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.before(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.behind(x))))


class Language(nn.Module):
    """A small GPT whose forward returns the loss; `places` wraps the call of a block."""

    def __init__(self, width: int = 32, layers: int = 3, vocabulary: int = 64, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.call: Callable[..., torch.Tensor] = lambda block, x: block(x)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length, vocabulary)."""
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = self.call(block, hidden)
        return self.head(self.norm(hidden))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.logits(tokens)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def batches(number: int, device: Any = DEVICE) -> list[torch.Tensor]:
    """Token rows, which differ between the ranks; on the device before training begins."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randint(0, 64, (2, 17), generator=generator).to(device) for _ in range(number)]


def watched(last: bool) -> Any:
    """Collects the host's waits of the last step."""
    if not (SIMULATED and last):
        return nullcontext()
    import dsx_simcuda

    waits.append(dsx_simcuda.watch())
    return _Keeping(waits)


class _Keeping:
    """Puts what a `watch` block saw in the place of the block."""

    def __init__(self, into: list[Any]) -> None:
        self._into, self._block = into, into.pop()

    def __enter__(self) -> None:
        self._into.append(self._block.__enter__())

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)


def numbers(losses: list[torch.Tensor]) -> list[float]:
    """Losses as Python numbers, read behind training."""
    return [float(loss) for loss in losses]


# - Bodies: each returns losses. They import what they need, so that a case loads no more.


def make_engine(settings: dict[str, Any], model: nn.Module | None = None) -> Any:
    """An engine over the small GPT (or `model`), with AdamW and clipping."""
    import dsx

    torch.manual_seed(0)
    model = model or Language()
    text = json.dumps({k: v for k, v in settings.items()}).replace('"DISK"', json.dumps(str(FOLDER / "disk")))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        **json.loads(text),
    }
    return dsx.initialize(model=model, config=config, model_parameters=model.parameters())[0]


def micro_batch(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Forward, backward and step."""
    loss = engine(tokens[:, :-1], tokens[:, 1:])
    engine.backward(loss)
    engine.step()
    return loss.detach()


def trained(engine: Any, steps: int = STEPS) -> list[torch.Tensor]:
    """The loss of every micro-batch; the last step's host waits are kept."""
    every = engine.gradient_accumulation_steps()
    rows = batches(steps * every)
    losses = [micro_batch(engine, tokens) for tokens in rows[:-every]]
    with watched(True):
        losses += [micro_batch(engine, tokens) for tokens in rows[-every:]]
    return losses


def engine(settings: dict[str, Any]) -> list[float]:
    """Training through `dsx.initialize`."""
    made = make_engine(settings)
    losses = numbers(trained(made))
    made.destroy()
    return losses


def saved(settings: dict[str, Any]) -> list[float]:
    """Trained, saved, trained on, loaded, trained again: the same losses come again."""
    made = make_engine(settings)
    rows = batches(2)  # before training: such a copy makes the host wait
    losses = trained(made, 2)
    folder = str(FOLDER / "checkpoint")
    made.save_checkpoint(folder)
    first = numbers([micro_batch(made, tokens) for tokens in rows])
    made.load_checkpoint(folder)
    again = numbers([micro_batch(made, tokens) for tokens in rows])
    assert first == again, f"after loading: got {again}, expected {first}"
    made.destroy()
    return [*numbers(losses), *first]


def states_moved_out(settings: dict[str, Any]) -> list[float]:
    """All states leave the device between steps and come back, without a wait of the host."""
    made = make_engine(settings)
    losses = trained(made, 2)
    for non_blocking in (False, True):
        made.offload_states(pin_memory=True, non_blocking=non_blocking)
        torch.zeros(100_000, device=DEVICE).add_(1)  # takes the memory that was given back
        made.reload_states(non_blocking=non_blocking)
        losses += trained(made, 1)
    made.destroy()
    return numbers(losses)


def evaluated_between(settings: dict[str, Any]) -> list[float]:
    """Tokens are generated between the steps, and inside an accumulation."""
    made = make_engine(settings)
    losses = []
    for tokens in batches(STEPS * 2):
        losses.append(micro_batch(made, tokens))
        made.eval()
        with torch.no_grad():
            row = tokens[:, :4]
            for _ in range(3):
                row = torch.cat([row, made(row)[:, -1:].argmax(-1)], dim=1)
            losses.append(row.float().mean())
        made.train()
    made.destroy()
    return numbers(losses)


def activations_on_host(settings: dict[str, Any]) -> list[float]:
    """The inputs of every block wait in host memory for backward."""
    import dsx_activations

    dsx_activations.configure(None, checkpoint_in_cpu=True)
    try:
        torch.manual_seed(0)
        model = Language()
        model.call = dsx_activations.checkpoint
        made = make_engine(settings, model)
        losses = numbers(trained(made))
        made.destroy()
    finally:
        dsx_activations.reset()
    return losses


class InPieces(Language):
    """The small GPT with feed-forward parts and the loss on one piece of the sequence after the other."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        import dsx_activations

        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = dsx_activations.run_in_tiles(self.norm, self.call(block, hidden), tiles=3)
        return dsx_activations.linear_cross_entropy(hidden, self.head.weight, targets, chunk=10)


def activations_alone(settings: dict[str, Any]) -> list[float]:
    """dsx-activations without dsx-zero and an engine: inputs wait in host memory, chosen by a budget or by hand. Two
    ranks train under DDP or `fully_shard`.
    """
    import dsx_activations

    dsx_activations.configure(None, **settings["kept"])
    torch.manual_seed(0)
    model: Any = (InPieces() if settings.get("pieces") else Language()).to(DEVICE)
    if "budget" in settings:
        dsx_activations.apply_memory_budget(model, settings["budget"])
    else:
        model.call = dsx_activations.checkpoint
    if settings.get("wrapper") == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif settings.get("wrapper") == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    try:
        for number, tokens in enumerate(batches(STEPS)):
            with watched(number == STEPS - 1):
                loss = model(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return numbers(losses)
    finally:
        dsx_activations.configure()


def own_loop(settings: dict[str, Any]) -> list[float]:
    """`dsx_zero.shard` in one's own loop; `device` may be another one than the current device."""
    import dsx_zero

    settings = dict(settings)
    device = f"cuda:{settings.pop('device', 0)}" if SIMULATED else "cpu"
    settings.pop("device", None)
    torch.manual_seed(0)
    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)  # noqa: E731
    model, optimizer = dsx_zero.shard(Language().to(device), adamw, config=settings)
    losses = []
    for number, tokens in enumerate(batches(STEPS, device)):
        with watched(number == STEPS - 1):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return numbers(losses)


def pipeline(settings: dict[str, Any]) -> list[float]:
    """A pipeline over all ranks."""
    import dsx_pipe

    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 4)]
    schedule = settings["schedule"]
    stages = dsx_pipe.PipelineModule(
        layers, num_stages=dist.get_world_size(), loss_fn=nn.functional.mse_loss, schedule=schedule
    ).to(DEVICE)
    runner = dsx_pipe.Pipeline(stages, schedule, micro_batches=settings.get("micro_batches", 4))
    optimizer = torch.optim.AdamW(stages.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(1), []
    rows = [torch.randn(32, 16, generator=generator).to(DEVICE) for _ in range(STEPS)]
    for number, inputs in enumerate(rows):
        with watched(number == STEPS - 1):
            losses.append(runner.step(inputs, inputs[:, :4]))
            optimizer.step()
            optimizer.zero_grad()
    return numbers(losses)


class Experts(nn.Module):
    """A layer of experts between two linear ones; forward returns the loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import dsx_moe

        super().__init__()
        expert = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        drawn = {"top2_2nd_expert_sampling": False, "use_rts": False}  # random numbers are not the CPU's
        self.moe = dsx_moe.MoE(
            hidden_size=16, expert=expert, num_experts=4, ep_size=dist.get_world_size(), k=2, **drawn, **settings
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, balance, _ = self.moe(self.first(x))
        return self.last(hidden).square().mean() + 0.01 * balance


def experts(settings: dict[str, Any]) -> list[float]:
    """Experts on all ranks, under ZeRO-1."""
    torch.manual_seed(0)
    settings = dict(settings)
    zero = settings.pop("zero_optimization", {"stage": 1})
    made = make_engine({"zero_optimization": zero, "gradient_accumulation_steps": 1}, Experts(settings))
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    rows = [torch.randn(2, 8, 16, generator=generator).to(DEVICE) for _ in range(STEPS)]
    for number, inputs in enumerate(rows):
        with watched(number == STEPS - 1):
            loss = made(inputs)
        made.backward(loss)
        made.step()
        losses.append(loss.detach())
    made.destroy()
    return numbers(losses)


class Sliced(nn.Module):
    """A feed-forward part whose weights are sliced over the ranks; forward returns the loss."""

    def __init__(self) -> None:
        from dsx_pipe.tensor import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        self.first, self.up, self.down = nn.Linear(16, 16), ColumnParallelLinear(16, 64), RowParallelLinear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.down(F.gelu(self.up(self.first(x))))).square().mean()


def tensor_slices(settings: dict[str, Any]) -> list[float]:
    """Slices of weights in one's own loop: all ranks see the same batches."""
    torch.manual_seed(0)
    model = Sliced().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(1), []
    for inputs in [torch.randn(4, 16, generator=generator).to(DEVICE) for _ in range(STEPS)]:
        loss = model(inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return numbers(losses)


# - The runner


def run(name: str, mode: str) -> dict[str, Any]:
    """One case in one mode: losses or the error, reports, waits."""
    kind, _, rest = name.rpartition(":")
    race = RACES[rest] if kind == "race" else None
    case, before = CASES[race.case if race else rest], 0
    if kind == "swapped" and dist.get_rank() == dist.get_world_size() - 1:
        race = SWAPPED
    waits.clear()
    if SIMULATED:
        import dsx_simcuda

        dsx_simcuda.set_option("mode", mode)
        dsx_simcuda.set_option("delay_us", race.delay_us if race else 300)
        dsx_simcuda.set_option("one_collective", kind in ("alone", "swapped"))
        before = len(dsx_simcuda.reports())
    result: dict[str, Any] = {"name": name, "mode": mode, "losses": [], "error": ""}
    try:
        with race.plant() if race else nullcontext():
            result["losses"] = globals()[case.body](case.settings)
    except Exception:  # the test says which case failed, and the next ones run
        result["error"] = traceback.format_exc()
    gc.collect()
    if SIMULATED:
        dsx_simcuda.synchronize()
        torch.cuda.empty_cache()
        found = dsx_simcuda.reports()[before:]
        result["reports"] = [str(report) for report in found[:5]]
        result["stacks"] = [[str(f) for f in (*r.stack, *r.earlier_stack)] for r in found[:40]]
        result["count"] = len(found)
        result["waits"] = [[s.what, s.where, times] for seen in waits for s, times in seen.host_syncs.items()]
    return result


def main() -> None:
    modes, names = sys.argv[2].split(","), sys.argv[3].split(",")
    if SIMULATED:
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if SIMULATED else "gloo")
    with open(FOLDER / f"rank{dist.get_rank()}.jsonl", "a") as out:
        for number, name in enumerate(names):
            each = ["slow-side" if ":" in name else dealt(number)]
            for mode in each if modes == ["each"] else modes:
                print(f"case {name} in mode {mode}", flush=True)
                out.write(json.dumps(run(name, mode)) + "\n")
                out.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
