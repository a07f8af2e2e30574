"""The memory of NCCL's communicators follows from its constants, by group and by what runs over it."""

from __future__ import annotations

import dataclasses

import pytest
from dsx_plan import Machine
from dsx_plan.communicators import BUFFERS, GroupUse, communicator_bytes


def test_the_buffers_are_those_of_nccls_constants():
    assert BUFFERS == 524_288 + 4_915_200 + 4_194_304


def test_a_group_of_four_takes_what_is_reported():
    """688 MB on four A100 (NVIDIA/nccl issue 964)."""
    assert GroupUse(4, collective=True).nbytes == pytest.approx(688e6, rel=0.02)
    assert GroupUse(2, collective=True).nbytes < GroupUse(4, collective=True).nbytes == GroupUse(4096, True).nbytes


def test_pairs_take_less_than_collectives():
    stages = GroupUse(8, peers={1, 7})
    assert 0 < stages.nbytes < GroupUse(8, collective=True).nbytes / 10
    assert GroupUse(8, True, {1, 7}).nbytes == stages.nbytes + GroupUse(8, True).nbytes


def test_groups_of_one_and_processors_have_none():
    machine = Machine.named("H100-SXM")
    groups = [GroupUse(1, True), GroupUse(8, True)]
    assert communicator_bytes(groups, machine) == GroupUse(8, True).nbytes
    assert communicator_bytes(groups, dataclasses.replace(machine, device="cpu")) == 0
    assert communicator_bytes(groups, dataclasses.replace(machine, communicator_bytes=7)) == 7
