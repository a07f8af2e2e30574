"""The engine and the optimizer of dsx under DeepSpeed's names.

`entry.initialize` builds dsx's engine and gives it one of these classes. They add names and no training state: each
method here calls the method of dsx that does the work.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import dsx_comm
import torch
from dsx.engine import Engine
from dsx.engine.errors import EngineArgumentError
from dsx.engine.observers import StepTimes
from dsx.engine.pipeline import PipelineEngine as DsxPipelineEngine
from dsx_comm import parallel_groups
from dsx_zero import ZeroOptimizer, gather_hooks_paused
from torch import nn

from .figures import ThroughputView
from .getters import ENGINE_METHODS, Where, value_of
from .refusing import RefusingClass, refuse
from .scaler import LossScaleView
from .switches import EngineSwitches
from .unsupported import UNSUPPORTED_MEMBERS

__all__ = ["DeepSpeedEngine", "DeepSpeedOptimizer", "ParameterOffload", "PipelineEngine", "renamed"]


class DeepSpeedEngine(EngineSwitches, Engine, metaclass=RefusingClass):
    """The engine that `deepspeed.initialize` returns: a `dsx.Engine` with the additional names below."""

    _refused, _shown = UNSUPPORTED_MEMBERS, "engine"

    @property
    def config(self) -> dict[str, Any]:
        """The given configuration as a dictionary, with all batch sizes filled in."""
        return super().config.to_dict()

    # Lightning Fabric calls step() of the engine as if it were an optimizer, so it has an optimizer's attributes.

    @property
    def optimizer(self) -> Any:
        """The optimizer. Without one at stage 3, the `ParameterOffload` whose hooks programs remove and restore."""
        found = super().optimizer
        if found is None and self.zero_optimization_stage() == 3:
            return vars(self).setdefault("_parameter_offload", ParameterOffload(self.module))
        return found

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer; empty without one."""
        return self._groups()

    @property
    def defaults(self) -> dict[str, Any]:
        """The default settings of the optimizer; empty without one."""
        return getattr(super().optimizer, "defaults", {})

    @property
    def state(self) -> Any:
        """The state of the optimizer; empty without one."""
        return getattr(super().optimizer, "state", {})

    @property
    def gradient_average(self) -> bool:
        """Whether gradients are averaged over the data-parallel ranks; False if they are summed.

        Raises:
            EngineArgumentError: another value is set: the reductions are built for one of the two.
        """
        return super().config.use("gradient_allreduce_op") == "mean"

    @gradient_average.setter
    def gradient_average(self, value: bool) -> None:
        if bool(value) != self.gradient_average:
            op = "mean" if value else "sum"
            raise EngineArgumentError(
                f"engine.gradient_average: got {value!r} after the engine was built; set"
                f' "gradient_allreduce_op": "{op}" in the configuration'
            )

    # - values of the configuration: see `getters.ENGINE_METHODS`, whose names are added below

    @property
    def communication_data_type(self) -> torch.dtype:
        """The data type in which gradients are sent."""
        return super().config.precision.dtype("reduce")

    def get_model_parallel_rank(self) -> int:
        """This rank's place among the ranks that share one model."""
        return self._parts.topology.tensor_slice[0]

    get_tensor_parallel_rank = get_model_parallel_rank

    def get_sequence_parallel_group(self) -> Any:
        """The group of the ranks that hold parts of the same sequences."""
        return parallel_groups.get_sequence_parallel_group()

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        """Whether items of a dataset are read by index."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        """Whether a dataset can only be iterated over."""
        return isinstance(obj, torch.utils.data.IterableDataset)

    # - figures, and what programs do between steps

    @property
    def tput_timer(self) -> ThroughputView:
        """The throughput: `avg_samples_per_sec()`, `batch_size`, `global_step_count`."""
        return ThroughputView(self)

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Name and milliseconds of the parts of the latest step; empty without a clock (`wall_clock_breakdown`)."""
        return {
            name: ms for seen in self._parts.watch.observers if isinstance(seen, StepTimes) for name, ms in seen.latest
        }

    def collect_python_gc(self) -> int:
        """Run Python's garbage collector now. Returns the number of unreachable objects it found."""
        return gc.collect()

    @staticmethod
    def all_gather_scalar(value: torch.Tensor, dp_group: Any) -> list[torch.Tensor]:
        """The tensors `value` of all ranks of a group, which have one shape (collective)."""
        gathered = [torch.zeros_like(value) for _ in range(dsx_comm.get_world_size(group=dp_group))]
        dsx_comm.all_gather(gathered, value, group=dp_group)
        return gathered

    if not TYPE_CHECKING:  # with it every misspelt method would pass a checker

        def __getattr__(self, name: str) -> Any:
            if name in UNSUPPORTED_MEMBERS:
                refuse("engine", name, UNSUPPORTED_MEMBERS[name])
            return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in UNSUPPORTED_MEMBERS:
            refuse("engine", name, UNSUPPORTED_MEMBERS[name])
        super().__setattr__(name, value)

    # - whole weights

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` writes at stage 3."""
        return bool(super().config.zero.stage3_gather_16bit_weights_on_model_save)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The whole weights on rank 0, None on the other ranks (collective)."""
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters, rank0_only=True)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict


def _getter(name: str, where: Where) -> Callable[[DeepSpeedEngine], Any]:
    def get(self: DeepSpeedEngine) -> Any:
        return value_of(super(DeepSpeedEngine, self).config, where)

    get.__name__, get.__doc__ = name, f"The configured value: `dsx_compat.getters.ENGINE_METHODS[{name!r}]`."
    return get


for _name, _where in ENGINE_METHODS.items():
    setattr(DeepSpeedEngine, _name, _getter(_name, _where))


class PipelineEngine(DsxPipelineEngine, DeepSpeedEngine):
    """The engine of a `PipelineModule`."""


class DeepSpeedOptimizer(ZeroOptimizer):
    """The optimizer that `deepspeed.initialize` returns."""

    @property
    def parameter_offload(self) -> ParameterOffload:
        """The hooks of stage 3, for programs that remove them for a while (trl).

        Raises:
            AttributeError: the stage is below 3, where there are no such hooks.
        """
        if self.runtime.stage != 3:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'parameter_offload': no stage 3")
        return self.__dict__.setdefault("_parameter_offload", ParameterOffload(self.runtime.model))

    # - the loss scale

    @property
    def loss_scaler(self) -> LossScaleView:
        """The loss scale: `cur_scale`, `dynamic`, `cur_iter`, ..."""
        return self.__dict__["_loss_scale_view"]

    loss_scale_config = loss_scaler

    def needs_scaler(self) -> bool:
        """Whether the loss has to be scaled before a backward by hand."""
        return self.dynamic_loss_scale

    # - what one rank trains

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """Stages 0 to 2: the parameters of each parameter group."""
        return self._below_stage_3("bit16_groups", [list(group["params"]) for group in self.param_groups])

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """Stages 0 to 2: the master weights that this rank updates, in the order of the model's parameters. DeepSpeed
        has one tensor for each parameter group, dsx has one for each parameter, or piece of a parameter.
        """
        return self._below_stage_3("single_partition_of_fp32_groups", self._masters_in_memory())

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """Stage 3: the parameters of each parameter group."""
        return self._at_stage_3("fp16_groups", [list(group["params"]) for group in self.param_groups])

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """Stage 3: the master weights that this rank updates, as `single_partition_of_fp32_groups` below stage 3."""
        return self._at_stage_3("fp32_partitioned_groups_flat", self._masters_in_memory())

    def _masters_in_memory(self) -> list[torch.Tensor]:
        found = []
        for info in self.runtime.infos:
            if any(home.view() is None for home, _ in self.layout.homes_of(info.name)):
                raise RuntimeError(
                    f"got the master weights of '{info.name}' on disk, expected them in memory; read them with"
                    " deepspeed.utils.safe_get_local_fp32_param(parameter)"
                )
            found += [master.tensor.detach() for master in self.layout.masters_of(info.name)]
        return found

    def _below_stage_3(self, name: str, found: Any) -> Any:
        if self.runtime.stage == 3:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r} at stage 3")
        return found

    def _at_stage_3(self, name: str, found: Any) -> Any:
        if self.runtime.stage != 3:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r} below stage 3")
        return found


class _Handle:
    """A handle that stands for all hooks of a model. Removing it pauses them."""

    def __init__(self, owner: ParameterOffload) -> None:
        self._owner = owner

    def remove(self) -> None:
        self._owner.pause()


class _Coordinator:
    """DeepSpeed's record of the order of gathers. dsx keeps its own, so there is nothing to invalidate here."""

    def is_invalid_trace(self) -> bool:
        return False

    def _invalidate_trace(self) -> None:
        """Nothing to do."""


class _ModelView:
    """A model with the additional method `ds_external_parameters`. All other attributes are the model's."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def ds_external_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """An empty list: dsx gathers a parameter that another module uses when it is used."""
        return ()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._module.named_parameters(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class ParameterOffload:
    """The hooks of one model at stage 3, under DeepSpeed's names.

    Removing every handle of `forward_hooks` pauses gathering; `_register_deepspeed_module` resumes it. In between the
    caller gathers the parameters with `zero.GatheredParameters`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = _ModelView(module)
        self.param_coordinator = _Coordinator()
        self.forward_hooks: list[Any] = [_Handle(self)]
        self.backward_hooks: list[Any] = []
        self._model = module
        self._paused: ExitStack | None = None

    def pause(self) -> None:
        """From now on forwards neither gather nor free parameters."""
        if self._paused is None:
            self._paused = ExitStack()
            self._paused.enter_context(gather_hooks_paused(self._model))

    def _register_deepspeed_module(self, module: Any, count: Any = None) -> None:
        """From now on forwards gather and free parameters again."""
        if self._paused is not None:
            self._paused.close()
            self._paused = None
        self.forward_hooks = [_Handle(self)]

    _register_hooks_recursively = _register_deepspeed_module


def renamed(engine: Engine) -> DeepSpeedEngine:
    """Change the classes of an engine and its optimizer to those with DeepSpeed's names. Returns the engine."""
    named: type = PipelineEngine if isinstance(engine, DsxPipelineEngine) else DeepSpeedEngine
    engine.__class__ = named
    if isinstance(engine, PipelineEngine):
        from . import grid  # lazy import: most programs have no pipeline

        grid.renamed(engine.module)  # type: ignore[arg-type]
    optimizer = engine._parts.optimizer
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.__class__ = DeepSpeedOptimizer
        scale: Any = engine._parts.update.scaler
        optimizer.__dict__["_loss_scale_view"] = LossScaleView(scale)
    return engine  # type: ignore[return-value]
