"""The programs `deepspeed`, `ds_report`, `ds_elastic`, `ds_bench` and `ds_ssh`: commands of dsx under the names that
job scripts have. (`ds_io` and `ds_nvme_tune` come with dsx-nvme.)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["deepspeed", "ds_bench", "ds_elastic", "ds_report", "ds_ssh"]


def deepspeed(argv: Sequence[str] | None = None) -> int:
    """`dsx launch`."""
    from dsx_launch.main import main  # lazy import, as in all commands: --help of one must not load the others

    return main(argv, prog="deepspeed")


def ds_report(argv: Sequence[str] | None = None) -> int:
    """`dsx doctor`. The two switches of DeepSpeed that hide parts of its report are accepted without effect."""
    from dsx.doctor import main

    words = list(sys.argv[1:] if argv is None else argv)
    return main([word for word in words if word not in ("--hide_operator_status", "--hide_errors_and_warnings")])


def ds_bench(argv: Sequence[str] | None = None) -> int:
    """`dsx bench comm`."""
    from dsx.bench_command import main

    return main(["comm", *(sys.argv[1:] if argv is None else argv)])


def ds_ssh(argv: Sequence[str] | None = None) -> int:
    """`dsx ssh`."""
    from dsx_launch.remote_shell import main

    return main(sys.argv[1:] if argv is None else argv)


def ds_elastic(argv: Sequence[str] | None = None) -> int:
    """`dsx elastic`."""
    from dsx.cli import main

    return main(["elastic", *(sys.argv[1:] if argv is None else argv)])
