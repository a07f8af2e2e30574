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
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from device_matrix import CASES, dealt
from device_models import (
    Adapted,
    Block,
    Experts,
    Language,
    ManyExperts,
    Mixed,
    SentLayers,
    Sliced,
    SlicedLayers,
    Words,
    next_words,
)  # fmt: skip
from device_streams import DEVICE, FOLDER, SIMULATED, STEPS, aside, compressed, let_go, numbers  # noqa: F401  bodies
from planted_races import RACES, SWAPPED
from torch import nn
from torch.nn import functional as F

waits: list[Any] = []
"""The host's waits of the last step of the case that runs, where the body marks them."""


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


def clipped_at_times(settings: dict[str, Any]) -> list[float]:
    """Small gradients in two updates of three: the step on the host is kept in some updates, and undone in others."""
    made = make_engine({**settings, "gradient_accumulation_steps": 1})
    losses = []
    for number, tokens in enumerate(batches(9)):
        loss = made(tokens[:, :-1], tokens[:, 1:])
        made.backward(loss * (30.0 if number % 3 == 2 else 1e-3))
        made.step()
        losses.append(loss.detach())
    made.destroy()
    return numbers(losses)


def hidden_host_step(settings: dict[str, Any]) -> list[float]:
    """The default clipping, on a slow device: the host steps nearly everything before backward has ended. The device's
    slowness is a wait of each block's backward until the host has stepped the blocks behind the next two.
    """
    depth, width, done, begun = 64, 32, [0], [0]

    @contextmanager
    def span(lane: str, what: str, size: int) -> Iterator[None]:
        yield
        done[0] += size if lane == "host step" else 0

    def slow(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda grad: slowly())

    def slowly() -> None:
        begun[0] += 1
        end = time.monotonic() + 5
        while done[0] < (begun[0] - 3) * size and time.monotonic() < end:
            time.sleep(0.001)

    blocks = [nn.Linear(width, width) for _ in range(depth)]
    size = sum(p.numel() for p in blocks[0].parameters())
    made = make_engine({**settings, "gradient_accumulation_steps": 1}, nn.Sequential(*blocks))
    inputs, losses = torch.ones(2, width, device=DEVICE), []
    for step in range(3):
        if step and SIMULATED:  # the first step shows that nothing is clipped
            begun[0], done[0] = 0, 0
            made.optimizer.control.listen(span)
            handles = [block.register_forward_hook(slow) for block in made.module]
        loss = made(inputs).square().mean() * 1e-3
        made.backward(loss)
        assert not (step and SIMULATED) or done[0] >= 0.95 * depth * size, f"{done[0]} of {depth * size} were hidden"
        made.step()
        losses.append(loss.detach())
        for handle in handles if step and SIMULATED else ():
            handle.remove()
    made.destroy()
    return numbers(losses)


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
    settings = dict(settings)
    where = aside if settings.pop("aside", False) else nullcontext
    made = make_engine(settings)
    losses = trained(made, 2)
    for non_blocking in (False, True):
        with where():
            made.offload_states(pin_memory=True, non_blocking=non_blocking)
        torch.zeros(100_000, device=DEVICE).add_(1)  # takes the memory that was given back
        made.reload_states(non_blocking=non_blocking)
        losses += trained(made, 1)
    made.destroy()
    return numbers(losses)


def pushed_asleep(settings: dict[str, Any]) -> list[float]:
    """Weights leave in buckets while states sleep, a forward needs the parameters only, and training goes on."""
    from dsx_monitor.phases import PhaseMemory

    made = make_engine(settings)
    losses = trained(made, 2)
    mark, bucket_bytes = made.weights.mark(), 1 << 14
    for asleep in (None, ["optim_states", "hp_params", "lp_grads"]):
        phases = PhaseMemory(made.optimizer.state_bytes_by_tier)
        with phases("sleep"):
            made.offload_states(asleep, non_blocking=True)
        with phases("push"):
            assert sum(len(bucket) for bucket in made.weights.buckets(bucket_bytes=bucket_bytes)) > 5
        if SIMULATED:
            check_phases(*phases.phases, bucket_bytes, all_away=asleep is None)
        sums = [
            value.double().sum()
            for bucket in made.weights.buckets(bucket_bytes=bucket_bytes)
            for value in bucket.values()
        ]
        total = torch.stack([one.to(DEVICE) for one in sums]).sum()
        losses.append(total / 1000)  # of 10,000 elements, whose last digits the device's Adam rounds otherwise
        made.reload_states(non_blocking=True, include=["lp_params"])
        with torch.no_grad():
            (tokens,) = batches(1)
            losses.append(made(tokens[:, :-1], tokens[:, 1:]).detach())
        made.reload_states(non_blocking=True)
        losses += trained(made, 1)
    assert mark.pack().numel() > 100
    made.destroy()
    return numbers(losses)


