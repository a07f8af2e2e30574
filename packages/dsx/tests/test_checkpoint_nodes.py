"""`use_node_local_storage`: each node saves to its own disk, and a load puts the checkpoint together from what is on
the disks: all of them, all but one, or with nodes that are new.

Nodes are those of the test kit: ranks with another GROUP_RANK and a folder of their own.
"""

import shutil
import threading
from pathlib import Path

import pytest
import torch
from dsx.checkpoint import CheckpointError, open_checkpoint
from dsx_checkpoint.command import main as checkpoint_command
from dsx_testkit import Nodes, run_ranks


class Model(torch.nn.Module):
    """Uneven sizes, a tied weight, a frozen layer, a buffer."""

    def __init__(self):
        super().__init__()
        self.inner, self.frozen = torch.nn.Linear(7, 5), torch.nn.Linear(5, 7)
        self.outer = torch.nn.Linear(7, 5, bias=False)
        self.outer.weight = self.inner.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x):
        return self.outer(torch.tanh(self.frozen(self.inner(x)))) * self.table[1]


def build(stage, world, seed=0, **checkpoint):
    import dsx

    torch.manual_seed(seed)
    model = Model()
    config = {
        "train_batch_size": 12,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": {"use_node_local_storage": True, **checkpoint},
        "steps_per_print": None,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return dsx.initialize(model=model, model_parameters=trained, config=config)[0]


def train(engine, rank, world, first, steps):
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))[
            rank * 12 // world : (rank + 1) * 12 // world
        ]
        loss = engine(x.bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def state(engine):
    """Weights, masters and states, whole; collective."""
    from dsx.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = dict(engine.module_state_dict())
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"master/{name}"] = safe_get_full_fp32_param(parameter).clone()
            found[f"exp_avg/{name}"] = safe_get_full_optimizer_state(parameter, "exp_avg").clone()
    return found


def save(rank, world, folder, devices, stages, options):
    """At each of the stages, one after the other: starting ranks is what takes time."""
    nodes, found = Nodes(world, devices), []
    with nodes.environment(rank):
        for stage in stages:
            engine = build(stage, world, **options)
            mine = f"{folder}/stage{stage}/node{nodes.node_of(rank)}"
            for tag in ("a", "b", "c"):
                train(engine, rank, world, engine.global_steps, 1)
                engine.save_checkpoint(mine, tag=tag, client_state={"at": engine.global_steps, "t": torch.arange(3)})
            engine.wait_for_checkpoints()
            found.append((state(engine), train(engine, rank, world, 3, 2)))
            engine.destroy()
    return found


def load(rank, world, devices, loads):
    """Of each load: the folder, the stage, and the name of the disk that each node has (None: its number)."""
    nodes, results = Nodes(world, devices), []
    with nodes.environment(rank):
        for folder, stage, disks in loads:
            engine = build(stage, world, seed=9)
            node = nodes.node_of(rank)
            path, client = engine.load_checkpoint(f"{folder}/node{node if disks is None else disks[node]}")
            found = state(engine)
            results.append((Path(path).name, client["at"], train(engine, rank, world, 3, 2), found))
            engine.destroy()
    return results


