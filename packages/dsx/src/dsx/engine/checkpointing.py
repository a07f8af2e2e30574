"""What the engine adds to a checkpoint of tensors: counters, rates, schedule, loss scale, precision, data position, client state.

The tensors and the files are `dsx.checkpoint`'s business. Everything written here is free of ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..data import RepeatingLoader, TrainingLoader
from ..utils.logging import logger
from .errors import EngineArgumentError
from .hyperparameters import numbers_of, restore_numbers

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
        "param_groups": [] if parts.optimizer is None else numbers_of(parts.optimizer.param_groups),
        "precision": engine.precision.to_json(),
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
        None if tag is None else str(tag),
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
    engine.forget_micro_batches()
    return str(loaded.path), loaded.state.get("client", {})


def _restore(engine: Engine, state: dict[str, Any], wanted: Wanted) -> None:
    parts = engine._parts
    for name, value in state.get("counters", {}).items():
        setattr(engine.counters, name, int(value))
    if wanted.optimizer and "loss_scaler" in state:
        parts.scaler.load_state_dict(state["loss_scaler"])
    _restore_groups(engine, state, wanted)  # before the schedule, which may have more to say
    if wanted.lr_scheduler:
        parts.schedule.load_state_dict(state.get("lr_scheduler", {}))
    _compare_precision(engine, state.get("precision"))
    loader = engine.training_dataloader
    if state.get("data") and isinstance(loader, (TrainingLoader, RepeatingLoader)):
        loader.load_state_dict(state["data"])


def _restore_groups(engine: Engine, state: dict[str, Any], wanted: Wanted) -> None:
    """Rates and other numbers of the parameter groups. Where a schedule begins anew, what it sets stays as it has set it."""
    parts, saved = engine._parts, state.get("param_groups", [])
    if parts.optimizer is None or not saved:
        return
    groups = parts.optimizer.param_groups
    if len(saved) != len(groups):
        logger.warning(
            "load_checkpoint: saved with %d parameter groups, there are %d: their rates stay as configured",
            len(saved), len(groups),
        )  # fmt: skip
        return
    goes_on = wanted.lr_scheduler and bool(state.get("lr_scheduler"))
    scheduled = wanted.optimizer if parts.lr_scheduler is None else goes_on
    changes = restore_numbers(groups, saved, scheduled=scheduled, others=wanted.optimizer)
    if changes and parts.lr_scheduler is None and parts.topology.rank == 0:
        logger.info("load_checkpoint: as saved, not as configured: %s", "; ".join(changes))


def _compare_precision(engine: Engine, saved: dict[str, Any] | None) -> None:
    """Say where the numbers come from another precision; loading converts them."""
    if saved is None or engine._parts.topology.rank != 0:
        return
    now = engine.precision.to_json()
    other = [f"{role} {saved.get(role)} (now {value})" for role, value in now.items() if saved.get(role) != value]
    if other:
        logger.info("load_checkpoint: saved in another precision: %s", ", ".join(other))


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
