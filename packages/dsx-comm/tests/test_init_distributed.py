"""Finding rank and rendezvous: the pure part by tables, the rest by making groups."""

import os
import socket

import dsx_comm
import pytest
import torch
from dsx_comm.discovery import Rendezvous, discover, first_host
from dsx_testkit import run_ranks

OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ONE_NODE = {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login",
}
CASES = [
    ({}, None),
    ({"MASTER_ADDR": "left.over"}, None),
    ({**TORCHRUN, "LOCAL_RANK": "1"}, Rendezvous(5, 8, 1, "head", 1234, "environment")),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, Rendezvous(5, 8, 1, "head", 1234, "environment")),
    ({**OMPI, **TORCHRUN, "LOCAL_RANK": "2"}, Rendezvous(5, 8, 2, "head", 1234, "environment")),
    (OMPI, Rendezvous(3, 4, 1, None, 29500, "Open MPI")),
    (ONE_NODE, Rendezvous(3, 4, 3, "127.0.0.1", 29500, "Open MPI")),
    ({**OMPI, "MASTER_ADDR": "h", "MASTER_PORT": "7"}, Rendezvous(3, 4, 1, "h", 7, "Open MPI")),
    (SLURM, Rendezvous(2, 4, 0, "gpu07", 29500, "Slurm")),
    ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, None),  # a batch script, not a step of srun
    (
        {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": "m"},
        Rendezvous(0, 2, 0, "m", 29500, "MVAPICH"),
    ),
    (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        Rendezvous(1, 2, 1, "127.0.0.1", 29500, "Intel MPI"),
    ),
    ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0"}, Rendezvous(1, 2, 0, None, 29500, "MPICH")),
    (
        {"AZUREML_EXPERIMENT_ID": "x", **OMPI, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
        Rendezvous(3, 4, 1, "10.0.0.4", 6000, "AzureML"),
    ),
    ({"AZUREML_EXPERIMENT_ID": "x", **ONE_NODE}, Rendezvous(3, 4, 3, "127.0.0.1", 54965, "AzureML")),
    (
        {"SM_TRAINING_ENV": "{}", **OMPI, "SM_HOSTS": '["algo-2", "algo-1"]'},
        Rendezvous(3, 4, 1, "algo-1", 29500, "SageMaker"),
    ),
]


@pytest.mark.parametrize("environ, expected", CASES)
def test_discovery(environ, expected):
    assert discover(environ) == expected


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT missing while RANK, WORLD_SIZE set"),
        ({**TORCHRUN, "RANK": "8"}, "got rank 8 of 8"),
        ({**TORCHRUN, "RANK": "one"}, "RANK: got 'one', expected a whole number"),
        ({"AZUREML_EXPERIMENT_ID": "x"}, "AzureML: OMPI_COMM_WORLD_RANK"),
        ({"AZUREML_EXPERIMENT_ID": "x", **OMPI}, "AZ_BATCH_MASTER_NODE"),
    ],
)
def test_discovery_says_what_is_missing(environ, message):
    with pytest.raises(dsx_comm.CommError, match=message):
        discover(environ)


def test_discovery_without_schedulers_sees_torchrun_only():
    assert discover(ONE_NODE, schedulers=False) is None


@pytest.mark.parametrize(
    "nodes, first", [("gpu[07-09,12],x", "gpu07"), ("a,b", "a"), ("n1", "n1"), ("r[1,3]-ib", "r1-ib")]
)
def test_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def clean(**variables):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(variables)


def alone(rank, n):
    clean()
    dsx_comm.init_distributed(verbose=False)
    assert (dsx_comm.get_rank(), dsx_comm.get_world_size(), dsx_comm.get_local_rank()) == (0, 1, 0)
    t = torch.tensor([3.0])
    dsx_comm.all_reduce(t)
    dsx_comm.barrier()
    assert dsx_comm.get_world_size(dsx_comm.new_group([0])) == 1
    group = dsx_comm.get_world_group()
    dsx_comm.init_distributed()  # again: nothing happens
    assert dsx_comm.get_world_group() is group
    dsx_comm.destroy_process_group()
    assert not dsx_comm.is_initialized()
    return t.item()


def test_a_process_alone_is_a_world_of_its_own():
    assert run_ranks(alone, 1, backend=None) == [3.0]


def joined(rank, n):
    dsx_comm.join_launched_ranks()
    found = dsx_comm.is_initialized() and (dsx_comm.get_rank(), dsx_comm.get_world_size())
    group = dsx_comm.get_world_group() if found else None
    dsx_comm.join_launched_ranks()  # again: nothing happens
    assert not found or dsx_comm.get_world_group() is group
    clean()
    return found


def test_launched_ranks_join_and_a_process_alone_does_not():
    assert run_ranks(joined, 2, backend=None) == [(0, 2), (1, 2)]
    assert run_ranks(joined, 1, backend=None) == [False]


def with_environment(rank, n, url):
    import threading

    dsx_comm.init_distributed(init_method=url)
    # a rank that is slow to make its first call can be asked where it is
    assert "dsx-comm-watch" in [thread.name for thread in threading.enumerate()]
    got = [None] * n
    dsx_comm.all_gather_object(got, (dsx_comm.get_rank(), dsx_comm.get_local_rank(), dsx_comm.get_backend()))
    return got


