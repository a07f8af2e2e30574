"""What the engine adds to a checkpoint of tensors: counters, schedule, loss scale, data position, client state.

The tensors and the files are `dsx.checkpoint`'s business. Everything written here is free of ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..data import RepeatingLoader, TrainingLoader
from ..utils.logging import logger
from .errors import EngineArgumentError

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class Wanted:
    """What a load is to restore beside the weights."""

    optimizer: bool
    lr_scheduler: bool
    module_only: bool


def _progress(engine: Engine) -> dict[str, Any]:
    parts = engine._parts
    loader = engine.training_dataloader
    return {
        "counters": dataclasses.asdict(engine.counters),
        "lr_scheduler": parts.schedule.state_dict(),
        "loss_scaler": parts.scaler.state_dict(),
        "data": loader.state_dict() if isinstance(loader, (TrainingLoader, RepeatingLoader)) else {},
    }


def save(
    engine: Engine, save_dir: str, tag: str | None, client_state: dict[str, Any], latest: bool, exclude_frozen: bool
) -> str:
    """Save collectively; the folder written."""
    # Late: training without checkpoints does not need the format.
    from ..checkpoint import save as write

    parts = engine._parts
    ranks = _ranks(engine)
    parts.shards.synchronize()  # where ranks' parameters differ between two steps
    tag = _agreed_tag(engine, ranks, f"global_step{engine.global_steps}" if tag is None else str(tag))
    state = {"engine": _progress(engine), "client": client_state}
    folder = write(
        save_dir,
        tag,
        module=parts.module,
        slices=engine._parts.shards.slices(),
        state=state,
        ranks=ranks,
        exclude_frozen=exclude_frozen,
        save_latest=latest,
    )
    return str(folder)


def load(
    engine: Engine, load_dir: str, tag: str | None, strict: bool, wanted: Wanted
) -> tuple[str | None, dict[str, Any]]:
    """Load collectively; folder and client state, or (None, {})."""
    from ..checkpoint import load as read

    loaded = read(
        load_dir,
        tag,
        module=engine._parts.module,
        optimizer=engine._parts.shards,
        ranks=_ranks(engine),
        strict=strict,
        optimizer_states=wanted.optimizer and not wanted.module_only,
    )
    if loaded is None:
        logger.warning("load_checkpoint: %s has no checkpoint (no file named 'latest')", load_dir)
        return None, {}
    if not wanted.module_only:
        _restore(engine, loaded.state.get("engine", {}), wanted)
    engine.zero_grad()
    return str(loaded.path), loaded.state.get("client", {})


def _restore(engine: Engine, state: dict[str, Any], wanted: Wanted) -> None:
    parts = engine._parts
    for name, value in state.get("counters", {}).items():
        setattr(engine.counters, name, int(value))
    if wanted.optimizer and "loss_scaler" in state:
        parts.scaler.load_state_dict(state["loss_scaler"])
    if wanted.lr_scheduler:
        parts.schedule.load_state_dict(state.get("lr_scheduler", {}))
    loader = engine.training_dataloader
    if state.get("data") and isinstance(loader, (TrainingLoader, RepeatingLoader)):
        loader.load_state_dict(state["data"])


def _ranks(engine: Engine) -> Any:
    from ..checkpoint.ranks import default_ranks

    return default_ranks(engine._parts.topology.dp_group)


def _agreed_tag(engine: Engine, ranks: Any, tag: str) -> str:
    """Rank 0's tag; that others have another one is ignored, warned about or refused, as the config says."""
    tags = ranks.gather(tag)
    if len(set(tags)) == 1:
        return tag
    message = f"save_checkpoint: ranks save under different tags: {dict(enumerate(tags))}"
    policy = engine._parts.settings.tag_validation.lower()
    if policy == "fail":
        raise EngineArgumentError(f"{message}; pass the same tag on every rank")
    if policy == "warn":
        logger.warning("%s; using rank 0's, %r", message, tags[0])
    return tags[0]
