"""Snapshots in the memory of the nodes: any number of ranks goes on from them, also when a node is lost."""

import os
import random
import shutil
import signal
import threading

import dsx_comm  # noqa: F401 - what is loaded here is loaded once, in the process that the ranks are forked from
import dsx_data  # noqa: F401
import dsx_moe  # noqa: F401
import dsx_ops  # noqa: F401
import dsx_pipe  # noqa: F401
import dsx_sparse_attn  # noqa: F401
import dsx_zero  # noqa: F401
import pytest
import torch
from dsx_testkit import RankError, run_ranks

BATCH = 24
CONFIG = {
    "elasticity": {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [2, 4], "version": 0.1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.02}},
    "steps_per_print": None,
}


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100  # no multiple of the batch

    def __getitem__(self, index):
        return torch.sin(torch.arange(3.0) * index), index


class NumberStream:
    """The same samples, of which nobody knows the number."""

    def __iter__(self):
        return (Numbers()[index] for index in range(100))


def build(stage=2, seed=0, dropout=0.0, stream=False, **changes):
    import dsx

    data = dsx.data.SharedStream(NumberStream()) if stream else Numbers()
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(3, 7), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(7, 1)]
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {**CONFIG, "zero_optimization": zero, **changes}
    return dsx.initialize(model=torch.nn.Sequential(*layers), training_data=data, config=config)[0]


def train(engine, updates):
    """Per update: the samples that this rank used, and their losses."""
    seen = {}
    while updates:
        for x, number in engine.training_dataloader:
            losses = (engine(x).squeeze(1) - x.sum(1)).square()
            step = engine.global_steps
            seen.setdefault(step, []).extend(zip(number.tolist(), losses.tolist()))
            engine.backward(losses.mean())
            engine.step()
            updates -= engine.global_steps > step
            if not updates:
                break
    return seen


def on_node(name):
    """Let this rank be on a node of this name."""
    os.environ["DSX_ELASTIC_NODE"] = f"node{name}"


def work(rank, world, folder, memory, updates, stage=2, nodes="012345", save_every=None, stream=False):
    from dsx import elasticity

    on_node(nodes[rank])
    engine = build(stage, stream=stream)
    run = elasticity.resume(engine, folder, snapshot_every=2, memory=memory, save_every=save_every)
    seen = train(engine, updates)
    engine._companions[0]._behind.wait()  # else what is kept when this process ends would depend on its speed
    return run.source, run.received_bytes, engine.global_steps, seen


def uninterrupted(rank, world, updates, stage=0):
    engine = build(stage)
    seen = train(engine, updates)
    engine.destroy()
    return seen


def merged(per_rank):
    """Of all ranks: update -> samples and their losses, sorted. An update may have the last of one epoch's samples and
    the first of the next one's.
    """
    per_rank = list(per_rank)
    steps = sorted({step for seen in per_rank for step in seen})
    return {step: sorted(pair for seen in per_rank for pair in seen.get(step, ())) for step in steps}


@pytest.fixture(scope="module")
def expected():
    return merged(run_ranks(uninterrupted, 1, 16))


@pytest.fixture(scope="module")
def four_updates(tmp_path_factory):
    """The folders on disk and in memory that two ranks have left after four updates; three of them are on disk."""
    folder = tmp_path_factory.mktemp("four")
    run_ranks(work, 2, str(folder / "disk"), str(folder / "memory"), 4, 2, "01", 3)
    return folder


@pytest.fixture
def saved(four_updates, tmp_path):
    """A copy of them: disk, memory."""
    shutil.copytree(four_updates, tmp_path / "saved")
    return tmp_path / "saved" / "disk", tmp_path / "saved" / "memory"


def assert_equal(got, expected, updates):
    assert sorted(got) == list(updates)
    for step in updates:
        assert [number for number, _ in got[step]] == [number for number, _ in expected[step]], step
        assert len(got[step]) == BATCH
        for (_, loss), (_, wanted) in zip(got[step], expected[step]):
            assert loss == pytest.approx(wanted, rel=2e-5, abs=1e-6)


def roots(memory):
    return [path for path in memory.iterdir() if path.name.startswith("dsx_elastic_")]


def lose(memory, node):
    (root,) = roots(memory)
    shutil.rmtree(root / node)


