"""An engine of dsx for verl, registered from outside: `external_lib: dsx.integrations.verl`, and `DSXEngineConfig`.

verl calls an engine's methods (`BaseEngine`); this file gives them over a model that `dsx_zero` shards. Weights leave
as whole tensors in buckets, as flat ranges with their offsets (verl's `ShardSpec.place`), or as what has changed since
the last push: a rank sends only what it owns, and no rank gathers the model for it.

How a batch becomes a model's inputs, and its output log-probabilities or values, is verl's own code (its FSDP engine),
which this engine inherits. Ulysses is verl's too: its patched attention exchanges heads inside the groups of
`ulysses_sequence_parallel_size` ranks, over all of which gradients are averaged.

Left out: tensor, expert and pipeline parallelism; vision models whose shards verl renames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import dsx_zero
import torch
import torch.distributed as dist
from dsx_core.device import Device
from torch.distributed.device_mesh import init_device_mesh
from verl.utils import tensordict_utils, ulysses  # pyright: ignore[reportMissingImports]
from verl.utils.device import get_device_name  # pyright: ignore[reportMissingImports]
from verl.workers.config.engine import EngineConfig, FSDPEngineConfig  # pyright: ignore[reportMissingImports]
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry  # pyright: ignore[reportMissingImports]
from verl.workers.engine.fsdp.transformer_impl import (  # pyright: ignore[reportMissingImports]
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)
from verl.workers.engine.spec import ShardSpec  # pyright: ignore[reportMissingImports]
from verl.workers.engine.utils import (  # pyright: ignore[reportMissingImports]
    postprocess_batch_func,
    prepare_micro_batches,
)

from .verl_loading import LoadingRanks, divided_module

__all__ = ["DSXEngine", "DSXEngineConfig", "DSXEngineWithLMHead", "DSXEngineWithValueHead"]

_MODEL = ("lp_params",)
_OPTIMIZER = ("optim_states", "hp_params")
_GRADIENTS = ("lp_grads", "contiguous_grad_buffer")


def _compute_dtype(config: Any) -> torch.dtype:
    """In which verl's forward computes, as with FSDP: bf16 without a word in `mixed_precision`."""
    from verl.utils.torch_dtypes import PrecisionType  # pyright: ignore[reportMissingImports]

    return PrecisionType.to_dtype((config.mixed_precision or {}).get("param_dtype", "bf16"))


@dataclass
class DSXEngineConfig(FSDPEngineConfig):
    """verl's configuration of an FSDP engine for this one (`_target_: dsx.integrations.verl.DSXEngineConfig`).

    Attributes:
        dsx: a section `zero_optimization`; without a stage: stage 3.
    """

    strategy: str = "dsx"
    dsx: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what all engines share. FSDP's own check knows its own strategies only."""
        EngineConfig.__post_init__(self)
        if self.strategy != "dsx":
            raise ValueError(f"strategy: got {self.strategy!r}, expected 'dsx'")


