"""dsx as the planner and the autotuner see it (`dsx_plan.engine.EngineToPlan`); registered as an entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from dsx_plan.engine import StepWatcher
from torch import nn

from .engine.engine import Engine
from .engine.pipeline import PipelineEngine
from .errors import DsxConfigError
from .pipelining import is_pipeline

__all__ = ["PlannedEngine"]


class Built:
    """An engine, and what a plan reads of it (`dsx_plan.engine.BuiltEngine`)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shards = engine._parts.shards
        self.pipeline = engine._pipe if isinstance(engine, PipelineEngine) else None

    def add_hook(self, hook: StepWatcher) -> None:
        """Call `hook` after those of the engine's extensions."""
        self.engine._parts.watch.hooks.append(hook)  # pyright: ignore[reportArgumentType]


class PlannedEngine:
    """Reads dsx's configurations and builds dsx's engines."""

    config_error = DsxConfigError

    def read(self, source: Any) -> dict[str, Any]:
        """See `config.source.read`."""
        from .config.source import read  # lazy imports here: pydantic, the schema, and every sibling package

        return dict(read(source).data)

    def load(self, source: Any, *, world_size: int, template: bool = False) -> Any:
        """See `config.load_config`."""
        from .config.load import load_config

        return load_config(source, world_size=world_size, template=template)

    def value_type(self, path: str) -> Any | None:
        """The annotation of the key at a dotted path; None where the schema knows no such key."""
        from .config.sections import whole_model
        from .config.translate import model_in

        owner: Any = whole_model()
        *sections, name = path.split(".")
        for part in sections:
            field = owner.model_fields.get(part)
            owner = None if field is None else model_in(field.annotation)
            if owner is None:
                return None
        field = owner.model_fields.get(name)
        return None if field is None else field.annotation

    def is_pipeline(self, model: nn.Module) -> bool:
        """See `pipelining.is_pipeline`."""
        return is_pipeline(model)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None,
        store: Any,
    ) -> Built:
        """See `wiring.build_engine`."""
        from .engine.request import Request
        from .wiring import build_engine

        request = Request(
            model=model,
            optimizer=optimizer,
            model_parameters=None,
            lr_scheduler=None,
            training_data=None,
            collate_fn=None,
            mpu=None,
            distributed_port=29500,
            dist_init_required=None,
            store=store,
        )
        return Built(build_engine(dict(config), request))
