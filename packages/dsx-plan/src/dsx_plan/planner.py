"""`plan`: from a model and a configuration to an answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .answer import answer_of
from .changes import changes_that_fit
from .configs import Ready, clipping_of, ready
from .engine import EngineToPlan, engine_to_plan
from .errors import PlanError
from .kernels import Kernels
from .machine import Machine
from .models import Batch, deep, depth_of, describe, model_maker
from .pays import plans_without
from .phases import Generator
from .pipelines import replay_all
from .plans import Plan
from .repeated import Repeated
from .replay import Question, Replay, replay

__all__ = ["Asked", "Config", "MachineLike", "Model", "plan"]

Model = nn.Module | Callable[[], nn.Module] | str | os.PathLike
Config = Mapping[str, Any] | str | os.PathLike
MachineLike = Machine | str | os.PathLike | None


def plan(
    model: Model,
    config: Config,
    *,
    world_size: int,
    ranks_per_host: int | None = None,
    machine: MachineLike = None,
    batch: Batch | None = None,
    sequence: int | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    recompute: bool = False,
    fp8: bool = False,
    attention: str = "flash2",
    changes: bool = True,
    engine: EngineToPlan | None = None,
    generator: Generator | None = None,
    kernels: str = "compiled",
    sliced_loss: bool = False,
    alike: bool = False,
) -> Plan:
    """Say what a job needs and how long its steps take, without running it.

    The engine is built and run on one rank among `world_size` that are not there, on tensors without contents (see
    `replay`). No device is needed, and nothing of the model, of the process or of the disk is changed.

    Args:
        model: a module, a function that makes one, `file.py:function`, or a folder with a config.json of Hugging Face's
            format.
        config: the configuration that `dsx.initialize` would get.
        world_size: number of ranks.
        ranks_per_host: of them on one host; None: as many as the machine's hosts have, at most all.
        machine: a `Machine`, a name of the table ("H100-SXM"), a file (`dsx plan calibrate`), or None: this machine.
        batch: an example of one micro-batch: a tensor, positional arguments, or keyword arguments. Its first dimension
            is brought to the configured micro-batch. None: tokens, for models that say how large their vocabulary is.
        sequence: tokens of a sample where there is no example.
        loss: from the model's output to the loss; None: the output's `loss`, its first value, or its mean.
        optimizer: makes the optimizer where the configuration names none. None: AdamW.
        recompute: the model recomputes its blocks in backward (`gradient_checkpointing_enable`).
        fp8: products with weights multiply FP8, but those of the output layer (torchao, Transformer Engine).
        attention: kernels of fused attention: "flash2" (FlashAttention-2, PyTorch's own), "flash3" (FlashAttention-3,
            cuDNN).
        changes: look for changes that make it fit where it does not; where it fits, plan it without each setting that
            is there to send less (ZeRO++, 1-bit optimizers), which says whether it saves time.
        generator: what generates on the same devices between the updates: plan the memory of each phase. Not for
            models in stages.
        engine: what is run; None: the installed one (`dsx_plan.engine`).
        kernels: that update the parameters on a device: "compiled" (those of dsx-ops), or "torch" (its fused ones,
            where none are compiled: to clip or to unscale they copy gradients, 256 MiB at a time).
        sliced_loss: ranks that slice the layers keep their slice of the logits, and the loss is computed on them
            (`dsx_pipe.tensor.vocab_parallel_cross_entropy`). Otherwise every rank has the whole logits.
        alike: the model is a folder, and its blocks are alike: a few are replayed and stand for all (`repeated.py`).

    Raises:
        NoEngineError: there is no engine to plan with.
        PlanError: the model, the batch or the machine cannot be planned with.
        DsxConfigError: the configuration is wrong.
    """
    found = Machine.of(machine).with_attention(attention)
    given = (
        world_size, ranks_per_host, found, batch, sequence, loss, optimizer, engine, fp8, generator, kernels,
        sliced_loss,
    )  # fmt: skip
    asked = Asked(model, *given)
    make_plan = asked.plan
    if alike:
        whole, shallow = depth_of(model), deep(model)
        make_plan = Repeated(lambda blocks: Asked(shallow(blocks), *given, name=asked.name).plan, whole).plan
    if sliced_loss and not asked.slices(config):
        raise PlanError("sliced_loss: got it without tensor_parallel.autotp_size, expected ranks that slice the layers")
    answer = make_plan(config, recompute)
    if changes and answer.fits:
        answer.without = plans_without(answer, make_plan)
    elif changes:
        answer.changes = changes_that_fit(answer, make_plan)
    return answer


def _scales(config: Mapping[str, Any]) -> bool:
    """Whether a step multiplies gradients by a factor: it clips, which it does by default, or scales the loss."""
    return bool(clipping_of(config)) or bool((config.get("fp16") or {}).get("enabled"))


def _on_host(world_size: int, ranks_per_host: int | None, machine: Machine) -> int:
    given = ranks_per_host if ranks_per_host is not None else machine.ranks_per_host
    if given < 1:
        raise PlanError(f"ranks_per_host: got {given}, expected at least 1")
    found = min(given, world_size)
    if world_size % found:
        if ranks_per_host is not None:
            raise PlanError(f"ranks_per_host: got {given} for {world_size} ranks, expected a divisor of them")
        while world_size % found:
            found -= 1
    return found


class Asked:
    """Everything about a question but the configuration. The arguments are those of `plan`."""

    def __init__(
        self, model: Model, world_size: int, ranks_per_host: int | None, machine: Machine, batch: Any,
        sequence: int | None, loss: Any, optimizer: Any, engine: EngineToPlan | None = None, fp8: bool = False,
        generator: Generator | None = None, kernels: str = "compiled", sliced_loss: bool = False,
        name: str | None = None,
    ) -> None:  # fmt: skip
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise PlanError(f"world_size: got {world_size!r}, expected a number of ranks from 1")
        if fp8 and "float8" not in machine.flops:
            raise PlanError(f"fp8: {machine.name} has no rate for float8; expected a machine with products in FP8")
        if kernels not in ("compiled", "torch"):
            raise PlanError(f"kernels: got {kernels!r}, expected 'compiled' or 'torch'")
        self.world_size, self.machine, self._fp8 = world_size, machine, fp8
        self._by_torch, self._sliced_loss = kernels == "torch", sliced_loss
        self.engine = engine_to_plan(engine)
        self.on_host = _on_host(world_size, ranks_per_host, machine)
        self.name, self._make = name or describe(model), model_maker(model)
        self._batch, self._sequence, self._loss, self._generator = batch, sequence, loss, generator
        self._optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-4))

    def plan(self, config: Config, recompute: bool = False) -> Plan:
        """The plan for a configuration, without changes."""
        source = config if isinstance(config, (str, os.PathLike)) else dict(config)
        prepared = ready(source, self.world_size, self.engine)
        return answer_of(
            self._replays(prepared, recompute), prepared, self.machine, model=self.name, world_size=self.world_size,
            on_host=self.on_host, recompute=recompute,
        )  # fmt: skip

    def slices(self, config: Config) -> bool:
        """Whether a configuration slices layers."""
        source = config if isinstance(config, (str, os.PathLike)) else dict(config)
        return ready(source, self.world_size, self.engine).layout["tensor"] > 1

    def _replays(self, prepared: Ready, recompute: bool) -> list[Replay]:
        """The replay of every rank that differs: one, or those of a pipeline."""
        stages, slices = prepared.layout["pipe"], prepared.layout["tensor"]
        config = {**prepared.config, "train_micro_batch_size_per_gpu": prepared.micro}
        question = Question(
            engine=self.engine, make=self._make, config=config,
            world_size=self.world_size, rank=0, ranks_per_host=self.on_host, batch=self._batch, micro=prepared.micro,
            accumulation=prepared.accumulation, sequence=self._sequence, loss=self._loss,
            streams=self.machine.streams, optimizer=self._optimizer, recompute=recompute, stages=stages,
            shards=prepared.layout["sequence"], generator=self._generator,
            sliced_loss=slices if self._sliced_loss else 1,
            kernels=Kernels(
                fused=prepared.compiled, fp8=self._fp8, copies_gradients=self._by_torch and _scales(prepared.config)
            ),
        )  # fmt: skip
        if stages > 1 and self._generator is not None:
            raise PlanError(f"generator: got one for a model in {stages} stages, whose phases are not planned")
        if stages == 1:
            return [replay(question)]
        return replay_all(lambda rank, known: replay(replace(question, rank=rank, known=known)))
