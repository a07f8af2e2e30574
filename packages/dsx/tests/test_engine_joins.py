"""Who started this process: `initialize` joins the ranks of mpirun, srun and their like, as it joins those of `dsx
launch`.
"""

import os

import pytest
import torch
from dsx_testkit import run_ranks

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
OPEN_MPI = {"RANK": "OMPI_COMM_WORLD_RANK", "SIZE": "OMPI_COMM_WORLD_SIZE", "LOCAL": "OMPI_COMM_WORLD_LOCAL_RANK"}
SLURM = {"RANK": "SLURM_PROCID", "SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL": "SLURM_LOCALID"}


def as_started_by(names, rank, world, **further):
    for name in TORCHRUN:
        os.environ.pop(name, None)
    os.environ.update({names["RANK"]: str(rank), names["SIZE"]: str(world), names["LOCAL"]: str(rank), **further})


def build(**arguments):
    import dsx

    config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "steps_per_print": None}
    torch.manual_seed(0)
    return dsx.initialize(
        model=torch.nn.Linear(2, 1, bias=False), config={**config, "gradient_clipping": 0}, **arguments
    )[0]


def train(rank, world, names, further):
    as_started_by(names, rank, world, **further)
    engine = build()
    before = engine.module.weight.detach().clone()
    engine.backward(engine(torch.full((2, 2), float(rank))).mean())
    engine.step()
    moved = (before - engine.module.weight.detach()).mean()
    return engine.global_rank, engine.world_size, engine.train_micro_batch_size_per_gpu(), float(moved)


@pytest.mark.parametrize(
    ("names", "further"),
    [
        (OPEN_MPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}),
        (SLURM, {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}),
    ],
)
def test_ranks_of_mpirun_and_srun_train_together(names, further):
    found = run_ranks(train, 2, names, further, backend=None)
    # the mean of the ranks' gradients 0 and 1; alone each would move by its own and take the whole batch
    assert found == [(0, 2, 2, 0.5), (1, 2, 2, 0.5)]


def refuses(rank, world):
    with pytest.raises(
        ValueError, match=r"dist_init_required=False.: got 2 ranks by the environment and no process group"
    ):
        build(dist_init_required=False)


def test_ranks_are_never_left_alone_without_a_word():
    run_ranks(refuses, 2, backend=None)


def half_an_environment(rank, world):
    del os.environ["RANK"]
    with pytest.raises(RuntimeError, match="RANK missing while"):
        build()


def test_half_an_environment_is_named():
    run_ranks(half_an_environment, 1, backend=None)


def test_one_process_needs_no_group(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert build(dist_init_required=False).world_size == 1
