import dsx_comm
import pytest
import torch
from dsx_comm import GroupRegistry, Mpu, ProcessTopology, read_mpu
from dsx_comm.errors import TopologyError
from dsx_comm.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, block_groups, expert_groups
from dsx_testkit import run_ranks


def partitions(lists, world):
    return sorted(rank for ranks in lists for rank in ranks) == list(range(world))


def test_ranks_and_coordinates_at_world_size_4096():
    topology = ProcessTopology(("pipe", "data", "expert", "sequence", "model"), (8, 16, 4, 2, 4))
    assert topology.world_size() == 4096
    seen = set()
    for rank in range(4096):
        at = topology.get_coord(rank)
        assert topology.get_rank(**at._asdict()) == rank
        # an independent formula: row-major index
        assert (((at.pipe * 16 + at.data) * 4 + at.expert) * 2 + at.sequence) * 4 + at.model == rank
        seen.add(at)
    assert len(seen) == 4096
    for axis, extent in zip(topology.axes, topology.dims):
        lists = topology.get_axis_comm_lists(axis)
        assert len(lists) == 4096 // extent and partitions(lists, 4096)
        for ranks in lists:
            places = [topology.get_coord(r) for r in ranks]
            assert [getattr(p, axis) for p in places] == list(range(extent))
            assert len({p._replace(**{axis: 0}) for p in places}) == 1
    both = topology.get_axis_comm_lists("data", "sequence")
    assert len(both) == 4096 // 32 and partitions(both, 4096)
    want = [r for r in range(4096) if topology.get_coord(r).pipe == 3 and topology.get_coord(r).model == 1]
    assert topology.filter_match(pipe=3, model=1) == want
    assert len(topology.get_axis_list("pipe", 7)) == 512


