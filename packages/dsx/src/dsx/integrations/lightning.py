"""Lightning trains with dsx: `Trainer(strategy=DSXStrategy(stage=3))`, or `strategy="dsx"` behind an import of this.

Lightning keeps what it decides: the loop, accumulation, precision, clipping, schedules, which batch is whose. dsx has
the model and the optimizer: the strategy makes an engine of both (`strategy.engine`), gives it losses and tells it when
to update. Gradients of a micro-batch are reduced into this rank's shard at stages 2 and 3, also while accumulating.

A checkpoint is a folder, which any stage and number of ranks can load; with `save_weights_only` it is Lightning's own
file with whole weights. Files that another strategy wrote are loaded too.

Left out: several optimizers, mixed fp16 (`16-true` has the loss scale), clipping by value, Fabric, models in stages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import dsx_zero
import torch
from lightning.pytorch import LightningModule  # pyright: ignore[reportMissingImports]
from lightning.pytorch.core.optimizer import _MockOptimizer  # pyright: ignore[reportMissingImports]
from lightning.pytorch.plugins.precision import Precision  # pyright: ignore[reportMissingImports]
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry  # pyright: ignore[reportMissingImports]
from lightning.pytorch.trainer.states import TrainerFn  # pyright: ignore[reportMissingImports]
from lightning.pytorch.utilities import GradClipAlgorithmType  # pyright: ignore[reportMissingImports]
from lightning.pytorch.utilities.model_helpers import is_overridden  # pyright: ignore[reportMissingImports]

import dsx

__all__ = ["DSXPrecision", "DSXStrategy"]

_TAG = "dsx"
_SECTIONS = {
    "32-true": {},
    "bf16-mixed": {},
    "bf16-true": {"bf16": {"enabled": True}},
    "16-true": {"fp16": {"enabled": True}},
}
_TRAINER_HAS = {
    "train_batch_size": "the loader's batch size",
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
    "managed_gradient_accumulation": "Trainer(accumulate_grad_batches=...)",
    "bf16": 'Trainer(precision="bf16-true")',
    "fp16": 'Trainer(precision="16-true")',
    "amp": 'Trainer(precision="bf16-mixed")',
    "torch_autocast": 'Trainer(precision="bf16-mixed")',
    "optimizer": "LightningModule.configure_optimizers",
    "scheduler": "LightningModule.configure_optimizers",
}


class DSXPrecision(Precision):
    """Lightning's plugin for contexts and inputs, with losses, clipping and updates given to the engine.

    Args:
        plain: Lightning's plugin for `Trainer(precision=...)`.

    Raises:
        ValueError: a precision that dsx does not train in.
    """

    def __init__(self, plain: Precision) -> None:
        super().__init__()
        if plain.precision not in _SECTIONS:
            instead = {
                "16-mixed": "'16-true' (parameters and computation in fp16, fp32 masters, a loss scale) or 'bf16-mixed'"
            }
            raise ValueError(
                f"Trainer(precision=...): got {plain.precision!r}, which DSXStrategy has not; use"
                f" {instead.get(plain.precision, ', '.join(map(repr, _SECTIONS)))}"
            )
        self.plain, self.precision = plain, plain.precision
        self.engine: dsx.Engine | None = None
        """Set while a model is trained."""

    def module_init_context(self) -> AbstractContextManager[Any]:
        """As of `plain`."""
        return self.plain.module_init_context()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """As of `plain`."""
        return self.plain.tensor_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        """As of `plain`: autocast, or the default dtype."""
        return self.plain.forward_context()

    def convert_input(self, data: Any) -> Any:
        """As of `plain`."""
        return self.plain.convert_input(data)

    def pre_backward(self, tensor: torch.Tensor, module: LightningModule) -> torch.Tensor:
        """Call the hooks with the loss, and give backward the scaled one."""
        tensor = super().pre_backward(tensor, module)
        return self._training().scale(tensor)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure (forward, backward, hooks) and update.

        Raises:
            TypeError: arguments for the optimizer's step; dsx divides the optimizer and steps it without any.
            ValueError: `training_step` returned None: other ranks may have a loss, and would wait for this one.
        """
        if kwargs:
            raise TypeError(f"optimizer.step({', '.join(kwargs)}): with DSXStrategy a step has no arguments")
        result = self._wrap_closure(model, optimizer, closure)
        if model.automatic_optimization and result is None:
            raise ValueError(
                "training_step: got None, expected a loss; with DSXStrategy no rank can leave out a batch, because the"
                " others would wait for its gradients: return a loss that is multiplied by 0"
            )
        self._training().step()
        return result

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Check that this is the norm to which the engine's step clips.

        Raises:
            ValueError: it is another one, or values are to be clipped.
        """
        refuse_values(gradient_clip_algorithm)
        known = self._training().gradient_clipping() or 0.0
        if clip_val > 0 and float(clip_val) != float(known):
            raise ValueError(
                f"clip_gradients: got {clip_val}, but this engine's step clips to {known}, which is decided before"
                " training; set Trainer(gradient_clip_val=...), with manual optimization"
                ' DSXStrategy(config={"gradient_clipping": ...})'
            )

    def _training(self) -> dsx.Engine:
        if self.engine is None:
            raise RuntimeError("DSXStrategy: there is no engine that trains; call trainer.fit first")
        return self.engine


class DSXStrategy(DDPStrategy):
    """ZeRO stages 0 to 3 for `lightning.Trainer`, with whatever else an engine of dsx has.

    Args:
        stage: ZeRO stage; None: as `config` says.
        config: further sections of dsx's configuration, or a JSON file with them: offload, monitoring, activation
            checkpointing, ... Without what `Trainer` and the module decide (batches, precision, optimizer).
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout: as of Lightning's DDPStrategy.

    Raises:
        ValueError: the stage does not exist, contradicts `config`, or `config` decides what Trainer decides.
    """

    strategy_name = "dsx"

    def __init__(
        self, stage: int | None = None, config: Mapping[str, Any] | str | os.PathLike[str] | None = None, **ddp: Any
    ) -> None:
        unknown = sorted(set(ddp) - _DDP)
        if unknown:
            raise TypeError(
                f"DSXStrategy: got {', '.join(unknown)}, expected stage, config, {', '.join(sorted(_DDP))}; sections of"
                " dsx's configuration go into config={...}"
            )
        self.config = _checked_config(stage, config)
        super().__init__(**ddp)
        self._engine: dsx.Engine | None = None

    @property
    def engine(self) -> dsx.Engine:
        """The engine: its weights, its states, its last step.

        Raises:
            RuntimeError: Trainer has not set the model up yet.
        """
        if self._engine is None:
            raise RuntimeError("DSXStrategy.engine: there is none yet; Trainer makes it in fit, validate, ...")
        return self._engine

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.config["zero_optimization"]["stage"]

    @property
    def precision_plugin(self) -> Precision:
        """The plugin that Lightning chose, as a `DSXPrecision`."""
        if self._precision_plugin is None:
            self._precision_plugin = DSXPrecision(Precision())
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        wrapped = plugin is None or isinstance(plugin, DSXPrecision)
        self._precision_plugin = plugin if wrapped else DSXPrecision(plugin)

    def setup(self, trainer: Any) -> None:
        """Make the engine (collective). For evaluation after training the engine that trained is used."""
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        module = self.lightning_module
        if fits and self._layer_sync:
            module = self._layer_sync.apply(module)
        if fits or self._engine is None or self._engine.module is not module:
            self._engine = self._made_engine(trainer, module, fits=fits)
        self.model = self._engine
        self.precision_plugin.engine = self._engine if fits else None
        self.barrier()

    def _made_engine(self, trainer: Any, module: LightningModule, *, fits: bool) -> dsx.Engine:
        optimizer = None
        if fits:
            _check_clipping(trainer, module)
            self.setup_optimizers(trainer)
            optimizer = _only_optimizer(self.optimizers)
        engine, shards, *_ = dsx.initialize(
            model=module, optimizer=optimizer, config=self._engine_config(trainer), dist_init_required=False
        )
        self.optimizers = [shards] if fits else []
        return engine

    def _engine_config(self, trainer: Any) -> dict[str, Any]:
        clip = trainer.gradient_clip_val
        if clip and "gradient_clipping" in self.config:
            raise ValueError(
                f"gradient_clipping: got {self.config['gradient_clipping']} in DSXStrategy(config=...) and"
                f" Trainer(gradient_clip_val={clip}), expected one of them"
            )
        return {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": float(clip or 0.0),  # dsx's own default is 1.0
            **self.config,
            **_SECTIONS[self.precision_plugin.precision],
            "managed_gradient_accumulation": False,
        }

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """In `configure_model` at stage 3 `model_sharded_context` says where tensors are made."""
        if self.stage == 3:
            with self.precision_plugin.tensor_init_context():
                yield
        else:
            with super().tensor_init_context(empty_init=empty_init):
                yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Around `configure_model`: at stage 3 a layer is divided as soon as it is made."""
        with dsx.zero.Init(config_dict_or_path=self.config, enabled=self.stage == 3):
            yield

    def model_to_device(self) -> None:
        """The engine has moved the model; a sharded model is not moved as a whole."""

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Around all micro-batches of an update but the last."""
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(None)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure and update."""
        return self.precision_plugin.optimizer_step(
            optimizer, model=model or self.lightning_module, closure=closure, **kwargs
        )

    def teardown(self) -> None:
        """End a run of Trainer. The model stays sharded, for an evaluation or another fit."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: the engine loads."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: the engine saves the weights. `engine.module_state_dict()` has them whole."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty: the engine saves the states."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder, or with `weights_only` one file with whole weights (collective).

        Raises:
            TypeError: storage options for a folder: the engine writes it.
        """
        filepath = self.broadcast(filepath)
        if "optimizer_states" not in checkpoint:
            whole = self.engine.module_state_dict(rank0_only=True)
            super().save_checkpoint({**checkpoint, "state_dict": whole}, filepath, storage_options=storage_options)
            return
        if storage_options is not None:
            raise TypeError("save_checkpoint(storage_options=...): got some, expected None: dsx writes a local folder")
        self.engine.save_checkpoint(filepath, tag=_TAG, client_state=checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a folder into the engine (collective), or read a file of any strategy.

        Raises:
            FileNotFoundError: there is nothing at this path.
        """
        path = self.broadcast(checkpoint_path)
        if not Path(path).is_dir():
            return super().load_checkpoint(path, *args, **kwargs)
        fits = self.precision_plugin.engine is not None
        found, state = self.engine.load_checkpoint(path, tag=_TAG, load_module_only=not fits)
        if found is None:
            raise FileNotFoundError(f"load_checkpoint: {path} has no checkpoint of DSXStrategy")
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """The weights of a file; those of a folder are loaded already."""
        if checkpoint["state_dict"]:
            self.engine.load_module_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """The optimizer's states of a file; those of a folder are loaded already."""
        if checkpoint["state_dict"]:
            (states,) = checkpoint["optimizer_states"]
            dsx_zero.load_full_state_dict(self.optimizers[0], {"model": checkpoint["state_dict"], "optimizer": states})

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """`Trainer(strategy="dsx")`."""
        strategy_registry.register(cls.strategy_name, cls, description="ZeRO with dsx, stage 3")


_DDP = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
}


