"""`deepspeed.ops.__compatible_ops__`: which groups of operators run in compiled code here, by the names of their
builders.
"""

from __future__ import annotations

import dsx_nvme
from dsx_ops.op_builder import ALL_OPS

_ELSEWHERE = {builder.NAME: builder for builder in (dsx_nvme.AsyncIOBuilder, dsx_nvme.GDSBuilder)}


def __getattr__(name: str) -> dict[str, bool]:
    """`COMPATIBLE_OPS` is found out when it is asked for: that loads native code, which an import must not."""
    if name != "COMPATIBLE_OPS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    groups = {**ALL_OPS, **_ELSEWHERE}
    return {"deepspeed_not_implemented": False, **{key: kind().is_compatible() for key, kind in groups.items()}}
