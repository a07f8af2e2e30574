"""`dsx.verify` notices mistakes: each bug below is planted in dsx itself, inside the test ranks, and must be caught.

A bug is a context manager that replaces one internal function by a wrong one. The same settings without the bug must
pass, or the catch would prove nothing. What `dsx.verify` does not run (a pipeline's weights, torch's DDP) is compared
with one process by a function of the bug's own. `python tests/integration/test_planted_bugs.py` runs them all and
rewrites the table in `docs/verify.md`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from dsx_testkit import run_ranks, tiny
from torch import nn

WORLD = 2
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}},
    "gradient_clipping": 0.0,
    "steps_per_print": None,
}
FP16 = {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 4, "loss_scale_window": 1, "hysteresis": 1}}
WARMUP = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.3, "warmup_num_steps": 5, "warmup_type": "linear"}}
}


class Net(tiny.MLP):
    """An MLP whose forward returns the loss; started from torch's generator, so that ranks start differently."""

    def __init__(self) -> None:
        super().__init__(6, 10, 3, depth=2)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(super().forward(x).float(), y.float())


class Sometimes(Net):
    """A Net with a branch that is used on one rank only in turn, and never for the first micro-batch of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(self.branch(x) if float(x[0, 0]) > 0 else x, y)


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(2, 6, generator=generator), torch.randn(2, 3, generator=generator)


def overflowing(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The second step's batches make the loss infinite."""
    x, y = batch(index)
    return x, (y * torch.inf if index // WORLD == 1 else y)


@dataclass(frozen=True)
class Bug:
    """One mistake: how to plant it, and the settings under which it matters.

    Attributes:
        compare: called instead of `dsx.verify`; returns what differs from one process, "" for nothing.
    """

    name: str
    plant: Callable[[], AbstractContextManager[Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    model: type[nn.Module] = Net
    batch: Callable[[int], Any] = batch
    compare: Callable[[], str] | None = None

    def config(self) -> dict[str, Any]:
        return {**BASE, **self.settings}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more}}


# - The bugs. Modules are looked up when a bug is planted: importing this file loads nothing.


def module(name: str) -> Any:
    import importlib

    return importlib.import_module(name)


def skip_one_unit() -> Any:
    """One unit keeps this rank's own gradients."""
    reductions = module("dsx_zero.grads.reductions").Reductions
    right = reductions._start

    def start(self, buffers, reducer):
        if buffers.group.layout.names[0] != "layers.0.weight":
            right(self, buffers, reducer)
            return
        buffers._whole()
        buffers.dirty, buffers.result = False, buffers._target(buffers.buffer)
        if buffers.stage > 0:
            module("dsx_zero.grads.buffers").write(buffers.result, buffers.group.shard_of(buffers.buffer))

    return patch.object(reductions, "_start", start)


def reduce_twice() -> Any:
    reducer = module("dsx_zero.grads.reductions").Reducer
    right = reducer.reduce_scatter

    def reduce_scatter(self, buffer, out, group, label, *, add):
        before, pending = out.clone(), right(self, buffer, out, group, label, add=add)

        def complete():
            pending.finish()
            out.copy_(2 * out - before if add else 2 * out)

        return pending._replace(ticket=None, complete=complete)

    return patch.object(reducer, "reduce_scatter", reduce_scatter)


def sum_instead_of_mean() -> Any:
    return patch.object(
        module("dsx_zero.grads.reduction").Reduction, "factors", lambda self, world_size: (1.0, False, 1.0)
    )


def reduce_in_bf16() -> Any:
    precision = module("dsx_zero.precision").Precision
    return patch.object(precision, "wire_dtype", lambda self, parameter: torch.bfloat16)


def no_gather_after_step() -> Any:
    return patch.object(module("dsx_zero.gather.publishing").Gathering, "publish", lambda self, unit: None)


def stale_low_precision_copy() -> Any:
    return patch("dsx_zero.step.runner.StepRunner._write", lambda self, masters, **options: None)


def no_broadcast_at_start() -> Any:
    return patch.object(module("dsx_zero.building"), "broadcast_first", lambda values, ranks: None)


def shifted_shard() -> Any:
    flat = module("dsx_zero.params.flat").FlatGroup

    def shard_of(self, buffer):
        start, stop = self.layout.shard_range((self.rank + 1) % WORLD)
        return buffer[start:stop]

    return patch.object(flat, "shard_of", shard_of)


def off_by_one_slice() -> Any:
    layout = module("dsx_zero.plan.layout")
    right = layout.FlatLayout.local_slice

    def local_slice(self, name, rank):
        found = right(self, name, rank)
        if found is None or found.offset == 0 or found.numel < 2:
            return found
        return layout.LocalSlice(found.start, found.stop, found.offset - 1)

    return patch.object(layout.FlatLayout, "local_slice", local_slice)


def dirty_padding() -> Any:
    gradients = module("dsx_zero.grads.buffers").GroupGradients
    right = gradients._whole

    def whole(self):
        fresh, buffer = self.buffer is None, right(self)
        for start, stop in self.group.layout.gaps:
            if fresh:
                buffer[start:stop].fill_(3.0)
        return buffer

    return patch.object(gradients, "_whole", whole)


def norm_of_own_shard() -> Any:
    found = module("dsx_zero.step.norm").StepNorm
    return patch.object(found, "norm", functools.partialmethod(_own_norm, found.norm))


def _own_norm(self, right, grad_scale, *, needed, local):
    self._total = None
    return right(self, grad_scale, needed=needed, local=True)  # no group adds anything


def clip_before_unscaling() -> Any:
    found = module("dsx_zero.step.norm").StepNorm
    return patch.object(found, "norm", functools.partialmethod(_scaled_norm, found.norm))


def _scaled_norm(self, right, grad_scale, **options):
    return right(self, 1.0, **options)


def forget_accumulation_factor() -> Any:
    return patch.object(module("dsx.engine.engine").Engine, "_divisor", lambda self, scale_wrt_gas: 1)


def keep_gradients_after_step() -> Any:
    return patch.object(module("dsx_zero.optimizer").ZeroOptimizer, "zero_grad", lambda self, set_to_none=True: None)


def unscale_with_the_next_scale() -> Any:
    stepper = module("dsx.engine.stepper").ShardedStepper

    def step(self):
        self._scaler.update(False)
        outcome = self._optimizer.step(grad_scale=self._scaler.scale, max_norm=self._max_norm)
        self._optimizer.zero_grad()
        return outcome

    return patch.object(stepper, "step", step)


def loss_not_scaled() -> Any:
    engine = module("dsx.engine.engine").Engine
    right = engine.scale

    def scale(self, loss, scale_wrt_gas=True):
        return right(self, loss, scale_wrt_gas) / self._parts.update.scaler.scale

    return patch.object(engine, "scale", scale)


def schedule_steps_on_overflow() -> Any:
    engine = module("dsx.engine.engine").Engine
    right = engine._update

    def update(self, lr_kwargs):
        right(self, lr_kwargs)
        if not self._applied:
            self._parts.update.schedule.step(**lr_kwargs)

    return patch.object(engine, "_update", update)


def schedule_one_update_ahead() -> Any:
    def init(self, scheduler):
        self.scheduler = scheduler
        scheduler.step()

    return patch.object(module("dsx.engine.stepper").ScheduleDriver, "__init__", init)


def overflow_not_checked() -> Any:
    return patch.object(module("dsx_zero.precision").Precision, "checks_overflow", lambda self, parameters: False)


def unused_parameters_keep_old_gradients() -> Any:
    gradients = module("dsx_zero.grads.buffers").GroupGradients
    right = gradients.launch

    def launch(self):
        if self.buffer is not None:
            self._filled = bytearray(b"\x01") * len(self._filled)
        return right(self)

    return patch.object(gradients, "launch", launch)


def optimizer_forgets() -> Any:
    runner = module("dsx_zero.step.runner").StepRunner
    right = runner.run

    def run(self, factor, stepped=()):
        right(self, factor, stepped)
        self.inner_step.inner.state.clear()

    return patch.object(runner, "run", run)


def last_micro_batch_only() -> Any:
    window = module("dsx.engine.backwards").SyncWindow
    right = window.before_step

    def before_step(self):
        right(self)
        self.dropped = getattr(self, "dropped", 0) + 1
        if self.dropped % 3 == 1:
            self._no_sync.__self__.zero_grad()

    return patch.object(window, "before_step", before_step)


def frozen_parameters_decay() -> Any:
    runner = module("dsx_zero.step.runner").StepRunner
    right = runner.run

    def run(self, factor, stepped=()):
        right(self, factor, stepped)
        for unit in self._runtime.units:
            for group in unit.groups:
                if not group.trainable:
                    group.visible.mul_(0.9)

    return patch.object(runner, "run", run)


def freed_memory_not_refilled() -> Any:
    executor = module("dsx_zero.gather.lifetime").GatherExecutor
    right, seen = executor._fill, set()

    def fill(self, store, *arguments):
        if id(store) not in seen:
            seen.add(id(store))
            return right(self, store, *arguments)
        store.allocate()
        store.fill.zero_()
        return None

    return patch.object(executor, "_fill", fill)


def old_values_after_step() -> Any:
    executor = module("dsx_zero.gather.lifetime").GatherExecutor
    right, kept = executor._fill, {}

    def fill(self, store, *arguments):
        if id(store) in kept:
            store.allocate()
            store.fill.copy_(kept[id(store)])
            return
        work = right(self, store, *arguments)
        if work is not None:
            work.wait()
        kept[id(store)] = store.fill.clone()

    return patch.object(executor, "_fill", fill)


def graphs_of_before_a_step_stay_valid() -> Any:
    """The optimizer's kernels write parameters behind autograd's back."""
    return patch("torch.autograd.graph.increment_version", lambda tensors: None)


def replaced_parameters_are_not_noticed() -> Any:
    return patch.object(module("dsx_zero.step.model_check").ModelCheck, "check", lambda self: None)


def ranks_with_different_rates() -> Any:
    """Rank 1's configuration has another rate, and nobody compares."""
    runner = module("dsx_zero.step.runner").StepRunner
    right = runner.run

    def run(self, factor, stepped=()):
        other = torch.distributed.get_rank() == 1
        for group in self.inner_step.inner.param_groups:
            group["lr"] *= 1.5 if other else 1.0
        right(self, factor, stepped)
        for group in self.inner_step.inner.param_groups:
            group["lr"] /= 1.5 if other else 1.0

    return patch.object(runner, "run", run)


def direct_backward_is_not_divided() -> Any:
    return patch.object(module("dsx.engine.backwards").Backwards, "factor", lambda self: 1.0)


def direct_backward_mixes_scales() -> Any:
    """`loss.backward()` under a loss scale is neither refused nor scaled."""
    backwards = module("dsx.engine.backwards").Backwards
    return patch.multiple(backwards, begin=lambda self: 1.0, factor=lambda self: 1.0)


def model_zero_grad_does_nothing() -> Any:
    """Gradients that were taken away are put back."""

    def notice(self, *arriving):
        for parameter, face in zip(self.group.parameters, self._faces):
            if parameter.grad is None and face is not None:
                parameter.grad = face

    return patch.object(module("dsx_zero.grads.buffers").GroupGradients, "notice", notice)


def clipping_by_torch_does_nothing() -> Any:
    access = module("dsx_zero.grads.access").GradientAccess
    return patch.object(access, "edit_shard", lambda self, group, index, edit: self._complete())


def clipping_by_torch_uses_the_own_shard() -> Any:
    access = module("dsx_zero.grads.access").GradientAccess
    right = access._norms_of

    def norms_of(self, places, order, device):
        with patch.object(access, "_is_divided", lambda self, group: False):
            return right(self, places, order, device)

    return patch.object(access, "_norms_of", norms_of)


def freeze_on_one_rank() -> Any:
    """Rank 1 freezes a layer after the model was sharded."""
    optimizer = module("dsx_zero.optimizer").ZeroOptimizer
    right = optimizer.step

    def step(self, *arguments, **options):
        if torch.distributed.get_rank() == 1:
            next(self.control.gradient_parameters()).requires_grad_(False)
        return right(self, *arguments, **options)

    return patch.object(optimizer, "step", step)


def shard_inside_ddp() -> Any:
    """The model that is sharded is wrapped by DistributedDataParallel already."""
    right = module("dsx_zero").shard

    def shard(model, *arguments, **options):
        return right(nn.parallel.DistributedDataParallel(model), *arguments, **options)

    return patch.object(module("dsx_zero"), "shard", shard)


def anywhere(text: str) -> str:
    """The first text that is not empty, on all ranks."""
    told: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(told, text)
    return next(filter(None, told), "")


def groups_of_the_engine_beside() -> Any:
    current = module("dsx_comm.groups_in_use")._Current
    right = current.given
    return patch.object(current, "given", lambda self: self._in_use[-1] if self._in_use else right(self))


def beside_a_pipeline() -> str:
    dsx, comm = module("dsx"), module("dsx_comm")
    let_go = comm.parallel_groups.hold(comm.GroupRegistry(comm.ProcessTopology(("pipe", "data"), (WORLD, 1))))
    torch.manual_seed(1)
    model, plain = nn.Linear(6, 3), nn.Linear(6, 3)
    plain.load_state_dict(model.state_dict())
    engine = dsx.initialize(model=model, config={**BASE, **zero(1)})[0]
    engine.backward(nn.functional.mse_loss(engine(batch(engine.global_rank)[0]), batch(engine.global_rank)[1]))
    engine.step()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    (sum(nn.functional.mse_loss(plain(x), y) for x, y in map(batch, range(WORLD))) / WORLD).backward()
    optimizer.step()
    close = torch.allclose(model.weight, plain.weight, rtol=1e-5, atol=1e-6)
    engine.destroy()
    let_go()
    return anywhere("" if close else "the weights after a step are others than on one process")


def experts_are_not_left_out_of_ddp() -> Any:
    stack = ExitStack()
    stack.enter_context(patch("dsx_moe.ignore_experts_in_ddp", lambda model: []))
    stack.enter_context(patch("dsx_moe.layer.refuse_wrappers", lambda *arguments: None))
    return stack


def experts_in_ddp() -> str:
    moe, rank = module("dsx_moe"), torch.distributed.get_rank()

    def made(ep_size):
        torch.manual_seed(3)
        return moe.MoE(6, lambda i: nn.Linear(6, 6), 2, ep_size, k=2, drop_tokens=False)

    def loss_of(layer, rank):
        return layer(batch(rank)[0])[0].square().mean()

    whole, mine = made(1).eval(), made(WORLD).eval()
    (sum(loss_of(whole, rank) for rank in range(WORLD)) / WORLD).backward()
    moe.ignore_experts_in_ddp(mine)
    loss_of(nn.parallel.DistributedDataParallel(mine), rank).backward()
    moe.average_gradients(mine, experts_only=True)
    right, found = whole.experts[rank].weight.grad, mine.experts[rank].weight.grad
    close = torch.allclose(right, found, rtol=1e-4, atol=1e-6)
    return anywhere("" if close else f"the experts of rank {rank} get other gradients than on one process")


def each_stage_writes_its_own_weights() -> Any:
    return patch("dsx.engine.weights._sent_by", lambda stage, stages, own: own)


def weights_of_a_pipeline() -> str:
    dsx, pipe = module("dsx"), module("dsx_pipe")
    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    found = dsx.initialize(
        model=pipe.PipelineModule(layers, num_stages=WORLD, loss_fn=nn.functional.mse_loss), config={**BASE, **zero(1)}
    )[0]
    state = found.module_state_dict()
    found.destroy()
    missing = {f"{i}.{name}" for i, layer in enumerate(layers) for name in layer.state_dict()} - set(state)
    return anywhere(f"a rank has no {min(missing)}" if missing else "")


def slices_are_taken_for_matrices() -> Any:
    def alone(slices, function, results, group):
        return [[*function(n, one.values, list(one.states)), *one.states] for n, one in enumerate(slices)]

    return patch("dsx_zero.step.matrix_exchange.compute_sliced", alone)


class OneMatrix(nn.Module):
    """A matrix of which each rank has half of the rows; its gradient is the same for every rank's half."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.cut = nn.Parameter(rows.clone())
        self.cut.tensor_model_parallel, self.cut.partition_dim = True, 0

    def forward(self, wanted: torch.Tensor) -> torch.Tensor:
        return (self.cut * wanted).sum()


def muon_of_slices() -> str:
    zero_part, ops, comm = module("dsx_zero"), module("dsx_ops"), module("dsx_comm")
    comm.parallel_groups.use(comm.GroupRegistry(comm.ProcessTopology(("data", "model"), (1, WORLD))))
    generator = torch.Generator().manual_seed(5)
    whole, wanted = torch.randn(2 * WORLD, 6, generator=generator), torch.randn(2 * WORLD, 6, generator=generator)
    mine = slice(2 * torch.distributed.get_rank(), 2 * torch.distributed.get_rank() + 2)
    model = OneMatrix(whole[mine])
    model, optimizer = zero_part.shard(model, ops.Muon(model.parameters(), lr=0.1), stage=1)
    model(wanted[mine]).backward()
    optimizer.step()
    plain = nn.Parameter(whole.clone())
    plain.grad = wanted.clone()
    ops.Muon([plain], lr=0.1).step()
    close = torch.allclose(model.cut.detach(), plain.detach()[mine], rtol=1e-4, atol=1e-5)
    text = "" if close else "the update of the slices is not the slices of the matrix' update"
    comm.parallel_groups.use(None)
    return anywhere(text)


class HalfFrozen(Net):
    """A Net whose first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


GAS = {"gradient_accumulation_steps": 3}
BUGS = [
    Bug("one unit is not reduced", skip_one_unit, {**zero(1, reduce_bucket_size=32)}),
    Bug("each micro-batch is added twice to the shard", reduce_twice, {**zero(2), **GAS}),
    Bug("gradients are summed over the ranks, not averaged", sum_instead_of_mean, zero(2)),
    Bug("fp32 gradients travel as bf16", reduce_in_bf16, zero(1)),
    Bug("updated shards are not gathered", no_gather_after_step, zero(2)),
    Bug("the 16-bit parameters keep their old values", stale_low_precision_copy, {**FP16, **zero(1)}),
    Bug("rank 0's parameters are not broadcast at start", no_broadcast_at_start, zero(0)),
    Bug("a reduced shard is written over another rank's part of the buffer", shifted_shard, zero(1)),
    Bug("a parameter's slice begins one element too early", off_by_one_slice, zero(2)),
    Bug("padding is not zeroed and enters the norm", dirty_padding, {**zero(2), "gradient_clipping": 0.1}),
    Bug("each rank clips by the norm of its own shard", norm_of_own_shard, {**zero(1), "gradient_clipping": 0.1}),
    Bug(
        "the norm for clipping still has the loss scale",
        clip_before_unscaling,
        {**FP16, **zero(0), "gradient_clipping": 0.1},
    ),
    Bug("the loss is not divided by the accumulation steps", forget_accumulation_factor, {**zero(0), **GAS}),
    Bug("gradients are not cleared after the step", keep_gradients_after_step, zero(0)),
    Bug("unscaled with the scale of the next step", unscale_with_the_next_scale, {**FP16, **zero(1)}),
    Bug("the loss is not scaled but the gradients are unscaled", loss_not_scaled, {**FP16, **zero(0)}),
    Bug(
        "the schedule steps on a skipped update",
        schedule_steps_on_overflow,
        {**FP16, **WARMUP, **zero(1)},
        batch=overflowing,
    ),
    Bug("the schedule is not stepped when the engine is built", schedule_one_update_ahead, {**WARMUP, **zero(0)}),
    Bug("overflow is not noticed", overflow_not_checked, {**FP16, **zero(2)}, batch=overflowing),
    Bug(
        "a parameter unused in this step keeps the last step's gradient",
        unused_parameters_keep_old_gradients,
        zero(1),
        model=Sometimes,
    ),
    Bug("the optimizer's state is lost at each step", optimizer_forgets, zero(2)),
    Bug("the first micro-batch of an update is dropped", last_micro_batch_only, {**zero(0), **GAS}),
    Bug("stage 3: a freed unit's memory is taken again but not refilled", freed_memory_not_refilled, zero(3)),
    Bug("stage 3: a unit is refilled with values of before the step", old_values_after_step, zero(3)),
    Bug("frozen parameters change", frozen_parameters_decay, zero(1), model=HalfFrozen),
    Bug("a layer is frozen on one rank only", freeze_on_one_rank, zero(0)),
    Bug("the model is wrapped by DistributedDataParallel too", shard_inside_ddp, zero(2)),
    Bug("graphs of before a step stay valid", graphs_of_before_a_step_stay_valid, zero(1)),
    Bug("a parameter that was replaced is not noticed", replaced_parameters_are_not_noticed, zero(2)),
    Bug("one rank trains with another rate", ranks_with_different_rates, zero(0)),
    Bug(
        "the gradients of loss.backward() are not divided by the accumulation steps",
        direct_backward_is_not_divided,
        {**zero(1), **GAS},
    ),
    Bug("loss.backward() under a loss scale is taken as it is", direct_backward_mixes_scales, {**FP16, **zero(2)}),
    Bug("model.zero_grad() does nothing", model_zero_grad_does_nothing, zero(1)),
    Bug("torch's clip_grad_norm_ does nothing", clipping_by_torch_does_nothing, zero(2)),
    Bug(
        "torch's clip_grad_norm_ takes the norm of each rank's own shard", clipping_by_torch_uses_the_own_shard, zero(3)
    ),
    Bug(
        "beside a living pipeline, gradients are averaged over the pipeline's data-parallel ranks",
        groups_of_the_engine_beside,
        zero(1),
        compare=beside_a_pipeline,
    ),
    Bug("DistributedDataParallel averages different experts", experts_are_not_left_out_of_ddp, compare=experts_in_ddp),
    Bug("Muon orthogonalises slices of a matrix", slices_are_taken_for_matrices, compare=muon_of_slices),
    Bug(
        "each stage of a pipeline writes its own weights only",
        each_stage_writes_its_own_weights,
        zero(1),
        compare=weights_of_a_pipeline,
    ),
]


# - Running


def verify(bug: Bug, planted: bool) -> tuple[bool, str, str]:
    import dsx

    try:
        with bug.plant() if planted else nullcontext():
            if bug.compare is not None:
                text = bug.compare()
                return not text, "comparison" if text else "", text
            report = dsx.verify(bug.model, bug.config(), bug.batch, steps=4, raise_error=False)
    except (RuntimeError, ValueError) as error:  # dsx itself refuses what the bug does, on every rank
        if not planted:
            raise
        return False, "error", type(error).__name__
    return report.ok, "" if report.first is None else report.first.kind, str(report.first or report)


def all_bugs(rank: int, world: int) -> list[dict[bool, tuple[bool, str, str]]]:
    return [{planted: verify(bug, planted) for planted in (False, True)} for bug in BUGS]


@functools.lru_cache
def outcomes() -> list[dict[bool, tuple[bool, str, str]]]:
    by_rank = run_ranks(all_bugs, WORLD, timeout=250)
    assert by_rank[0] == by_rank[1], "all ranks give the same report"
    return by_rank[0]


@pytest.mark.parametrize("index", range(len(BUGS)), ids=[bug.name.replace(" ", "-") for bug in BUGS])
def test_the_bug_is_caught_and_the_right_code_passes(index):
    right, wrong = outcomes()[index][False], outcomes()[index][True]
    assert right[0], f"without the bug: {right[2]}"
    assert not wrong[0], f"with the bug: {wrong[2]}"


# - Bugs of checkpoints, which no training shows: a scenario through the public calls goes wrong


def imports_whole_models_only(folder: Path) -> bool:
    """A stage 3 checkpoint of DeepSpeed in which a name is missing is refused: others would get its values."""
    from dsx.checkpoint import CheckpointError, read_foreign
    from dsx_testkit import deepspeed_layout

    engine = deepspeed_layout.build()
    deepspeed_layout.train(engine, 0, 1)
    for path in deepspeed_layout.write_stage3(engine, folder).glob("*/*_model_states.pt"):
        head = torch.load(path, weights_only=False)
        del head["param_shapes"][0]["a.weight"]
        torch.save(head, path)
    try:
        read_foreign(folder)
    except CheckpointError:
        return True
    return False


def small_engine(frozen: int = 0) -> Any:
    import dsx

    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(frozen or 1, 4).requires_grad_(False))
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "steps_per_print": None}
    return dsx.initialize(model=model, config=config)[0]