@pytest.mark.parametrize("url", [None, "env://"])
def test_torchruns_variables_are_enough(url):
    assert run_ranks(with_environment, 2, url, backend=None)[1] == [(0, 0, "dsx"), (1, 1, "dsx")]


def with_mpi_variables(rank, n, port):
    clean(
        OMPI_COMM_WORLD_RANK=str(rank),
        OMPI_COMM_WORLD_SIZE=str(n),
        OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
        OMPI_COMM_WORLD_LOCAL_SIZE=str(n),
    )
    with pytest.raises(dsx_comm.CommError, match="dist_init_required is False"):
        dsx_comm.init_distributed(dist_init_required=False)
    dsx_comm.init_distributed(distributed_port=port, timeout=1.0)
    t = torch.tensor([1.0])
    dsx_comm.all_reduce(t)
    return t.item(), os.environ["RANK"], os.environ["MASTER_PORT"] == str(port), dsx_comm.get_local_rank()


def test_an_mpi_launch_on_one_machine():
    assert run_ranks(with_mpi_variables, 2, free_port(), backend=None) == [(2.0, "0", True, 0), (2.0, "1", True, 1)]


def several_machines_without_address(rank, n):
    clean(**OMPI)
    with pytest.raises(dsx_comm.CommError, match="set MASTER_ADDR, or install mpi4py"):
        dsx_comm.init_distributed()


def test_an_unknown_address_of_rank_0_is_an_error_not_a_hang():
    pytest.importorskip("torch")
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        run_ranks(several_machines_without_address, 1, backend=None)
    else:
        pytest.skip("mpi4py is installed")


def wrong_arguments(rank, n):
    clean()
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="got -1"):
        dsx_comm.init_distributed(timeout=-1)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="needs rank and world_size"):
        dsx_comm.init_distributed(init_method="tcp://127.0.0.1:1")
    with pytest.raises(dsx_comm.CommError, match="built without MPI"):
        dsx_comm.init_distributed("mpi")
    for name in ("ccl", "cpu:gloo,cuda:hccl"):
        with pytest.raises(
            dsx_comm.CommError, match=f"got '{name}', but this torch has no .*: expected one of dsx, .*gloo"
        ):
            dsx_comm.init_distributed(name)
    os.environ["DSX_TIMEOUT"] = "soon"
    with pytest.raises(dsx_comm.CommError, match="DSX_TIMEOUT: got 'soon'"):
        dsx_comm.init_distributed()
    del os.environ["DSX_TIMEOUT"]
    os.environ["DEEPSPEED_TIMEOUT"] = "later"  # what job scripts have
    with pytest.raises(dsx_comm.CommError, match="DEEPSPEED_TIMEOUT: got 'later'"):
        dsx_comm.init_distributed()


def test_wrong_arguments_are_named():
    run_ranks(wrong_arguments, 1, backend=None)


def nobody_there(rank, n, port):
    from datetime import timedelta

    clean(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with pytest.raises(dsx_comm.CommError, match=r"rank 1 of 2 \(environment\) could not meet the others at tcp://"):
        dsx_comm.init_distributed(timeout=timedelta(seconds=1))


def test_nobody_at_the_address():
    run_ranks(nobody_there, 1, free_port(), backend=None)


def again_and_again(rank, n, backend, port):
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers a backend that moves nothing

    # as under torchrun: the store belongs to the agent and outlives the groups
    store = dist.TCPStore("127.0.0.1", port, n, rank == 0)
    for world in range(3):
        dist.init_process_group(backend, store=dist.PrefixStore("attempt_0", store), rank=rank, world_size=n)
        if world == 1:
            dsx_comm.barrier()  # what the ranks call first differs from world to world
        tensor = torch.full((3 + world,), float(rank + world))
        dsx_comm.all_reduce(tensor)
        rotated = torch.full((2,), 1j ** (rank + 1))  # goes through the group that dsx makes of gloo
        dsx_comm.all_reduce(rotated)
        assert backend == "fake" or (tensor.tolist(), rotated.tolist()) == (
            [2.0 * world + 1.0] * (3 + world),
            [-1 + 1j] * 2,
        )
        # by torch's own function half of the time: it tells nobody of ours
        (dist if world else dsx_comm).destroy_process_group()
    store.set(f"done/{rank}", "")
    store.wait([f"done/{r}" for r in range(n)])


# gloo itself trips over what its last group left; "fake" is there for what every backend goes through here
@pytest.mark.parametrize("backend", ["dsx", "fake"])
def test_groups_may_be_made_again_in_one_store(backend):
    run_ranks(again_and_again, 2, backend, free_port(), backend=None)


@pytest.mark.parametrize(
    ("device", "set_before", "expected"), [(True, None, "1"), (True, "0", "0"), (False, None, None)]
)
def test_nccl_begins_collectives_in_their_order_unless_the_user_has_said_otherwise(
    device, set_before, expected, monkeypatch
):
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    monkeypatch.setenv(name, set_before or "")
    if set_before is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # by the user, before any collective
    dsx_comm.init_distributed()
    assert os.environ.get(name) == expected
