"""The names of the files by which tuner and engine speak with each other, and writing a file whole or not at all."""

from __future__ import annotations

from pathlib import Path

from dsx_core import replace_text

__all__ = ["CANDIDATES", "CONFIG", "FACTS", "METRICS", "PLANS", "PRIVATE_CONFIG", "STARTED", "write_whole"]

CONFIG = "ds_config.json"
"""The file with the configuration of an experiment."""
PRIVATE_CONFIG = "ds_config.private.json"
"""The same with its secrets, for this user and only while the experiment runs; not written if there are none."""
STARTED = "started.json"
"""Written by the engine when `initialize` has read the configuration."""
METRICS = "metrics.json"
"""The file with the measurements of the engine."""
FACTS = "model_info.json"
"""The file with facts about the model that the first experiment found."""
CANDIDATES = "candidates.json"
"""Configurations that the planner is asked about in the first experiment."""
PLANS = "plans.json"
"""The planner's answers."""


def write_whole(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file so that readers see the old text or the new one, never a part; its folder is made.

    With `private` only this user can read it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text, durable=False, mode=0o600 if private else None)