def _checked_config(stage: int | None, given: Any) -> dict[str, Any]:
    """The configuration with a stage."""
    config = dict(given if isinstance(given, Mapping) else json.loads(Path(given).read_text()) if given else {})
    for key, place in _TRAINER_HAS.items():
        if key in config:
            raise ValueError(f"DSXStrategy(config=...): got {key!r}, which Lightning decides; use {place}")
    zero = dict(config.get("zero_optimization") or {})
    if stage is not None and zero.get("stage", stage) != stage:
        raise ValueError(f"DSXStrategy(stage={stage}): config says zero_optimization.stage {zero['stage']}; give one")
    zero.setdefault("stage", 3 if stage is None else stage)
    if zero["stage"] not in (0, 1, 2, 3):
        raise ValueError(f"DSXStrategy(stage=...): got {zero['stage']!r}, expected 0, 1, 2 or 3")
    return {**config, "zero_optimization": zero}


def refuse_values(algorithm: Any) -> None:
    """Raise ValueError where gradients are to be clipped by value."""
    if algorithm is not None and GradClipAlgorithmType(algorithm) == GradClipAlgorithmType.VALUE:
        raise ValueError(
            "gradient_clip_algorithm: got 'value', expected 'norm': with DSXStrategy no rank has whole gradients"
        )


def _check_clipping(trainer: Any, module: LightningModule) -> None:
    refuse_values(trainer.gradient_clip_algorithm)
    if is_overridden("configure_gradient_clipping", module, LightningModule):
        raise ValueError(
            f"{type(module).__name__}.configure_gradient_clipping: DSXStrategy would not call it at the right time: it"
            " clips inside of the step, by the norm over all ranks; remove the method and use"
            " Trainer(gradient_clip_val=...)"
        )


def _only_optimizer(optimizers: list[Any]) -> Any:
    if len(optimizers) == 1 and isinstance(optimizers[0], _MockOptimizer):
        raise ValueError("configure_optimizers: got none, expected an optimizer; use trainer.validate or predict")
    if len(optimizers) != 1:
        raise ValueError(
            f"configure_optimizers: got {len(optimizers)} optimizers, expected one: DSXStrategy divides one optimizer"
            " over the ranks; use parameter groups for other learning rates"
        )
    return optimizers[0]


DSXStrategy.register_strategies(StrategyRegistry)
