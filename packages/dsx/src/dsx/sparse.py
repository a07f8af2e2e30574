"""The section `sparse_attention` of an engine: a pattern for the attention layers of the model."""

from __future__ import annotations

from dsx_comm import RankSets

from .config import Config
from .engine.request import Request
from .extension import Extension
from .utils.logging import logger

__all__ = ["SparseAttention"]


class SparseAttention(Extension):
    """The section `sparse_attention`."""

    name = "sparse_attention"

    def before_shard(self, request: Request, config: Config, topology: RankSets) -> Request:
        """Give the model the pattern of the section; its parameters stay the same objects."""
        section = config.use("sparse_attention")
        if section is None:
            return request
        import dsx_sparse_attn  # lazy import: few programs have such layers

        changed = dsx_sparse_attn.apply_sparse_attention(request.model, section)
        if notice := section.notice():
            logger.warning("%s", notice)
        logger.info("sparse_attention: mode %s in %d modules (%s ...)", section.mode, len(changed), changed[0])
        return request