def check_phases(sleep: Any, push: Any, bucket_bytes: int, *, all_away: bool) -> None:
    """Sleep takes what it says off the device, and a push needs one bucket, as the device's allocator counts."""
    extra = push.peak - push.before
    assert sleep.after < sleep.before and push.after == push.before
    assert extra <= bucket_bytes, f"a push took {extra} bytes"
    assert not all_away or (extra > bucket_bytes // 2 and sum(sleep.classes.values()) < 1024), sleep


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


def preempted(settings: dict[str, Any]) -> list[float]:
    """Rank 0 is asked to end, all ranks save and stop; training that goes on from there is training without a stop.

    The ranks agree on the update after which they stop, so that it differs from run to run.
    """
    from dsx.engine.preemption import Preempted

    every, rows, folder = 2, batches(16), str(FOLDER / "preempted")
    made = make_engine(settings)
    losses = trained(made, 2)
    made.save_on_preemption(folder)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        for number in range(10_000):
            micro_batch(made, rows[number % len(rows)])
            time.sleep(0.02)  # training that is faster than the ranks agree would take all the rows
    except Preempted:
        pass
    made.destroy()
    made = make_engine(settings)
    made.load_checkpoint(folder)
    stopped = (made.global_steps - 2) * every
    assert stopped > 0, "the ranks did not stop behind an update"
    again = numbers([micro_batch(made, rows[number % len(rows)]) for number in range(stopped, stopped + 2 * every)])
    made.destroy()
    made = make_engine(settings)
    trained(made, 2)
    straight = numbers([micro_batch(made, rows[number % len(rows)]) for number in range(stopped + 2 * every)])
    made.destroy()
    assert again == straight[stopped:], f"after the stop: got {again}, expected {straight[stopped:]}"
    return numbers(losses)


def sparse_embeddings(settings: dict[str, Any]) -> list[float]:
    """Of the embedding only the rows that have a gradient are sent."""
    torch.manual_seed(0)
    model = Language()
    model.tokens.sparse = True
    made = make_engine(settings, model)
    losses = numbers(trained(made))
    made.destroy()
    return losses


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


class OfCutTokens(Language):
    """The small GPT with the sum of the losses of tokens at given positions. With `chunks` its blocks keep all but one
    chunk of the sequence in host memory.
    """

    def __init__(self, chunks: int | None = None) -> None:
        super().__init__()
        if chunks is not None:
            self.call = lambda block, x: _in_host_chunks(block, x, chunks)

    def forward(self, tokens: Any, targets: Any, positions: Any) -> torch.Tensor:  # type: ignore[override]
        hidden = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            hidden = self.call(block, hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def _in_host_chunks(block: Any, x: torch.Tensor, chunks: int) -> torch.Tensor:
    import dsx_activations

    def project(x: torch.Tensor, positions: torch.Tensor) -> Any:
        return block.qkv(block.before(x)).unflatten(2, (3, block.heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def finish(x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        x = x + block.out(mixed.transpose(1, 2).flatten(2))
        return x + block.down(F.gelu(block.up(block.behind(x))))

    return dsx_activations.run_in_host_chunks(
        project, finish, x, chunks=chunks, parameters=block.parameters(), causal=True, length=16
    )


def cut_sequences(settings: dict[str, Any]) -> list[float]:
    """One sequence over all ranks: by the engine, or by the model's own layers, whose chunks wait in host memory."""
    import dsx_activations

    settings = dict(settings)
    chunks, world = settings.pop("chunks", None), dist.get_world_size()
    torch.manual_seed(0)
    model: Any = OfCutTokens(chunks)
    given = {"length": 16, **settings.pop("sequence_parallel", {}), **({"convert": False} if chunks else {})}
    made = make_engine({**settings, "sequence_parallel_size": world, "sequence_parallel": given}, model)
    losses = []
    for number in range(STEPS):
        tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(number)).to(DEVICE)
        mine, targets = (dsx_activations.shard_sequence(t) for t in (tokens[:, :-1], tokens[:, 1:]))
        positions = dsx_activations.shard_sequence(torch.arange(16, device=DEVICE)[None])
        with watched(number == STEPS - 1):
            loss = dsx_activations.token_mean(made(mine, targets, positions), targets.numel())
            made.backward(loss)
            made.step()
        losses.append(loss.detach())
    made.destroy()
    return numbers(losses)


def activation_boundary(settings: dict[str, Any]) -> list[float]:
    """`synchronize` waits at the boundaries for the device of the inputs, which is not the current one."""
    import dsx_activations

    dsx_activations.configure(synchronize=True)
    device, marks = torch.device("cuda:1" if SIMULATED else "cpu"), []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if SIMULATED:
            marks.append(torch.cuda.Event())
            marks[-1].record(torch.cuda.current_stream(device))
        return y

    try:
        x = torch.arange(4.0).to(device).requires_grad_()
        y = dsx_activations.checkpoint(function, x)
        assert all(mark.query() for mark in marks), "the host went on before the device had computed the function"
        y.sum().backward()
        return [float(x.grad.sum())] if x.grad is not None else []
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


def staged(settings: dict[str, Any]) -> list[float]:
    """Two stages through the engine; the word weights may be tied, and layers may have experts."""
    import dsx
    import dsx_pipe

    settings = dict(settings)
    micro_batches, schedule = settings.pop("micro_batches", 4), settings.pop("schedule", "1f1b")
    tied, ep_size = settings.pop("tied", False), settings.pop("ep_size", 0)
    torch.manual_seed(0)
    layer = (lambda: Mixed(ep_size)) if ep_size else (lambda: Block(32, 4))
    layers: list[Any] = [dsx_pipe.LayerSpec(Words), *(dsx_pipe.LayerSpec(layer) for _ in range(4))]
    layers.append(dsx_pipe.LayerSpec(nn.Linear, 32, 64))
    if tied:
        layers[0] = dsx_pipe.TiedLayerSpec("words", Words)
        layers[-1] = dsx_pipe.TiedLayerSpec("words", Words, forward_fn=lambda words, x: x @ words.weight.T)
    module = dsx_pipe.PipelineModule(
        layers, num_stages=2, loss_fn=next_words, schedule=schedule, seed_layers=True, partition_method="uniform",
        chunks=2 if schedule == "interleaved" else None,
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        **settings,
    }
    made, data = dsx.initialize(model=module, config=config)[0], module.grid.data
    generator, losses = torch.Generator().manual_seed(data.rank), []
    draw = lambda: torch.randint(0, 64, (2, 17), generator=generator)  # noqa: E731
    for number in range(STEPS):
        rows = [draw().to(DEVICE) for _ in range(micro_batches)]
        with watched(number == STEPS - 1):
            losses.append(made.train_batch(iter([(row[:, :-1], row[:, 1:]) for row in rows])))
    made.destroy()
    return numbers(losses)


def experts(settings: dict[str, Any]) -> list[float]:
    """Experts on all ranks, under ZeRO: one layer, or `many`."""
    torch.manual_seed(0)
    settings = dict(settings)
    zero = settings.pop("zero_optimization", {"stage": 1})
    model = ManyExperts() if settings.pop("many", False) else Experts(settings)
    made = make_engine({"zero_optimization": zero, "gradient_accumulation_steps": 1}, model)
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


def codes(settings: dict[str, Any]) -> list[float]:
    """Frozen weights in 8 bits, which are gathered as codes, and trained ones beside them."""
    return of_rows(settings, Adapted())


def sent(settings: dict[str, Any]) -> list[float]:
    """Trained weights that are sent in 8 bits by FSDP2's hooks."""
    return of_rows(settings, SentLayers())


def of_rows(settings: dict[str, Any], model: nn.Module) -> list[float]:
    """A model of rows of 16 numbers, which returns the loss."""
    made = make_engine({"zero_optimization": settings, "gradient_accumulation_steps": 1}, model)
    generator, losses = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0), []
    rows = [torch.randn(2, 16, generator=generator).to(DEVICE) for _ in range(STEPS)]
    for number, inputs in enumerate(rows):
        with watched(number == STEPS - 1):
            loss = made(inputs)
            made.backward(loss)
            made.step()
        losses.append(loss.detach())
    made.destroy()
    return numbers(losses)


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


def slices_and_shards(settings: dict[str, Any]) -> list[float]:
    """Pairs of ranks slice the weights, and ZeRO divides the slices among the ranks that have the same ones."""
    import dsx
    import dsx_comm

    topology = dsx_comm.ProcessTopology(["data", "model"], [dist.get_world_size() // 2, 2])
    mpu = dsx_comm.Mpu(dsx_comm.GroupRegistry(topology))
    torch.manual_seed(0)
    model = SlicedLayers(mpu.get_model_parallel_group())
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        **settings,
    }
    made = dsx.initialize(model=model, config=config, model_parameters=model.parameters(), mpu=mpu)[0]
    generator, losses = torch.Generator().manual_seed(mpu.get_data_parallel_rank()), []
    for number, inputs in enumerate([torch.randn(4, 16, generator=generator).to(DEVICE) for _ in range(STEPS)]):
        with watched(number == STEPS - 1):
            loss = made(inputs)
            made.backward(loss)
            made.step()
        losses.append(loss.detach())
    made.destroy()
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
        result["waits"] = [[s.what, s.where, s.thread, times] for seen in waits for s, times in seen.host_syncs.items()]
    return result


def main() -> None:
    modes, names = sys.argv[2].split(","), sys.argv[3].split(",")
    if SIMULATED:
        torch.cuda.set_device(0)
        bound = torch.device("cuda", 0) if int(os.environ["WORLD_SIZE"]) > 1 else None  # as most programs on GPUs do
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=bound)
    else:
        dist.init_process_group("gloo")
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
