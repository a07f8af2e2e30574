"""Pipeline, tensor slicing and data parallelism together give the gradients of one process."""

import dsx_comm
import pytest
import torch
from dsx_pipe import Pipeline, PipelineModule, PipeModelDataParallelTopology, RankGrid
from dsx_pipe.tensor import slice_model, slice_of
from dsx_testkit import run_ranks


def model_of():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=21, n_positions=8, n_embd=8, n_layer=2, n_head=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config).double()


def combined(rank, world, shape, schedule, sequence_parallel=False):
    pipe_size, model_size, data_size = shape
    topology = PipeModelDataParallelTopology(num_pp=pipe_size, num_mp=model_size, num_dp=data_size)
    grid = RankGrid(topology)
    model = slice_model(model_of(), grid.model.group, sequence_parallel=sequence_parallel)
    pm = PipelineModule(model, topology=topology, schedule=schedule, activation_checkpoint_interval=sequence_parallel)
    ids = torch.randint(0, 21, (4 * data_size, 6), generator=torch.Generator().manual_seed(1))
    mine = ids.chunk(data_size)[grid.data.rank]
    found = []
    for partitioned in (False, True):
        pm.zero_grad()
        pipe = Pipeline(
            pm,
            schedule,
            micro_batches=2,
            slice_group=grid.model.group,
            pipe_partitioned=partitioned,
            grad_partitioned=partitioned,
        )
        with dsx_comm.count_traffic() as traffic:
            loss = pipe.step(mine, mine).double()
        found.append(sum(sent for name, (_, sent) in traffic.by_op().items() if "isend" in name))
        dsx_comm.all_reduce(loss, group=grid.data.group, op=dsx_comm.ReduceOp.AVG)
        for p in pm.parameters():
            dsx_comm.all_reduce(p.grad, group=grid.data.group, op=dsx_comm.ReduceOp.AVG)
        whole = model_of()
        total = 0.0
        for part in ids.chunk(2 * data_size):
            one = whole(input_ids=part, labels=part).loss / (2 * data_size)
            one.backward()
            total += one.item()
        assert float(loss) == pytest.approx(total, rel=1e-6)
        reference = dict(whole.named_parameters())
        for name, p in pm.named_parameters():
            expected = reference.get(name, whole.transformer.wte.weight).grad
            if hasattr(p, "partition_dim"):
                expected = slice_of(expected, p.partition_dim, grid.model.rank, model_size, p.partition_stride)
            torch.testing.assert_close(p.grad, expected, rtol=1e-6, atol=1e-9, msg=name)
    return found


def test_two_stages_of_two_slices():
    for plain, pieces in run_ranks(combined, 4, (2, 2, 1), "1f1b", backend="dsx", timeout=200):
        assert pieces < 0.8 * plain, "each rank should send half of every tensor; headers are not divided"


def test_stages_of_slices_with_the_sequence_split_inside():
    run_ranks(combined, 4, (2, 2, 1), "zb-h1", True, backend="dsx", timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ("1f1b", "zb-h1", "zbv"))
def test_three_dimensions(schedule):
    run_ranks(combined, 8, (2, 2, 2), schedule, backend="dsx", timeout=280)