def check(results, saved, same_ranks=True):
    for rank, (name, steps, after, got) in enumerate(results):
        expected, losses = saved[rank % len(saved)]
        assert (name, steps) == ("c", 3)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], value) for key, value in expected.items())
        if same_ranks:
            assert after == losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two nodes of two ranks, stage 3; tests copy the disks."""
    folder = tmp_path_factory.mktemp("disks")
    results = run_ranks(save, 4, str(folder), 2, [3], {})
    return folder / "stage3", [rank[0] for rank in results]


@pytest.fixture
def disks(saved, tmp_path):
    folder = tmp_path / "disks"
    shutil.copytree(saved[0], folder)
    return folder


def test_each_node_reads_its_own_disk_and_the_loss_of_one_loses_nothing(saved, disks, tmp_path):
    assert sorted(p.name for p in (disks / "node0").iterdir()) == ["a", "b", "c", "latest"]
    lost = tmp_path / "lost"
    shutil.copytree(disks, lost)
    shutil.rmtree(lost / "node0")
    own, other = zip(*run_ranks(load, 4, 2, [(str(disks), 2, None), (str(lost), 3, None)]))
    check(own, saved[1], same_ranks=False)
    check(other, saved[1])
    assert (lost / "node0" / "c" / "node.json").is_file()  # the new node has what its ranks need


def test_other_numbers_of_nodes_and_ranks_load_it(saved, disks):
    one = run_ranks(load, 1, 1, [(str(disks), 0, [1])])  # one node is left
    three = run_ranks(load, 3, 1, [(str(disks), 1, [5, 0, 6])])  # two of three are new
    for results in (one, three):
        check([rank[0] for rank in results], saved[1], same_ranks=False)


@pytest.mark.parametrize("stages", [[0, 2], pytest.param([1], marks=pytest.mark.slow)])
def test_asynchronous_saves_keep_last_and_stages_with_whole_parameters(tmp_path, stages):
    saved = run_ranks(save, 3, str(tmp_path), 1, stages, {"asynchronous": True, "keep_last": 2})
    for stage in stages:
        for node in (0, 1, 2):
            there = (tmp_path / f"stage{stage}" / f"node{node}").iterdir()
            assert sorted(p.name for p in there) == ["b", "c", "latest"]
        shutil.rmtree(tmp_path / f"stage{stage}" / "node1")
    loaded = run_ranks(load, 3, 1, [(str(tmp_path / f"stage{stage}"), 3, None) for stage in stages])
    for number, _ in enumerate(stages):
        check([rank[number] for rank in loaded], [rank[number] for rank in saved], same_ranks=False)


# - Three nodes: each has two thirds


def save_three(rank, world, folder):
    """On the nodes' disks, the same on a disk that all see, and once more with other values."""
    with Nodes(world, 1).environment(rank):
        for name, seed, options in (
            ("node{}", 0, {}), ("shared", 0, {"use_node_local_storage": False}), ("new/node{}", 7, {}),
        ):  # fmt: skip
            engine = build(3, world, seed, **options)
            for tag in ("a", "b"):
                train(engine, rank, world, engine.global_steps, 1)
                client = {"at": engine.global_steps + seed}
                engine.save_checkpoint(f"{folder}/{name.format(rank)}", tag=tag, client_state=client)
            engine.destroy()


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three nodes of one rank, stage 3, and the same saved on a disk that all see."""
    folder = tmp_path_factory.mktemp("three")
    run_ranks(save_three, 3, str(folder))
    return folder


@pytest.fixture
def thirds(three, tmp_path):
    shutil.copytree(three, tmp_path / "three")
    return tmp_path / "three"


def try_loads(rank, world, loads):
    """Of each load: the folder of the nodes' disks, and the tag."""
    with Nodes(world, 1).environment(rank):
        return [try_load(world, f"{folder}/node{rank}", tag) for folder, tag in loads]


def try_load(world, folder, tag):
    engine = build(3, world, seed=5)
    try:
        path, client = engine.load_checkpoint(folder, tag=tag)
    except CheckpointError as error:
        return str(error)
    finally:
        engine.destroy()
    return path and (Path(path).name, client["at"])


def test_a_joined_checkpoint_is_the_one_that_a_shared_disk_gets(three, tmp_path, capsys):
    parts = [str(three / f"node{node}") for node in range(3)]
    with pytest.raises(CheckpointError, match=r"holds the part of node 0 of 3.*dsx checkpoint join"):
        open_checkpoint(parts[0])
    assert checkpoint_command(["verify", parts[0]]) == 0
    assert "that node 0 of 3 has" in capsys.readouterr().out
    assert checkpoint_command(["inspect", parts[0]]) == 0
    assert checkpoint_command(["join", parts[0], str(tmp_path / "whole")]) == 1
    assert "there are the parts of nodes [0]" in capsys.readouterr().err
    assert checkpoint_command(["join", parts[2], parts[1], str(tmp_path / "whole")]) == 0  # two of three are enough
    assert "written and verified" in capsys.readouterr().out
    assert checkpoint_command(["verify", str(tmp_path / "whole")]) == 0
    files = sorted(p.name for p in (three / "shared" / "b").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "whole" / "b").iterdir())
    for name in files:
        if name.endswith(".safetensors"):
            assert (three / "shared" / "b" / name).read_bytes() == (tmp_path / "whole" / "b" / name).read_bytes()


def test_a_part_that_says_too_much_is_found_when_it_is_joined(thirds, tmp_path):
    (thirds / "node0" / "b" / "node.json").unlink()  # now it says that everything is there
    assert checkpoint_command(["join", str(thirds / "node0"), str(tmp_path / "whole"), "--tag", "b"]) == 1
    assert not (tmp_path / "whole" / "b").exists()


# - What goes wrong


def lose_two(disks):
    for node in (1, 2):
        shutil.rmtree(disks / f"node{node}" / "b")


