"""`deepspeed.ops.__compatible_ops__`: which groups of operators run in compiled code here, by the names of their
builders.
"""

from __future__ import annotations

import dsx_nvme
from dsx_ops.op_builder import ALL_OPS

__all__ = ["COMPATIBLE_OPS"]

_ELSEWHERE = {builder.NAME: builder for builder in (dsx_nvme.AsyncIOBuilder, dsx_nvme.GDSBuilder)}

COMPATIBLE_OPS: dict[str, bool] = {
    "deepspeed_not_implemented": False,
    **{name: builder().is_compatible() for name, builder in {**ALL_OPS, **_ELSEWHERE}.items()},
}