@pytest.mark.parametrize(
    "stage, last", [(2, "23"), *(pytest.param(stage, "2345", marks=pytest.mark.slow) for stage in range(4))]
)
def test_another_number_of_ranks_goes_on_from_memory_after_a_node_is_lost(tmp_path, expected, stage, last):
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    first = run_ranks(work, 3, str(disk), str(memory), 5, stage)
    assert [one[:3] for one in first] == [("", 0, 5)] * 3
    assert_equal(merged(one[3] for one in first), expected, range(5))
    lose(memory, "node1")
    second = run_ranks(work, 2, str(disk), str(memory), 5, stage, "02")
    assert {one[0] for one in second} == {"memory"} and {one[2] for one in second} == {9}
    if stage:
        assert sum(one[1] for one in second) > 0  # a part of the state came from the other node
    assert_equal(merged(one[3] for one in second), expected, range(4, 9))  # update 4 is computed again
    lose(memory, "node0")
    third = run_ranks(work, len(last), str(disk), str(memory), 3, stage, last)
    assert {one[0] for one in third} == {"memory"} and {one[2] for one in third} == {11}
    assert_equal(merged(one[3] for one in third), expected, range(8, 11))


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_share_a_node_read_what_the_others_of_it_wrote(tmp_path, expected, stage):
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    run_ranks(work, 3, str(disk), str(memory), 4, stage, "001")
    lose(memory, "node0")
    second = run_ranks(work, 3, str(disk), str(memory), 3, stage, "221")
    assert {one[0] for one in second} == {"memory"}
    assert_equal(merged(one[3] for one in second), expected, range(4, 7))


def test_a_stream_goes_on_in_whole_updates_at_another_number_of_ranks(tmp_path):
    disk, memory = str(tmp_path / "disk"), str(tmp_path / "memory")
    run_ranks(work, 2, disk, memory, 3, 2, "01", None, True)
    seen = merged(one[3] for one in run_ranks(work, 3, disk, memory, 4, 2, "012", None, True))
    assert sorted(seen) == [2, 3, 4, 5]
    for step, pairs in seen.items():  # update 4 has the last samples of the first epoch, and the first of the second
        assert [number for number, _ in pairs] == sorted((BATCH * step + place) % 100 for place in range(BATCH))


@pytest.mark.slow
def test_where_two_neighbours_are_lost_an_older_state_on_disk_is_taken(tmp_path, expected):
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    run_ranks(work, 3, str(disk), str(memory), 6, 2, "012", 3)
    lose(memory, "node0")
    lose(memory, "node1")
    second = run_ranks(work, 2, str(disk), str(memory), 2, 2, "23")
    assert {one[0] for one in second} == {"disk"}
    assert_equal(merged(one[3] for one in second), expected, range(6, 8))


@pytest.mark.slow
def test_disk_is_taken_where_it_is_newer_and_memory_is_not_found_by_a_new_run(tmp_path, expected):
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    run_ranks(work, 2, str(disk), str(memory), 5, 2, "01", 5)
    assert {one[0] for one in run_ranks(work, 2, str(disk), str(memory), 1)} == {"disk"}
    shutil.rmtree(disk)  # the user begins again
    third = run_ranks(work, 2, str(disk), str(memory), 1)
    assert {one[0] for one in third} == {""}
    assert_equal(merged(one[3] for one in third), expected, range(1))


