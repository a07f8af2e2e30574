"""The extension for `optimizer.params.qk_clip`: logits of attention that are too large are clipped behind each step.

The clip itself is `dsx_zero.qk_clip.QKClip`, which the engine's optimizer shows as `engine.optimizer.qk_clip`. Left out
here: gradient clipping, which is the step's.
"""

from __future__ import annotations

from typing import Any

from dsx_comm import RankSets
from dsx_zero.qk_clip import QKClip

from .config import Config
from .engine.request import Request
from .extension import Extension, Watch, Watched
from .pipelining import is_pipeline

__all__ = ["LogitClipping"]


class LogitClipping(Extension):
    """Gives the sharded optimizer a clip, if the configuration asks for one and names the optimizer."""

    name = "qk_clip"

    def __init__(self) -> None:
        self._asked: dict[str, Any] | None = None

    def before_shard(self, request: Request, config: Config, topology: RankSets) -> Request:
        """See whether the section of the optimizer asks for it. An optimizer that the caller gives replaces that."""
        section = config.use("optimizer")
        if section is not None and request.optimizer is None:
            self._asked = section.params.get("qk_clip")
        return request

    def join(self, watch: Watch, to: Watched) -> None:
        """Find the attention, and clip from now on."""
        if self._asked is not None and to.trains:
            module: Any = to.module
            stages = module.pipe_group if is_pipeline(module) else None
            watch.closing.callback(QKClip(to.optimizer, **self._asked, stages=stages).close)