def a_save_leaves_the_files_of_others(folder: Path) -> bool:
    engine = small_engine()
    for tag in ("best", "best"):
        engine.save_checkpoint(folder, tag=tag)
        (folder / tag / "tokenizer.json").touch()
    engine.save_checkpoint(folder, tag="best")
    return (folder / "best" / "tokenizer.json").is_file()


def a_save_refuses_what_is_no_checkpoint(folder: Path) -> bool:
    from dsx.checkpoint import CheckpointError

    (folder / "models").mkdir()
    (folder / "models" / "thesis.tex").touch()
    try:
        small_engine().save_checkpoint(folder, tag="models")
    except CheckpointError:
        return (folder / "models" / "thesis.tex").is_file()
    return False


def damage_is_not_inherited(folder: Path) -> bool:
    """A frozen file is damaged after the first save; the second save has the right values in memory."""
    from dsx.checkpoint import CheckpointError, open_checkpoint

    engine = small_engine(frozen=1 << 20)
    engine.save_checkpoint(folder, tag="a")
    placed = open_checkpoint(folder, "a").index.tensors["model"]["1.weight"].placed
    with (folder / "a" / placed.file).open("r+b") as file:
        file.seek(placed.offset)
        byte = file.read(1)[0]
        file.seek(placed.offset)
        file.write(bytes([byte ^ 1]))
    engine.save_checkpoint(folder, tag="b")
    try:
        return engine.load_checkpoint(folder, tag="b")[0] is not None
    except CheckpointError:
        return False