def damage(memory):
    for path in memory.glob("*/*/step*/optimizer*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-3] ^= 255
        path.write_bytes(data)


def test_damaged_snapshots_are_named_and_passed_over(saved, expected):
    disk, memory = saved
    damage(memory)
    second = run_ranks(work, 2, str(disk), str(memory), 2)
    assert {one[0] for one in second} == {"disk"}
    assert_equal(merged(one[3] for one in second), expected, range(3, 5))


def killed_in_a_snapshot(rank, world, folder, memory, where):
    from dsx import elasticity
    from dsx.elasticity import peers
    from dsx.elasticity.memory import NodeMemory

    place, name = (peers, "write_pieces") if where == "writing" else (NodeMemory, "finish")
    real, calls = getattr(place, name), []

    def dies(*args):
        calls.append(True)
        if rank == 1 and len(calls) == 3:  # of the snapshots before update 0, and after 2 and 4
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    setattr(place, name, dies)
    on_node(rank)
    engine = build()
    elasticity.resume(engine, folder, snapshot_every=2, memory=memory)
    train(engine, 100)


@pytest.mark.parametrize("where", ["writing", pytest.param("committing", marks=pytest.mark.slow)])
def test_ranks_that_leave_in_the_middle_of_a_snapshot_leave_a_whole_one(tmp_path, expected, where):
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    with pytest.raises(RankError, match="rank 1"):
        run_ranks(killed_in_a_snapshot, 2, str(disk), str(memory), where)
    again = run_ranks(work, 3, str(disk), str(memory), 3)
    assert {one[0] for one in again} == {"memory"}
    (began,) = {one[2] - 3 for one in again}
    assert began == 2 or (where == "committing" and began == 4)  # node 0 may have all bytes of the new one by then
    assert_equal(merged(one[3] for one in again), expected, range(began, began + 3))


def without_room(rank, world, folder):
    from dsx import elasticity
    from dsx.elasticity import peers

    on_node(rank)
    engine = build()

    def full(*args):
        raise OSError(28, "No space left on device")

    real = peers.write_pieces
    peers.write_pieces = full if rank == 1 else real
    run = elasticity.resume(engine, folder, snapshot_every=1, save_every=2, memory=os.path.join(folder, "memory"))
    train(engine, 3)
    engine.destroy()
    peers.write_pieces = real
    return run.source, os.path.exists(os.path.join(folder, "latest"))


def test_without_room_in_memory_training_goes_on_and_disk_has_to_do(tmp_path):
    assert run_ranks(without_room, 2, str(tmp_path)) == [("", True)] * 2
    assert not list((tmp_path / "memory").glob("*/*"))


def ended(rank, world, folder, memory, save):
    from dsx import elasticity

    on_node(rank)
    engine = build()
    run = elasticity.resume(engine, folder, snapshot_every=2, memory=memory)
    began = engine.global_steps
    train(engine, 4)
    if save:
        engine.save_checkpoint(folder)
    engine.destroy()
    return run.source, began


@pytest.mark.slow
@pytest.mark.parametrize("save", [True, False])
def test_memory_is_freed_where_nothing_is_lost_by_that(tmp_path, save):
    memory = tmp_path / "memory"
    run_ranks(ended, 2, str(tmp_path / "disk"), str(memory), save)
    assert bool(list(memory.glob("*/*"))) is not save


def asked_to_end(rank, world, folder, memory, which, restarting):
    from dsx import elasticity
    from dsx.engine.preemption import Preempted

    on_node(rank)
    if restarting:
        notes = os.path.join(folder, f"notes{rank}")
        os.makedirs(notes)
        open(os.path.join(notes, "restarting"), "w").close()
        os.environ["DSX_ELASTIC_AGENT"] = notes
    engine = build()
    elasticity.resume(engine, folder, snapshot_every=1000, memory=memory)
    if rank == which:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        train(engine, 100000)
    except Preempted as error:
        return error.code, engine.global_steps
    return None


@pytest.mark.parametrize("restarting", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ranks_that_are_asked_to_end_lose_nothing_and_free_their_memory_at_the_end(tmp_path, restarting):
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    (code, steps), other = run_ranks(asked_to_end, 2, str(disk), str(memory), 1, restarting)
    assert code == 75 and other == (code, steps) and steps > 0
    assert (disk / "latest").exists() is not restarting
    assert list(memory.glob("*/*"))
    second = run_ranks(ended, 3, str(disk), str(memory), True)
    assert set(second) == {("memory" if restarting else "disk", steps)}
    assert not list(memory.glob("*/*"))


def other_batch(rank, world, folder, memory):
    from dsx import elasticity

    on_node(rank)
    engine = build(elasticity={**CONFIG["elasticity"], "max_train_batch_size": 12})
    try:
        elasticity.resume(engine, folder, memory=memory)
    except elasticity.ElasticityIncompatibleWorldSize as error:
        return str(error)
    return None


def test_another_global_batch_is_named(saved):
    disk, memory = saved
    for text in run_ranks(other_batch, 2, str(disk), str(memory)):
        assert "got a batch of 12 samples on 2 ranks; expected 24" in text and "elasticity.join" in text


def draws(rank, world, folder, memory, updates):
    from dsx import elasticity

    on_node(rank)
    engine = build(dropout=0.5)
    random.seed(1)
    elasticity.resume(engine, folder, snapshot_every=1, memory=memory)
    seen = train(engine, updates)
    numbers = torch.rand(2).tolist(), random.random()
    engine._companions[0]._behind.wait()
    return seen, numbers


@pytest.mark.slow
def test_random_numbers_go_on_at_the_same_number_of_ranks(tmp_path):
    whole = run_ranks(draws, 2, str(tmp_path / "a"), str(tmp_path / "b"), 4)
    disk, memory = str(tmp_path / "disk"), str(tmp_path / "memory")
    run_ranks(draws, 2, disk, memory, 2)
    assert [one[1] for one in run_ranks(draws, 2, disk, memory, 2)] == [one[1] for one in whole]


@pytest.mark.slow
def test_random_numbers_are_never_repeated_at_another_number_of_ranks(tmp_path):
    disk, memory = str(tmp_path / "disk"), str(tmp_path / "memory")
    run_ranks(draws, 2, disk, memory, 2)
    three = [one[1] for one in run_ranks(draws, 3, disk, memory, 0)]
    fresh = [one[1] for one in run_ranks(draws, 3, str(tmp_path / "c"), str(tmp_path / "d"), 0)]
    assert len({str(one) for one in three}) == 3 and not {str(one) for one in three} & {str(one) for one in fresh}


def test_arguments_that_mean_nothing_are_refused(tmp_path):
    from dsx import elasticity

    engine = build(stage=0)
    for arguments, text in (
        ({"snapshot_every": 0}, "snapshot_every"), ({"save_every": 1.5}, "save_every"), ({"grace_s": 0}, "grace_s"),
    ):  # fmt: skip
        with pytest.raises(elasticity.ElasticityConfigError, match=text):
            elasticity.resume(engine, tmp_path, **arguments)
    engine.destroy()


def test_checkpoints_on_the_disks_of_nodes_are_refused(tmp_path):
    from dsx import elasticity

    engine = build(stage=0, checkpoint={"use_node_local_storage": True})
    with pytest.raises(elasticity.ElasticityConfigError, match="a folder that all nodes see"):
        elasticity.resume(engine, tmp_path)
    engine.destroy()
