"""One rank of a job, replayed: the engine is built and trained for some steps on tensors without contents, among ranks
that are not there, and what it does in one step is recorded.

Nothing of the engine is modelled here. Its planning, its order of collectives, its buffers and its step run as they do
in a job. The first steps are left out of the record: in them ranks agree on an order and states are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import dsx_comm
import torch
from dsx_activations.configured import settings_apart
from dsx_zero import ZeroOptimizer
from torch import nn

from .casts import Crossing, crossings
from .communicators import GroupUse
from .engine import BuiltEngine, EngineToPlan
from .errors import PlanError, explains_itself
from .fake import FakeCompute
from .kernels import Kernels
from .ledger import DEVICE, HOST, Ledger
from .models import Batch, cut, default_batch, resized, tokens_of
from .phases import Generator, replay_phases
from .pipelines import PipelineSteps, as_pair, mail_of, micro_batches_of
from .record import Record, StageReplay, Steps
from .recorder import Recorder
from .sliced_loss import SlicedLoss
from .store import PlannedStore
from .surroundings import DeviceAttention, address_space, kernels_recorded, quiet
from .trace import Trace

__all__ = ["Question", "Replay", "replay"]

WARM_UP = 3
"""Steps before the one that is recorded: in two the ranks agree, in the third they follow the order for the first
time.
"""
MOST_MICRO_BATCHES = 3
"""Micro-batches of an update that are replayed: the first, one in the middle, the last."""


@dataclass(frozen=True)
class Question:
    """The arguments of a replay.

    Attributes:
        engine: what is built and run.
        make: makes the model.
        config: the configuration as a dictionary, with the micro-batch set, without what only observes.
        world_size, rank, ranks_per_host: which rank of how many.
        batch: an example, or None.
        micro, accumulation: the real sizes.
        sequence: tokens of a sample where there is no example.
        loss: from the model's output to the loss; None: found in the output.
        streams: the device has streams.
        optimizer: makes the optimizer of parameters where the configuration names none.
        recompute: ask the model to recompute its blocks (`gradient_checkpointing_enable`).
        stages: ranks of the pipeline; 1 without one.
        shards: ranks that share each sequence.
        kernels: that compute.
        generator: plan the phases of a job that shares its devices with it.
        sliced_loss: ranks over which the loss is computed on slices of the logits; 1: on whole ones.
        known: of a pipeline: by global rank, the letters that it sends to this rank (`dsx_pipe.runtime.rehearsed`).
    """

    engine: EngineToPlan
    make: Callable[[], nn.Module]
    config: dict[str, Any]
    world_size: int
    rank: int
    ranks_per_host: int
    batch: Batch
    micro: int
    accumulation: int
    sequence: int | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    streams: bool = True
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    recompute: bool = False
    stages: int = 1
    shards: int = 1
    kernels: Kernels = field(default_factory=Kernels)
    known: Mapping[int, Any] = field(default_factory=dict)
    generator: Generator | None = None
    sliced_loss: int = 1


@dataclass
class Replay:
    """The record of one step of a rank.

    Attributes:
        trace: the entries.
        segments: (first, end, times) of the trace: what is done `times` times.
        resident: bytes by class and tier when gradients are there, before the step, as the engine counts them.
        ledger: bytes at every moment.
        messages: {operation: (calls, bytes sent)} of the step.
        parameters, trainable: elements of the whole model on this rank.
        tokens: of one micro-batch.
        rank: which one.
        experts: ranks over which experts are spread; 0 without experts.
        communicators: use of each process group over which tensors went.
        notes: what the reader should know.
        stage: of a pipeline: when this rank did what, and what it sent.
        phases: bytes on the device by phase and class, where a generator was named.
        crossings: what goes between device and host in a step and is cast on one of the sides.
    """

    trace: Trace
    segments: list[tuple[int, int, int]]
    resident: dict[str, dict[str, int]]
    ledger: Ledger
    messages: dict[str, tuple[int, float]]
    parameters: int
    trainable: int
    tokens: int
    rank: int = 0
    experts: int = 0
    communicators: tuple[GroupUse, ...] = ()
    notes: list[str] = field(default_factory=list)
    stage: StageReplay | None = None
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    crossings: list[Crossing] = field(default_factory=list)


def replay(question: Question) -> Replay:
    """Replay one rank.

    Raises:
        PlanError: the model cannot be run on tensors without contents; a process group is there already.
        DsxConfigError: the configuration is wrong.
    """
    recorder = Recorder(
        ranks_per_host=question.ranks_per_host, streams=question.streams,
        mail=mail_of(question.stages, question.known), kernels=question.kernels,
    )  # fmt: skip
    if dsx_comm.is_initialized():
        raise PlanError(
            "there is a process group in this process; a plan stands for other ranks than these. Make it before"
            " dsx.initialize, in a process of its own (`dsx plan`), or behind dsx_comm.destroy_process_group()"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(settings_apart())
        stack.enter_context(quiet())
        stack.enter_context(address_space())
        stack.enter_context(
            dsx_comm.rehearse(
                question.world_size, question.rank, ranks_per_host=question.ranks_per_host, observer=recorder
            )
        )
        stack.enter_context(recorder.ledger.following_resizes())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        compute = FakeCompute(recorder)
        stack.enter_context(compute)
        if question.streams:
            from dsx_comm.lanes import lanes_from  # lazy import: only replays need it

            stack.enter_context(lanes_from(recorder.lane))
            stack.enter_context(DeviceAttention())
        sliced = stack.enter_context(SlicedLoss(question.sliced_loss)) if question.sliced_loss > 1 else None
        return _Run(question, recorder, compute, sliced).run()


class _Run:
    def __init__(self, question: Question, recorder: Recorder, compute: FakeCompute, sliced: Any) -> None:
        self._question, self._recorder, self._compute, self._sliced = question, recorder, compute, sliced
        self._notes: list[str] = []
        self._micro_batches, self._tokens = 1, 0

    def run(self) -> Replay:
        recorder, built = self._recorder, None
        try:
            built, batch = self._build()
            steps = self._steps(built, batch)
            with kernels_recorded(recorder):
                for _ in range(WARM_UP):
                    steps.run(None)
                self._name_states(built.shards)
                recorder.trace.clear()
                recorder.ledger.record()
                with dsx_comm.count_traffic() as traffic:
                    record = steps.run(traffic)
                found = self._result(built, batch, record)
                if self._question.generator is not None:
                    found.phases = replay_phases(built, recorder.ledger, batch, self._question.generator, self._notes)
            return found
        except Exception as error:
            if explains_itself(error) and not _in_a_stage(error):
                raise
            raise PlanError(f"the model cannot be replayed: {type(error).__name__}: {error}. {_hint(error)}") from error
        finally:
            if built is not None:
                built.engine.destroy()
            recorder.mail = None  # it knows the stages, and the record outlives them

    def _build(self) -> tuple[BuiltEngine, Batch]:
        """The engine, and a batch for the model as it was before it was cut."""
        question, recorder = self._question, self._recorder
        recorder.begin("build")
        model = question.make()
        if question.recompute:
            enable = getattr(model, "gradient_checkpointing_enable", None)
            if enable is None:
                raise PlanError(
                    f"{type(model).__name__} has no gradient_checkpointing_enable(), by which models of transformers"
                    " recompute their blocks; make the model recompute by itself, or leave this out"
                )
            enable()
        model.train()
        recorder.kernels = recorder.kernels.for_model(model)
        self._micro_batches = self._replayed_micro_batches(model)
        recorder.ledger.rename(model.parameters(), "parameters")
        recorder.ledger.rename(model.buffers(), "buffers")
        batch = self._batch(model)
        config = {**question.config, "gradient_accumulation_steps": self._micro_batches}
        self._tokens = tokens_of(batch)
        if question.shards > 1:
            batch, length = cut(batch, question.shards)
            section = config.get("sequence_parallel") or {}
            config["sequence_parallel"] = {**section, "length": length}
        optimizer = None if "optimizer" in question.config else question.optimizer
        built = question.engine.build(config, model=model, optimizer=optimizer, store=PlannedStore(recorder))
        if self._sliced is not None:
            self._sliced.keep_slices(built.engine.module)
        return built, batch

    def _replayed_micro_batches(self, model: nn.Module) -> int:
        question = self._question
        if question.stages > 1 or question.engine.is_pipeline(model):
            section = question.config.get("pipeline") or {}
            return micro_batches_of(model, question.stages, question.accumulation, section)
        return min(question.accumulation, MOST_MICRO_BATCHES)

    def _steps(self, built: BuiltEngine, batch: Batch) -> Steps:
        question = self._question
        if not question.engine.is_pipeline(built.engine.module):
            return _PlainSteps(built, batch, self._micro_batches, question.accumulation, self._recorder, self._loss)
        if question.loss is not None:
            raise PlanError(
                "loss: got a function, and the last stage of a pipeline has its own (PipelineModule(loss_fn=...))"
            )
        pair = as_pair(batch, built.engine.module)
        return PipelineSteps(built, pair, self._micro_batches, question.accumulation, self._recorder)

    def _batch(self, model: nn.Module) -> Batch:
        question = self._question
        if question.batch is None:
            found = default_batch(model, question.micro, question.sequence)
        else:
            found = resized(question.batch, question.micro)
        from .models import _leaves

        self._recorder.ledger.rename(_leaves(found), "inputs")
        return found

    def _loss(self, output: Any) -> torch.Tensor:
        if self._question.loss is not None:
            return self._question.loss(output)
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, dict):
            found = output.get("loss")
        if found is None and isinstance(output, (tuple, list)) and output:
            found = output[0]
        if found is None:
            found = output
        if not isinstance(found, torch.Tensor):
            raise PlanError(
                f"the model returned {type(output).__name__} without a loss; give loss=<function of the output>"
            )
        if found.numel() == 1:
            return found
        note = "the model returns no single number: its mean stands for the loss"
        if note not in self._notes:
            self._notes.append(note)
        return found.float().mean()

    def _name_states(self, shards: ZeroOptimizer) -> None:
        ledger = self._recorder.ledger
        runtime = shards.runtime
        for unit in runtime.units:
            for group in unit.groups:
                for home, kind in ((group.shard, "parameters"), (group.own_master, "masters")):
                    if home is not None and (view := home.view()) is not None:
                        ledger.rename([view], kind, home.tier)
                if group.visible is not None:
                    ledger.rename([group.visible], "parameters")
        for tier, tensor in shards.states.tensors():
            ledger.rename([tensor], "states", HOST if tier == "host" else DEVICE)
        for home in shards.states.homes():
            if (view := home.view()) is not None:
                ledger.rename([view], "states", home.tier)

    def _result(self, built: BuiltEngine, batch: Batch, record: Record) -> Replay:
        recorder = self._recorder
        infos = built.shards.runtime.infos
        buffers = {b.untyped_storage()._cdata: b.nbytes for b in built.engine.module.buffers()}
        if recorder.unknown:
            names = ", ".join(sorted(recorder.unknown)[:5])
            self._notes.append(
                f"no rule says what these operators cost, so their arithmetic counts as nothing: {names}"
            )
        if self._compute.computed:
            names = ", ".join(sorted(self._compute.computed)[:5])
            self._notes.append(
                f"these operators were computed, because their results' shapes are not known before: {names}"
            )
        return Replay(
            trace=recorder.trace,
            segments=record.segments(),
            resident={**record.resident, "model buffers": {DEVICE: sum(buffers.values())}},
            ledger=recorder.ledger,
            messages=record.messages(),
            parameters=sum(info.numel for info in infos),
            trainable=sum(info.numel for info in infos if info.trainable),
            tokens=self._tokens,
            rank=self._question.rank,
            experts=_experts(built.engine.module),
            communicators=tuple(recorder.communicators.values()),
            notes=self._notes,
            stage=record.stage,
            crossings=crossings(built.shards, record.resident),
        )


class _PlainSteps:
    """Steps of a model that is not cut into stages.

    Args:
        micro_batches: that are run in a step.
        accumulation: those that it stands for.
        loss: from the model's output to the loss.
    """

    def __init__(
        self, built: BuiltEngine, batch: Batch, micro_batches: int, accumulation: int, recorder: Recorder, loss: Any
    ) -> None:  # fmt: skip
        self._built, self._batch, self._recorder, self._loss = built, batch, recorder, loss
        self._micro_batches, self._accumulation = micro_batches, accumulation

    def run(self, traffic: Any) -> Record:
        """Train for one update. See `Steps.run`."""
        engine, batch, recorder = self._built.engine, self._batch, self._recorder
        record = Record(recorder.trace, traffic)
        for number in range(self._micro_batches):
            recorder.begin("forward")
            loss = self._loss(engine(**batch) if isinstance(batch, dict) else engine(*_positional(batch)))
            recorder.begin("backward")
            engine.backward(loss)
            del loss
            if number == self._micro_batches - 1:
                record.resident = self._built.shards.state_bytes_by_tier()
                recorder.begin("step")
            else:
                recorder.settle()
                record.cut()
            engine.step()
            recorder.settle()
        record.cut()
        if self._accumulation > self._micro_batches:
            record.times[1] = self._accumulation - self._micro_batches + 1
        return record


def _in_a_stage(error: Exception) -> bool:
    """Whether it was raised by the model, inside a pipeline."""
    return type(error).__name__ == "StageError"


def _hint(error: Exception) -> str:
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return (
            "A plan takes address space for everything that a rank would hold, and touches none of it; the system"
            " refuses so much: raise `ulimit -v`, or set vm.overcommit_memory to 1 (with 0 it refuses what is gathered"
            " of a single parameter above this machine's memory)"
        )
    return (
        "A plan runs the model on CPU tensors whose large ones have no values; leave values alone that decide what is"
        " computed, and give the batch as the model takes it"
    )


def _experts(model: nn.Module) -> int:
    """The number of ranks over which the experts of a model are spread."""
    from dsx_moe.experts import ExpertShard  # lazy import: only replays need it

    shards = (module for module in model.modules() if isinstance(module, ExpertShard))
    return max((shard.num_experts // shard.count for shard in shards), default=0)


def _positional(batch: Batch) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
