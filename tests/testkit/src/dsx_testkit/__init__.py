"""Test ranks, seeds, tolerances and tiny models shared by all test suites.

from dsx_testkit import run_ranks

def work(rank, world_size):
    ...                      # the default process group (gloo) is there
    return rank

assert run_ranks(work, 3) == [0, 1, 2]
"""

from . import tiny
from .numerics import assert_close_named, seed_all
from .ranks import RankError, RankFailure, RankTimeout, run_ranks, stop_zygote

__all__ = [
    "RankError",
    "RankFailure",
    "RankTimeout",
    "assert_close_named",
    "run_ranks",
    "seed_all",
    "stop_zygote",
    "tiny",
]