def stop_before_renames(disks):
    """A save was killed while the nodes renamed their folders; these had not come to it."""
    for node in (1, 2):
        (disks / f"node{node}" / "b").rename(disks / f"node{node}" / ".tmp-b-0123456789ab")
        (disks / f"node{node}" / "latest").write_text("a")


def stop_while_replacing(disks):
    """A save was killed while it replaced a tag; the new one is on too few disks."""
    one = disks / "node0"
    (one / "b").rename(one / ".old-b-0123456789ab")
    shutil.copytree(disks / "new" / "node0" / "b", one / "b")


def damage_texts(disks):
    (disks / "node1" / "b" / "node.json").write_text("{}")
    (disks / "node0" / "b" / "dsx.json").write_text("{}")  # the other nodes have it too


LOADS = {
    "lost, by name": (lose_two, "b"), "lost": (lose_two, None), "renaming": (stop_before_renames, None),
    "replacing": (stop_while_replacing, "b"), "damaged": (damage_texts, None), "damaged, again": ("damaged", None),
}  # fmt: skip


@pytest.fixture(scope="module")
def tried(three, tmp_path_factory):
    """What loads give after something has gone wrong: name -> the disks, and what each rank got."""
    folders, loads = {}, []
    for name, (harm, tag) in LOADS.items():
        if isinstance(harm, str):
            folders[name] = folders[harm]
        else:
            folders[name] = tmp_path_factory.mktemp("tried") / "three"
            shutil.copytree(three, folders[name])
            harm(folders[name])
        loads.append((str(folders[name]), tag))
    by_rank = run_ranks(try_loads, 3, loads)
    return {name: (folders[name], [rank[number] for rank in by_rank]) for number, name in enumerate(LOADS)}


def test_the_loss_of_two_nodes_goes_back_or_says_which_parts_there_are(tried):
    (text, *others) = tried["lost, by name"][1]
    assert others == [text] * 2
    assert "It was saved by 3 nodes, and there are the parts of nodes [0]" in text
    assert tried["lost"][1] == [("a", 1)] * 3


def test_a_save_that_was_killed_while_nodes_renamed_their_folders(tried):
    disks, found = tried["renaming"]
    assert found == [("b", 2)] * 3
    assert all((disks / f"node{node}" / "b" / "dsx.json").is_file() for node in range(3))


def test_a_save_that_was_killed_while_it_replaced_a_tag(tried):
    disks, found = tried["replacing"]
    assert found == [("b", 2)] * 3
    assert len({(disks / f"node{n}" / "b" / "dsx.json").read_bytes() for n in range(3)}) == 1


def test_a_damaged_part_is_as_good_as_lost(tried):
    assert tried["damaged"][1] == tried["damaged, again"][1] == [("b", 2)] * 3  # the second time it is whole again


def see_one_folder(rank, world, folder):
    with Nodes(world, 1).environment(rank):
        engine = build(1, world)
        try:
            engine.save_checkpoint(folder)
        except CheckpointError as error:
            torch.distributed.barrier()
            return str(error), sorted(p.name for p in Path(folder).iterdir())


def test_nodes_that_see_one_folder_are_told_so(tmp_path):
    for text, left in run_ranks(see_one_folder, 2, str(tmp_path)):
        assert "see one folder" in text and "set it to false" in text and left == []


def fail_on_one_node(rank, world, folder):
    import os

    with Nodes(world, 1).environment(rank):
        engine = build(3, world)
        engine.save_checkpoint(f"{folder}/node{rank}", tag="old", client_state={"at": 0})
        write = os.pwrite

        def failing(fd, data, offset):
            if threading.current_thread() is threading.main_thread() and rank == 1 and fail:
                raise OSError(28, "No space left on device")
            return write(fd, data, offset)

        fail, os.pwrite = True, failing
        try:
            engine.save_checkpoint(f"{folder}/node{rank}", tag="new")
        except CheckpointError as error:
            fail = False
            engine.save_checkpoint(f"{folder}/node{rank}", tag="after", client_state={"at": 0})
            return str(error), sorted(p.name for p in Path(f"{folder}/node{rank}").iterdir())


def test_a_full_disk_on_one_node_is_the_same_error_on_all_and_leaves_the_old_one(tmp_path):
    (text, left), (other, others) = run_ranks(fail_on_one_node, 2, str(tmp_path))
    assert text == other and "rank 1 failed" in text and "No space left" in text
    assert left == others == ["after", "latest", "old"]