def no_check(name: str, function: str, replacement: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: patch.object(module(name), function, replacement)


def replaces_anything() -> Any:
    import contextlib

    planted = contextlib.ExitStack()
    for name in ("dsx_checkpoint.folder", "dsx_checkpoint.writing"):
        planted.enter_context(no_check(name, "check_target", lambda *given, **options: None)())
    return planted


CHECKPOINT_BUGS = {
    "flat groups of DeepSpeed need not be used up": (
        no_check("dsx_checkpoint.foreign.deepspeed", "check_used_up", lambda *given: None),
        imports_whole_models_only,
    ),
    "files of others go with the checkpoint that is replaced": (
        no_check("dsx_checkpoint.folder", "carry_over", lambda *given: None),
        a_save_leaves_the_files_of_others,
    ),
    "a save replaces what is no checkpoint": (
        replaces_anything,
        a_save_refuses_what_is_no_checkpoint,
    ),
    "an old file is linked without a look at its bytes": (
        no_check(
            "dsx_checkpoint.writing", "intact_files", lambda size, candidates, files: [file.name for file in files]
        ),
        damage_is_not_inherited,
    ),
}


@pytest.mark.parametrize("name", CHECKPOINT_BUGS)
def test_the_bug_of_checkpoints_shows_and_the_right_code_passes(name, tmp_path):
    plant, is_right = CHECKPOINT_BUGS[name]
    for folder in ("right", "wrong"):
        (tmp_path / folder).mkdir()
    assert is_right(tmp_path / "right")
    with plant():
        assert not is_right(tmp_path / "wrong")


def test_there_are_enough_distinct_bugs():
    assert len({bug.plant for bug in BUGS}) == len(BUGS) >= 12


# - A bug of the loader's batches, which `dsx.verify` does not read: a loop with a token budget shows it


def a_batch_counts_when_it_is_fetched() -> Any:
    """A batch goes into the sums of the update that runs when the loader returns it."""
    batches = module("dsx.engine.efficiency").TokenBatches
    right = batches.note

    def note(self, size):
        right(self, size)
        self._at_forward = len(self._waiting)
        self._use_batches()

    return patch.multiple(batches, note=note, before_forward=lambda self: None, weight=lambda self: self._weight)


class Rows(nn.Linear):
    """The loss is a mean over all rows of the sequences of a batch."""

    def forward(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        x = torch.cat(sequences)
        return (super().forward(x) - x.square()).square().mean()


def trains_as_on_each_batch(folder: Path) -> bool:
    """A loop that fetches the next batch between backward and step, against plain torch on the same batches."""
    import dsx
    from dsx.data import DataAnalyzer, SequenceLength

    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(1 + 5 * n % 9, 4, generator=generator) for n in range(12)]
    DataAnalyzer(
        [torch.ones(len(row), dtype=torch.int64) for row in data], batch_size=8, metric_names=["seqlen"],
        metric_functions=[SequenceLength()], metric_dtypes=["int64"], metric_types=["single_value_per_sample"],
        save_path=folder, collate_fn=list,
    ).run_map_reduce()  # fmt: skip
    budget = {"enabled": True, "max_tokens": 12, "metrics_path": str(folder), "lr_scaling_method": "none"}
    sampling = {"enabled": True, "dynamic_batching": budget}
    config = {**BASE, **zero(0), "data_efficiency": {"enabled": True, "data_sampling": sampling}}
    plain = Rows(4, 4)
    model = Rows(4, 4)
    model.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), **BASE["optimizer"]["params"])
    engine, _, loader, _ = dsx.initialize(model=model, training_data=data, collate_fn=list, config=config)
    batches = iter(loader)
    batch = next(batches)
    for _ in range(3):
        optimizer.zero_grad()
        plain(batch).backward()
        optimizer.step()
        engine.backward(engine(batch))
        batch = next(batches)
        engine.step()
    return torch.allclose(engine.module.weight, plain.weight, rtol=1e-4, atol=1e-5)


