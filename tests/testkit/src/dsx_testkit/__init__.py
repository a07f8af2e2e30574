"""Test ranks, seeds, tolerances, tiny models, and stand-ins for devices and links, shared by all test suites.

from dsx_testkit import run_ranks

def work(rank, world_size):
    ...                      # the default process group (gloo) is there
    return rank

assert run_ranks(work, 3) == [0, 1, 2]

Files: `ranks` and `zygote` (processes), `numerics`, `tiny` (models), `paced` (links and computation of a known speed),
`arena` and `labelled` (devices made of host memory), `nodes` (several nodes on one machine),
`pycalls` (a count of Python calls), `fakes` (recording works, streams and events), `stream_memory`
(races between such streams), `browser` (a headless Chromium),
`stores` (a store of tensors that counts what is held), `threads` (works at the same time), `limits` (little memory),
`operations` (a count of what operators compute), `allocated` (the most host memory in use), `benches` (a GPT, and
training steps that take turns), `early_steps` (updates on the host that are kept or undone) and `results` (what a bench
found, printed and as a file), the last six imported by themselves.
"""

from . import tiny
from .arena import ArenaFullError, DeviceArena
from .browser import Browser, find_browser
from .fakes import FakeCuda, FakeEvent, FakeStream, RecordingWork, recorded_collectives
from .labelled import LabelledDevice
from .nodes import Crossing, Nodes
from .numerics import assert_close_named, seed_all
from .paced import PacedLink, PacedTransfer, SleepingLinear
from .pycalls import CallCount, count_calls
from .ranks import RankError, RankFailure, RankTimeout, run_ranks, stop_zygote
from .stores import MemoryStore
from .stream_memory import StreamMemory
from .threads import together

__all__ = [
    "ArenaFullError",
    "Browser",
    "CallCount",
    "Crossing",
    "DeviceArena",
    "FakeCuda",
    "FakeEvent",
    "FakeStream",
    "LabelledDevice",
    "MemoryStore",
    "Nodes",
    "PacedLink",
    "PacedTransfer",
    "RankError",
    "RankFailure",
    "RankTimeout",
    "RecordingWork",
    "SleepingLinear",
    "StreamMemory",
    "assert_close_named",
    "count_calls",
    "find_browser",
    "recorded_collectives",
    "run_ranks",
    "seed_all",
    "stop_zygote",
    "tiny",
    "together",
]
