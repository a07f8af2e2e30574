"""`PipelineModule`: a model as a list of layers; each rank builds and runs the layers of its stages.

    layers = [LayerSpec(Embedding, ...), *(LayerSpec(Block, ...) for _ in range(24)), LayerSpec(Head, ...)]
    model = PipelineModule(layers, num_stages=4, loss_fn=loss_fn)

It also accepts an unchanged `nn.Sequential`, and Hugging Face GPT-2, Llama and BERT-style models (`models.py`). Layers
are named by their index in the whole list, so parameter names do not depend on the number of stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dsx_comm
import torch
from dsx_comm import parallel_groups
from torch import nn

from .chunk import Chunk, Recomputation, recompute
from .errors import PipelineError
from .grid import ProcessTopology, RankGrid, topology_for
from .layer_files import LayerFiles, TorchFiles
from .layers import LayerSpec, TiedLayerSpec, class_name, count_parameters, flatten_layers
from .models import ModelParts, parts_of_model
from .partition import bounds_of
from .planner import LayerCost
from .schedule import Schedule, build
from .ties import Ties, find_ties


class PipelineModule(nn.Module):
    """This rank's part of a model that is divided into pipeline stages. All ranks of the world construct it together.

    Args:
        layers: modules, `LayerSpec`s, `TiedLayerSpec`s, functions, and nested sequences of them; or an `nn.Sequential`;
            or a Hugging Face model. Each layer takes the output of the previous one as its only argument.
        num_stages: number of ranks of the pipeline; the world is divided into data-parallel copies of it.
        topology: a grid with an axis "pipe", instead of `num_stages`.
        loss_fn: (output, labels) -> scalar; None: the last layer's output is the loss.
        seed_layers: build layer i under the seed `base_seed + i`, whichever rank builds it.
        seed_fn: called with that seed instead of `torch.manual_seed`.
        base_seed: seed of layer 0; see `seed_layers`.
        partition_method: "uniform", "parameters" (or "best"), "type:<regex>" or "time"; see `partition.py`.
        activation_checkpoint_interval: number of layers that are recomputed together in the backward; 0: none.
        activation_checkpoint_func: (function, *tensors) -> tensors; default: `torch.utils.checkpoint.checkpoint` with
            `use_reentrant=False`.
        checkpointable_layers: class names; only blocks of these classes are recomputed. Default: every block with
            parameters.
        dynamic_shape: shapes may differ between micro-batches.
        schedule: the schedule that will run, or its name. It decides which rank has which stages.
        chunks: stages per rank, for "interleaved".
        layer_times: seconds per layer (or `LayerCost`s), for partition_method="time".

    Attributes:
        parts: first layer of every stage, followed by the number of layers.
        schedule: as given.
        stage_id: this rank's index in the pipeline.
        stage_ranks: for every stage, the index in the pipeline of the rank that holds it.
        stage_modules: this rank's stages, which `Pipeline` or an engine runs.
        ties: the weights that this rank shares with other ranks.

    Raises:
        PipelineError: both or neither of `num_stages` and `topology` are given, there is no process group, the schedule
            has another number of ranks, or the ranks have different layers.
        TopologyError: the world does not fit `num_stages` or `topology`.
        PartitionError: the layers cannot be divided in the requested way.
        ScheduleError: there is no schedule of this name, or it does not take these sizes.
    """

    grid_type: type[RankGrid] = RankGrid  # dsx-compat has one with more names

    def __init__(
        self,
        layers: Iterable[Any] | nn.Module,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        schedule: Schedule | str = "1f1b",
        chunks: int | None = None,
        layer_times: Sequence[float | LayerCost] | None = None,
    ) -> None:
        super().__init__()
        self._grid = self.grid_type(topology_for(num_stages, topology))
        self._groups = parallel_groups.groups_of(self._grid)  # kept: layers may make groups of their own in it
        self.stage_id = self._grid.pipe.rank
        self.dynamic_shape = dynamic_shape
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self._model: ModelParts | None = None
        if isinstance(layers, nn.Module) and not isinstance(layers, (nn.Sequential, nn.ModuleList)):
            self._model = parts_of_model(layers)
            self._specs: list[Any] = self._model.units
            loss_fn = loss_fn or self._model.loss
        else:
            self._specs = flatten_layers(layers)
        self.loss_fn = loss_fn
        self.schedule = schedule
        self.stage_ranks = _stage_ranks_of(schedule, self._grid.pipe.size, chunks)
        times = None if layer_times is None else [_seconds_of(t) for t in layer_times]
        self.parts = bounds_of(
            partition_method, len(self.stage_ranks), [class_name(s) for s in self._specs],
            lambda: [count_parameters(s) for s in self._specs],
            None if times is None else lambda: times,
        )  # fmt: skip
        self._check_same_layers()
        self.recomputation = Recomputation(
            activation_checkpoint_interval,
            activation_checkpoint_func or recompute,
            None if checkpointable_layers is None else frozenset(checkpointable_layers),
        )
        self.tied_modules = nn.ModuleDict()
        with parallel_groups.speaking_of(self._groups):
            self.stage_modules: list[nn.Module] = [self._build_stage(s) for s in self.local_stages()]
        place = {i: rank for s, rank in enumerate(self.stage_ranks) for i in range(*self.parts[s : s + 2])}
        self.ties = Ties(find_ties(self, self._specs, place, self._grid))
        self.ties.synchronize()
        self._files = LayerFiles(self, self._specs, self._local_layers(), self._grid, of_model=self._model is not None)
        del self._specs, self._model  # they hold layers of other ranks, whose memory is freed here

    # - building

    def _check_same_layers(self) -> None:
        """Check that all ranks have the same layers, and take the split of rank 0.

        Ranks may compute different splits, because slices of a layer may have different numbers of parameters.
        """
        mine = ([class_name(s) for s in self._specs], self.parts)
        rows: list[Any] = [None] * self._grid.world_size
        dsx_comm.all_gather_object(rows, mine)
        for rank, (names, _) in enumerate(rows):
            if names != rows[0][0]:
                at = next(
                    (i for i, (a, b) in enumerate(zip(names, rows[0][0])) if a != b), min(len(names), len(rows[0][0]))
                )
                raise PipelineError(
                    f"the ranks have different layers: rank 0 has {len(rows[0][0])}, rank {rank} has {len(names)}, and "
                    f"layer {at} differs; every rank must be given the same list"
                )
        self.parts = list(rows[0][1])

    def local_stages(self) -> list[int]:
        """The stages of this rank."""
        return [s for s, rank in enumerate(self.stage_ranks) if rank == self.stage_id]

    def _local_layers(self) -> list[int]:
        return [i for stage in self.local_stages() for i in range(self.parts[stage], self.parts[stage + 1])]

    def _build_stage(self, stage: int) -> nn.Module:
        mine = range(self.parts[stage], self.parts[stage + 1])
        if self._model is not None:
            tree = self._model.keep({i for s in self.local_stages() for i in range(self.parts[s], self.parts[s + 1])})
            for name, child in tree.named_children():
                if name not in self._modules:  # `tree` holds all stages of this rank under the model's own names
                    self.add_module(name, child)
            return self._model.stage(set(mine), self.recomputation)
        steps = [(str(i), self._build_layer(i)) for i in mine]
        return Chunk(steps, [class_name(self._specs[i]) for i in mine], self.recomputation)

    def _build_layer(self, index: int) -> Any:
        """Build layer `index` and register it under its index."""
        spec = self._specs[index]
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in self.tied_modules:
                self.tied_modules[spec.key] = self._build_seeded(index, spec)
            module = self.tied_modules[spec.key]
            return module if spec.forward_fn is None else partial(spec.forward_fn, module)
        layer = self._build_seeded(index, spec) if isinstance(spec, LayerSpec) else spec
        if isinstance(layer, nn.Module):
            self.add_module(str(index), layer)
        return layer

    def _build_seeded(self, index: int, spec: LayerSpec) -> Any:
        if not self.seed_layers:
            return spec.build()
        with torch.random.fork_rng():
            (self.seed_fn or torch.manual_seed)(self.base_seed + index)
            return spec.build()

    # - running

    def forward(self, value: Any, stage: int | None = None) -> Any:
        """Run this rank's layers on one micro-batch.

        Args:
            value: the output of the previous stage, or the model's input.
            stage: index of one of this rank's stages; needed if the rank holds several.

        Raises:
            PipelineError: this rank does not hold the stage, or it holds several stages and `stage` is None. Several
                stages of a rank do not follow each other, so they cannot run as one.
        """
        mine = self.local_stages()
        if stage is None and len(mine) == 1:
            return self.stage_modules[0](value)
        if stage is None:
            raise PipelineError(f"this rank holds {len(mine)} stages; run them with dsx_pipe.Pipeline")
        if stage not in mine:
            raise PipelineError(f"stage {stage}: this rank holds the stages {mine}")
        return self.stage_modules[mine.index(stage)](value)

    @property
    def activation_checkpoint_interval(self) -> int:
        """The number of layers that are recomputed together in the backward; 0: none."""
        return self.recomputation.interval

    def set_checkpoint_interval(self, interval: int) -> None:
        """From now on recompute blocks of this many layers; 0: none."""
        self._set_recomputation(dataclasses.replace(self.recomputation, interval=interval))

    def set_checkpoint_function(self, function: Callable[..., Any]) -> None:
        """From now on recompute with this function, called as `torch.utils.checkpoint.checkpoint` is."""
        self._set_recomputation(dataclasses.replace(self.recomputation, function=function))

    def _set_recomputation(self, recomputation: Recomputation) -> None:
        self.recomputation = recomputation
        for stage in self.stage_modules:
            stage.recomputation = self.recomputation  # type: ignore[assignment]

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Losses in addition to the main one, by name; None if there are none. Subclasses override it."""
        return None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each of this rank's stages separately (`torch.nn.Module.compile`)."""
        for stage in self.stage_modules:
            stage.compile(*args, **kwargs)

    # - the grid of ranks

    @property
    def grid(self) -> RankGrid:
        """Groups of this rank."""
        return self._grid

    @property
    def pipe_group(self) -> Any:
        """Process group of this pipeline."""
        return self._grid.pipe.group

    def topology(self) -> ProcessTopology:
        """The grid of ranks."""
        return self._grid.topology

    def mpu(self) -> RankGrid:
        """The grid, which has the functions of an mpu that `dsx_comm.read_mpu` asks for."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Number of ranks of the pipeline."""
        return self._grid.pipe.size

    def stage_owner(self, layer_idx: int) -> int:
        """Index in the pipeline of the rank that holds layer `layer_idx`, both counted from 0.

        Raises:
            PipelineError: there is no such layer.
        """
        for stage, rank in enumerate(self.stage_ranks):
            if self.parts[stage] <= layer_idx < self.parts[stage + 1]:
                return rank
        raise PipelineError(f"layer {layer_idx}: the layers are 0..{self.parts[-1] - 1}")

    # - shared weights

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum the gradients of shared weights over the stages that use them (collective over these stages)."""
        self.ties.reduce_gradients()

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Shared weights of this rank with the groups that share them."""
        return [(tie.parameter, tie.group) for tie in self.ties.ties]

    # - one file per layer

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """DeepSpeed's file name of this rank's `local_layer_idx`-th layer: layer_<index>-<coordinates>-model_states.pt.

        The coordinates are those on the axes other than pipe and data; without such axes they are left out.
        """
        return self._files.path(ckpt_dir, self._local_layers()[local_layer_idx])

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """Paths of the existing files of this rank's `local_layer_idx`-th layer, for all slices."""
        return self._files.paths(ckpt_dir, self._local_layers()[local_layer_idx])

    def save_state_dict(
        self,
        save_dir: str | Path,
        checkpoint_engine: Any = None,
        exclude_frozen_params: bool = False,
        *,
        parallel_write: bool = False,
    ) -> None:
        """Write DeepSpeed's files of this module's weights, one per layer. All ranks call it.

        Args:
            save_dir: the folder; it is made if it does not exist.
            checkpoint_engine: an object whose `save(state_dict, path)` writes instead of torch.
            exclude_frozen_params: leave out parameters that are not trained.
            parallel_write: the data-parallel ranks divide the layers among them; False: the first of them writes all.

        Call it inside `dsx.zero.GatheredParameters` if ZeRO stage 3 has partitioned the parameters.

        Raises:
            PipelineError: on every rank, if one of them could not write its files.
        """
        engine = checkpoint_engine or TorchFiles()
        self._files.write(self, save_dir, engine, exclude_frozen=exclude_frozen_params, divided=parallel_write)

    def load_state_dir(self, load_dir: str | Path, checkpoint_engine: Any = None, strict: bool = True) -> None:
        """Load the weights of this rank's layers from DeepSpeed's files. All ranks call it.

        The files may have been written with any number of stages and slices.

        Args:
            load_dir: the folder with `layer_*-model_states.pt`.
            checkpoint_engine: an object whose `load(path, map_location=...)` reads instead of torch.
            strict: every weight must be in its file, and every entry of a file must be a weight.

        Raises:
            PipelineError: on every rank, if a file is missing, or names or shapes do not fit. Nothing is changed then.
        """
        self._files.read(self, load_dir, checkpoint_engine or TorchFiles(), strict=strict)


def _stage_ranks_of(schedule: Schedule | str, ranks: int, chunks: int | None) -> tuple[int, ...]:
    if isinstance(schedule, Schedule):
        if schedule.ranks != ranks:
            raise PipelineError(f"schedule {schedule.name!r} has {schedule.ranks} ranks, the pipeline has {ranks}")
        return schedule.stage_ranks
    return build(schedule, ranks, ranks, chunks).stage_ranks


def _seconds_of(cost: float | LayerCost) -> float:
    if isinstance(cost, LayerCost):
        return cost.forward + cost.input_backward + cost.weight_backward
    return float(cost)