class DSXEngine(BaseEngine):
    """verl's engine over `dsx_zero.shard`. The base of the two below, which know what a batch is.

    Args:
        model_config, optimizer_config, checkpoint_config: verl's.
        engine_config: `DSXEngineConfig`.
    """

    module: Any
    lr_scheduler: Any

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self._mark: dsx_zero.export.WeightMark | None = None
        # verl's FSDP engine keeps what its handling of batches reads, and calls `_init_device_mesh`.
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._autocast_dtype = _compute_dtype(engine_config)

    def _init_device_mesh(self) -> None:
        """Ranks with the same part of other sequences (data), and with other parts of the same ones (Ulysses)."""
        self.device_mesh = LoadingRanks()
        self.ulysses_device_mesh = self.ulysses_parallel_group = None
        self.ulysses_sequence_parallel_size = getattr(self.engine_config, "ulysses_sequence_parallel_size", 1)
        self.use_ulysses_sp = self.ulysses_sequence_parallel_size > 1
        size, world = self.ulysses_sequence_parallel_size, dist.get_world_size()
        if world % size:
            raise ValueError(f"ulysses_sequence_parallel_size: got {size}, expected a divisor of {world} ranks")
        self._data_group: Any = dist.group.WORLD
        if size > 1:
            mesh = init_device_mesh(self._device().type, (world // size, size), mesh_dim_names=("dp", "sp"))
            self._data_group, self.ulysses_device_mesh = mesh.get_group("dp"), mesh
            self.ulysses_parallel_group = mesh.get_group("sp")

    @staticmethod
    def _device() -> torch.device:
        return Device.current().torch_device

    # - what verl asks ------------------------------------------------------------------------------------------------

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether parameters leave the device between phases."""
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether optimizer states and masters leave the device between phases."""
        return bool(self.engine_config.optimizer_offload)

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank's outputs are collected: of ranks with parts of one sequence the first one's."""
        return dist.get_rank() % self.ulysses_sequence_parallel_size == 0

    def get_data_parallel_rank(self) -> int:
        """This rank's number among those with other sequences."""
        return dist.get_rank() // self.ulysses_sequence_parallel_size

    def get_data_parallel_size(self) -> int:
        """The number of ranks that have sequences of their own."""
        return dist.get_world_size() // self.ulysses_sequence_parallel_size

    def get_data_parallel_group(self) -> Any:
        """The process group of these ranks."""
        return self._data_group

    # - building ------------------------------------------------------------------------------------------------------

    def build_module(self) -> torch.nn.Module:
        """The model before it is sharded, with adapters if there are any: verl's own. At stage 3 each rank reads only
        its part of the files, where `divided_module` can.
        """
        module = (divided_module(self) if self._section["stage"] == 3 else None) or self._build_module()
        return self._build_lora_module(module) if self._is_lora else module

    @property
    def _section(self) -> dict[str, Any]:
        """The section `zero_optimization`."""
        return {"stage": 3, **(getattr(self.engine_config, "dsx", None) or {})}

    def initialize(self) -> None:
        """Build, shard, and move to host memory what the configuration wants there (collective)."""
        trains = not getattr(self.engine_config, "forward_only", False)
        self.module, self.shards = dsx_zero.shard(
            self.build_module(),
            (lambda members: self._build_optimizer_of(members)) if trains else None,
            config=self._section,
            device=self._device(),
            precision=dsx_zero.Precision(check_overflow=True),
        )
        self.optimizer = self.shards if trains else None
        self.lr_scheduler = self._build_lr_scheduler(self.shards) if trains else None
        self.to("cpu", self.is_param_offload_enabled, self.is_optimizer_offload_enabled, self.is_param_offload_enabled)

    def _build_optimizer_of(self, members: Any) -> torch.optim.Optimizer:
        from verl.workers.config.optimizer import build_optimizer  # pyright: ignore[reportMissingImports]

        return build_optimizer([p for p in members if p.requires_grad], self.optimizer_config)

    # - phases --------------------------------------------------------------------------------------------------------

    def train_mode(self, **options: Any) -> AbstractContextManager[Any]:
        """Inside, everything that training needs is on the device."""
        return _Mode(self, "train", **options)

    def eval_mode(self, **options: Any) -> AbstractContextManager[Any]:
        """Inside, the parameters are on the device; optimizer states stay where they are."""
        return _Mode(self, "eval", **options)

    def to(self, device: Any, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move classes of state to the device or to host memory (`offload_states`, `reload_states`).

        Raises:
            ValueError: another device than "cpu" or the one in use.
        """
        kinds = [*(_MODEL if model else ()), *(_OPTIMIZER if optimizer else ()), *(_GRADIENTS if grad else ())]
        name, own = torch.device(device).type, self._device().type
        if name not in ("cpu", own, get_device_name()):  # verl says "cuda" on a machine without a device, too
            raise ValueError(f"to(device=...): got {device!r}, expected 'cpu' or {own!r}")
        if name == "cpu" and (own != "cpu" or not self._entering):
            self.shards.offload_states(kinds)
        else:
            self.shards.reload_states(include=kinds)

    _entering = False
    """Whether a mode begins: on a machine without a device "cpu" names both the device and the host."""

    # - steps ---------------------------------------------------------------------------------------------------------

    def optimizer_zero_grad(self) -> None:
        """Forget all gradients."""
        self.shards.zero_grad()

    def optimizer_step(self) -> float:
        """Clip by the norm of all ranks and update. An update that is not finite is skipped. Returns the norm."""
        outcome = self.shards.step(max_norm=self.optimizer_config.clip_grad)
        return outcome.grad_norm if outcome.grad_norm is not None else 0.0

    def lr_scheduler_step(self) -> float:
        """Advance the schedule. Returns the first group's learning rate."""
        self.lr_scheduler.step()
        return self.lr_scheduler.get_last_lr()[0]

    def forward_backward_batch(self, data: Any, loss_function: Callable, forward_only: bool = False) -> Any:
        """Run a batch in micro-batches (of equal tokens, with `use_dynamic_bsz`); gradients are reduced in the last."""
        tokens = data["loss_mask"].sum().to(self._device())
        dist.all_reduce(tokens, group=self.get_data_parallel_group())
        tensordict_utils.assign_non_tensor(
            data,
            sp_size=self.ulysses_sequence_parallel_size,
            batch_num_tokens=tokens.item(),
            dp_size=self.get_data_parallel_size(),
        )
        batches, indices = prepare_micro_batches(
            data=data, dp_group=self.get_data_parallel_group(), same_micro_num_in_dp=True
        )
        outputs = []
        keeps = forward_only or tensordict_utils.get_non_tensor_data(data, "return_model_output", False)
        for number, batch in enumerate(batches, 1):
            with ExitStack() as around:
                around.enter_context(torch.no_grad() if forward_only else nullcontext())
                if number < len(batches) and not forward_only:
                    around.enter_context(self.shards.no_sync())
                loss, output = self.forward_step(batch, loss_function=loss_function, forward_only=forward_only)
                if not forward_only:
                    loss.backward()
            if not keeps:
                output.pop("model_output", None)
            outputs.append(output)
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    # - weights -------------------------------------------------------------------------------------------------------

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **options: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
        """The whole tensors, one after the other (collective), and peft's configuration if adapters are sent apart.

        Adapters are merged, unless the base was sent before (`base_sync_done`): then only they are sent. A tensor is
        valid until the next bucket. `layered_summon` has no effect: no more than a bucket is ever gathered.
        """
        peft = getattr(self.module, "peft_config", {}).get("default") if self._is_lora else None
        apart = peft is not None and base_sync_done
        names = (lambda name: name.replace(".default.", ".") if "lora_" in name else None) if apart else None
        buckets = dsx_zero.export.weight_buckets(
            self.shards, lora="apart" if apart else "merged", names=names, **options
        )
        return (pair for bucket in buckets for pair in bucket.items()), peft if apart else None

    def get_per_tensor_param_shard(self, **options: Any) -> tuple[Iterator[tuple[str, torch.Tensor, Any]], Any]:
        """(name, this rank's elements, where they belong) of every tensor, in one order on all ranks."""

        def ranges() -> Iterator[tuple[str, torch.Tensor, Any]]:
            for one in dsx_zero.export.weight_ranges(self.shards, **options):
                holds = one.values.numel() > 0
                yield (
                    one.name,
                    one.values,
                    ShardSpec(
                        full_shape=tuple(one.shape), place=one.start, gather_group=dist.group.WORLD, contributes=holds
                    ),
                )

        return ranges(), None

    def prime_delta_snapshots(self) -> None:
        """Remember the weights of now; `get_per_tensor_param_delta_shard` gives what changes from here on."""
        self._mark = dsx_zero.export.WeightMark(self.shards)

    def get_per_tensor_param_delta_shard(self, **options: Any) -> tuple[Iterator[tuple], Any]:
        """The changes on this rank, tensor by tensor, in one order on all ranks.

        An entry: ([(name, shape)], dtype, [count], flat positions in the tensor, values, process group).

        Raises:
            RuntimeError: there is no base yet.
        """
        mark = self._mark
        if mark is None:
            raise RuntimeError("get_per_tensor_param_delta_shard: call prime_delta_snapshots() after a full push first")

        def entries() -> Iterator[tuple]:
            changed = {one.name: one for one in mark.changes()}
            for whole in dsx_zero.export.weight_ranges(self.shards):
                one = changed.get(whole.name)
                positions = (
                    torch.empty(0, dtype=torch.int64, device="cpu") if one is None else one.positions + one.start
                )
                values = whole.values.new_empty(0) if one is None else one.values.to(whole.values.device)
                dtype = str(whole.values.dtype).removeprefix("torch.")
                slots, counts = [(whole.name, tuple(whole.shape))], [len(positions)]
                yield slots, dtype, counts, positions.to(values.device), values, dist.group.WORLD

        return entries(), None

    # - checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **options: Any,
    ) -> None:
        """Write `<local_path>/dsx` (collective), also while states are in host memory.

        Raises:
            ValueError: `hdfs_path` is given; copy the folder afterwards.
        """
        import dsx_checkpoint  # lazy import: training alone does not need it

        _no_copies(hdfs_path)
        state: dict[str, Any] = {"global_step": global_step}
        if self.lr_scheduler is not None:
            state["lr_scheduler"] = {k: v for k, v in self.lr_scheduler.state_dict().items() if _plain(v)}
        dsx_checkpoint.save_training(local_path, "dsx", self.module, self.shards, state=state)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False, **options: Any
    ) -> None:
        """Load what `save_checkpoint` wrote, on any number of ranks (collective). The files stay.

        Raises:
            ValueError: `hdfs_path` is given, or the folder has no checkpoint.
        """
        import dsx_checkpoint  # lazy import: training alone does not need it

        _no_copies(hdfs_path)
        asleep = list(self.shards.moved.away)
        self.shards.reload_states()
        loaded = dsx_checkpoint.load_training(local_path, self.module, self.shards, tag="dsx")
        if loaded is None:
            raise ValueError(f"load_checkpoint: {local_path} has no checkpoint of this engine")
        if self.lr_scheduler is not None and "lr_scheduler" in loaded.state:
            self.lr_scheduler.load_state_dict({**self.lr_scheduler.state_dict(), **loaded.state["lr_scheduler"]})
        if asleep:
            self.shards.offload_states(asleep)

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """Inside, the model is the base without adapters (the reference policy)."""
        return self.module.disable_adapter() if self._is_lora else nullcontext()


def _no_copies(hdfs_path: str | None) -> None:
    if hdfs_path is not None:
        raise ValueError(f"hdfs_path: got {hdfs_path!r}, expected None; copy the folder local_path yourself")


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list))


class _Mode(BaseEngineCtx):
    """verl's context of a phase: it moves states, and sets the module's mode and the group of verl's attention."""

    def __init__(self, engine: DSXEngine, mode: str, **options: Any) -> None:
        super().__init__(engine=engine, mode=mode, **options)

    def __enter__(self) -> None:
        self.engine._entering = True
        try:
            super().__enter__()
        finally:
            self.engine._entering = False
        self._outer = ulysses.get_ulysses_sequence_parallel_group()
        ulysses.set_ulysses_sequence_parallel_group(self.engine.ulysses_parallel_group)
        self.engine.module.train(self.mode == "train")

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        ulysses.set_ulysses_sequence_parallel_group(self._outer)
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        self.engine.shards.free_gathered()
        super().__exit__(kind, value, trace)


_DEVICES = ["cuda", "npu", "cpu"]


@EngineRegistry.register(model_type="language_model", backend=["dsx"], device=_DEVICES)
class DSXEngineWithLMHead(DSXEngine, FSDPEngineWithLMHead):
    """For actors and reference policies."""


@EngineRegistry.register(model_type="value_model", backend=["dsx"], device=_DEVICES)
class DSXEngineWithValueHead(DSXEngine, FSDPEngineWithValueHead):
    """For critics."""