def test_a_batch_that_counts_for_the_wrong_update_shows(tmp_path):
    for folder in ("right", "wrong"):
        (tmp_path / folder).mkdir()
    assert trains_as_on_each_batch(tmp_path / "right")
    with a_batch_counts_when_it_is_fetched():
        assert not trains_as_on_each_batch(tmp_path / "wrong")


def test_the_table_in_the_docs_is_this_list():
    text = DOCUMENT.read_text()
    assert all(f"| {bug.name} |" in text for bug in BUGS), f"run: python {Path(__file__).name}"


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "verify.md"
MARK = "<!-- table: written by tests/integration/test_planted_bugs.py -->"


def table() -> str:
    rows = ["| injected fault | stage | kind | what dsx.verify says |", "|---|---|---|---|"]
    for bug, outcome in zip(BUGS, outcomes()):
        _, kind, text = outcome[True]
        stage = bug.settings["zero_optimization"]["stage"] if bug.settings else "-"
        rows.append(f"| {bug.name} | {stage} | {kind} | {text} |")
    return "\n".join(rows)


def write_document() -> None:
    """Replace what follows the mark in the document."""
    before, _, _ = DOCUMENT.read_text().partition(MARK)
    DOCUMENT.write_text(f"{before}{MARK}\n\n{table()}\n")


if __name__ == "__main__":
    write_document()
    caught = sum(not outcome[True][0] for outcome in outcomes())
    sys.stdout.write(f"{caught} of {len(BUGS)} planted bugs caught; {DOCUMENT.name} written\n")