def test_the_usual_grids():
    three = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert three.get_axis_names() == ["pipe", "data", "model"]
    assert three.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert three.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert three.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert three.get_rank_repr(5) == "model_01"
    assert three.get_rank_repr(5, omit_axes=(), inner_sep="", outer_sep=".") == "pipe01.data00.model01"
    two = PipeDataParallelTopology(2, 3)
    assert two.get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]]
    assert two.get_axis_comm_lists("model") == [] and two.get_dim("data") == two.axis_size("data") == 3
    assert (two.get_dim("model"), two.axis_size("model")) == (0, 1)
    assert two.filter_match(pipe=5) == []
    assert repr(two) == "PipeDataParallelTopology(pipe=2, data=3)"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ProcessTopology(("a",), (1, 2)), "one size per axis"),
        (lambda: ProcessTopology(("a", "a"), (1, 2)), "distinct identifiers"),
        (lambda: ProcessTopology(("a",), (0,)), "at least 1"),
        (lambda: PipeDataParallelTopology(2, 2).get_rank(pipe=1), "one for each of"),
        (lambda: PipeDataParallelTopology(2, 2).get_rank(pipe=1, data=2), "0 <= data < 2"),
        (lambda: PipeDataParallelTopology(2, 2).get_coord(4), "0 <= rank < 4"),
        (lambda: PipeDataParallelTopology(2, 2).filter_match(model=0), "unknown axis 'model'"),
        (lambda: expert_groups(6, 4), "expected a multiple"),
        (lambda: block_groups(6, 4), "expected a multiple"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(TopologyError, match=message):
        call()


def test_expert_layouts():
    expert, data = expert_groups(8, 2)
    assert expert == [[0, 1], [2, 3], [4, 5], [6, 7]] and data == [[0, 2, 4, 6], [1, 3, 5, 7]]
    expert, data = expert_groups(16, 4, model_size=2)
    assert expert == [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]
    assert data == [[0, 8], [2, 10], [4, 12], [6, 14], [1, 9], [3, 11], [5, 13], [7, 15]]
    expert, data = expert_groups(8, 2, data_before_expert=True)
    assert expert == [[0, 4], [1, 5], [2, 6], [3, 7]] and data == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert block_groups(6, 2) == [[0, 1], [2, 3], [4, 5]]
    for swapped in (False, True):
        for lists in expert_groups(4096, 8, model_size=4, pipe_size=2, data_before_expert=swapped):
            assert partitions(lists, 4096)
            for ranks in lists:  # within one stage and one model coordinate
                assert len({(r // 2048, r % 4) for r in ranks}) == 1
    experts, copies = expert_groups(4096, 8, model_size=4, pipe_size=2)
    assert {len(e) for e in experts} == {8} and {len(c) for c in copies} == {4096 // 2 // 4 // 8}


class Megatron:
    """Only what Megatron's first six functions give."""

    def __init__(self, data, model):
        self._data, self._model = data, model

    def get_data_parallel_group(self):
        return self._data

    def get_model_parallel_group(self):
        return self._model

    def get_data_parallel_rank(self):
        return dsx_comm.get_rank(self._data)

    def get_model_parallel_world_size(self):
        return dsx_comm.get_world_size(self._model)


def grid(rank, n):
    registry = GroupRegistry(ProcessTopology(("data", "model"), (2, 2)))
    registry.build("data", "model", ("data", "model"))
    data, model = registry.axis("data"), registry.axis("model")
    assert data.ranks == ((0, 2), (1, 3))[rank % 2] and model.ranks == ((0, 1), (2, 3))[rank // 2]
    assert registry.axis("data") is data
    assert registry.axis("data", "model").group is dsx_comm.get_world_group()
    assert registry.axis("pipe").ranks == (rank,)
    t = torch.tensor([float(rank)])
    dsx_comm.all_reduce(t, group=data.group)
    assert t.item() == sum(data.ranks)
    with pytest.raises(TopologyError, match="unknown axis 'modle'"):
        registry.axis("modle")

    mpu = Mpu(registry, expert_size=2)
    assert mpu.get_data_parallel_world_size() == 2 and mpu.get_model_parallel_rank() == model.rank
    assert mpu.get_tensor_model_parallel_group() is model.group and mpu.get_slice_parallel_rank() == model.rank
    assert mpu.get_pipe_parallel_world_size() == 1 and mpu.get_model_parallel_src_rank() == model.ranks[0]
    assert mpu.get_expert_model_parallel_world_size() == 2 and mpu.get_global_rank() == rank
    with pytest.raises(AttributeError, match="get_nothing"):
        mpu.get_nothing()
    ours = read_mpu(mpu)
    assert ours.data.ranks == data.ranks and ours.expert is not None and ours.expert.ranks == data.ranks
    assert ours.sequence is not None and ours.sequence.size == 1

    theirs = read_mpu(Megatron(data.group, model.group))
    assert theirs.data == data and theirs.model == model
    assert theirs.pipe is None and theirs.expert is None
    with pytest.raises(TopologyError, match=r"no model-parallel group: expected get_model_parallel_group\(\) or"):
        read_mpu(type("Half", (), {"get_data_parallel_group": lambda self: data.group})())
    liar = Megatron(data.group, model.group)
    liar.get_model_parallel_world_size = lambda: 7
    with pytest.raises(TopologyError, match=r"get_model_parallel_world_size\(\) says 7, its group says 2"):
        read_mpu(liar)
    with pytest.raises(TopologyError, match="has 2 ranks, the world has 4"):
        GroupRegistry(ProcessTopology(("data",), (2,)))

    mesh = registry.device_mesh()
    assert mesh.mesh_dim_names == ("data", "model") and list(mesh.get_coordinate()) == [rank // 2, rank % 2]
    t = torch.tensor([float(rank)])
    dsx_comm.all_reduce(t, group=mesh.get_group("model"))
    assert t.item() == sum(model.ranks)


def test_groups_mpu_and_mesh_over_a_grid():
    run_ranks(grid, 4)
