"""The limit of open files: raised to the hard one, and compared with what a job needs before there is a group."""

import resource

import dsx_comm
import pytest
from dsx_comm.open_files import check_open_files, files_needed
from dsx_core.open_files import allow_many
from dsx_testkit import run_ranks


def raised(rank, world):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, min(hard, 600)))
    dsx_comm.init_distributed("gloo")
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_the_soft_limit_is_raised_to_the_hard_one():
    assert run_ranks(raised, 2, backend=None) == [(600, 600)] * 2


def too_low(rank, world):
    resource.setrlimit(resource.RLIMIT_NOFILE, (70, 70))
    assert allow_many() == 70
    with pytest.raises(
        dsx_comm.CommError, match=r"got a hard limit of 70, expected at least .* for one of 2 ranks"
    ) as e:
        dsx_comm.init_distributed("gloo")
    return e.value.code, dsx_comm.is_initialized()


def test_a_job_that_does_not_fit_is_refused_before_there_is_a_group():
    assert run_ranks(too_low, 2, backend=None) == [("DSX209", False)] * 2


def test_a_full_mesh_of_gloo_is_said_to_be_the_reason():
    check_open_files(1024, 1024, "cpu:gloo_on_demand,cuda:nccl")
    check_open_files(-1, 10**6, "gloo")
    check_open_files(10, 1, "gloo")
    with pytest.raises(dsx_comm.CommError, match=r"do not name gloo \(got 'cpu:gloo,cuda:nccl'\).* 20 ranks each"):
        check_open_files(1024, 1024, "cpu:gloo,cuda:nccl")


def test_connections_on_demand_need_few_files():
    assert files_needed(1024, "cpu:gloo_on_demand,cuda:nccl") <= 200
    assert files_needed(10_000, "gloo") > 10_000
