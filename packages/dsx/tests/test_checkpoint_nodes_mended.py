"""`use_node_local_storage`: damaged bytes are mended from the copies on other nodes, and copies are compared with what
was written.

Three nodes of one rank: each has what its rank holds, and a copy of what the node before it has.
"""

import shutil
from pathlib import Path

import pytest
import torch
from dsx.checkpoint import CheckpointError
from dsx_checkpoint.node_part import read_part
from dsx_checkpoint.spans import Spans
from dsx_testkit import Nodes, run_ranks

TRAINED = "optimizer.safetensors"


def build(world, seed=0):
    import dsx

    torch.manual_seed(seed)
    config = {
        "train_batch_size": world,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "checkpoint": {"use_node_local_storage": True},
        "steps_per_print": None,
    }
    return dsx.initialize(model=torch.nn.Sequential(torch.nn.Linear(9, 40), torch.nn.Linear(40, 5)), config=config)[0]


def state(engine):
    found = dict(engine.module_state_dict())
    for part in engine.optimizer.slices(held=True):
        found |= {f"{key}/{part.name}": torch.as_tensor(value).clone() for key, value in part.states.items()}
    return found


def save(rank, world, folder):
    with Nodes(world, 1).environment(rank):
        engine, found = build(world), {}
        for tag in ("a", "b"):
            engine.backward(engine(torch.ones(1, 9)).square().sum())
            engine.step()
            engine.save_checkpoint(f"{folder}/node{rank}", tag=tag)
            found[tag] = state(engine)
        return found


def loads(rank, world, folders):
    """What each load gives: the tag, the state, and whether it warned of the disks."""
    import logging

    found, said = [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("dsx").addHandler(handler)
    with Nodes(world, 1).environment(rank):
        for folder in folders:
            engine = build(world, seed=5)
            said.clear()
            try:
                path, _ = engine.load_checkpoint(f"{folder}/node{rank}")
                found.append((Path(path).name, state(engine), any("look at these disks" in text for text in said)))
            except CheckpointError as error:
                found.append((str(error), {}, False))
            engine.destroy()
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(save, 3, str(folder))


def own_bytes(disks, node, file):
    """Bytes that the rank of this node holds, and reads there: those that the next node has a copy of."""
    mine, copy = (read_part(disks / f"node{n % 3}" / "b").spans for n in (node, node + 1))
    header = Spans.of([(file, 0, 8 + int.from_bytes((disks / f"node{node}" / "b" / file).read_bytes()[:8], "little"))])
    return [(begin, end) for name, begin, end in (mine & copy) - header if name == file]


def flip(disks, node, file, places):
    path = disks / f"node{node}" / "b" / file
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 0x40
    path.write_bytes(data)


def one_byte(disks):
    flip(disks, 1, TRAINED, [own_bytes(disks, 1, TRAINED)[0][0] + 1])


def many_bytes(disks):
    """A byte of everything that the rank of node 2 reads, in both files."""
    for file in (TRAINED, "model.safetensors"):
        flip(disks, 2, file, [end - 1 for _, end in own_bytes(disks, 2, file)])


def a_header(disks):
    flip(disks, 0, "model.safetensors", [20])


def headers_of_two_nodes(disks):
    for node in (0, 1):
        flip(disks, node, TRAINED, [12])


def cut_short(disks):
    path = disks / "node1" / "b" / TRAINED
    path.write_bytes(path.read_bytes()[:-40])


def removed(disks):
    (disks / "node2" / "b" / "model.safetensors").unlink()


def two_nodes(disks):
    """In other chunks: each node has what the other one needs."""
    (first, *_), (*_, last) = own_bytes(disks, 0, TRAINED), own_bytes(disks, 2, TRAINED)
    flip(disks, 0, TRAINED, [first[0]])
    flip(disks, 2, TRAINED, [last[1] - 1])


def damaged_beside_a_lost_disk(disks):
    """Node 0 gets a new disk. Node 1 has damage, of which node 2 has a copy."""
    one_byte(disks)
    shutil.rmtree(disks / "node0")


MENDED = [
    one_byte, many_bytes, a_header, headers_of_two_nodes, cut_short, removed, two_nodes, damaged_beside_a_lost_disk,
]  # fmt: skip


def both_copies(disks):
    place = own_bytes(disks, 1, TRAINED)[0][0]
    for node in (1, 2):
        flip(disks, node, TRAINED, [place])


def headers_of_all_nodes(disks):
    for node in range(3):
        flip(disks, node, TRAINED, [12])


def no_copy_is_left(disks):
    """Node 2 has damage, and the disk with the copy is lost."""
    flip(disks, 2, TRAINED, [own_bytes(disks, 2, TRAINED)[0][0]])
    shutil.rmtree(disks / "node0" / "b")


LOST = [both_copies, headers_of_all_nodes, no_copy_is_left]


def test_damaged_bytes_are_mended_from_the_copies_of_other_nodes(saved, tmp_path):
    folder, results = saved
    cases = [*MENDED, *LOST]
    disks = {}
    for harm in cases:
        disks[harm] = tmp_path / harm.__name__
        shutil.copytree(folder, disks[harm])
        harm(disks[harm])
    found = run_ranks(loads, 3, [str(disks[harm]) for harm in cases], timeout=240)
    for number, harm in enumerate(cases):
        for rank in range(3):
            tag, got, warned = found[rank][number]
            expected = results[rank]["b" if harm in MENDED else "a"]
            assert tag == ("b" if harm in MENDED else "a"), (harm, tag)
            assert got.keys() == expected.keys() and all(torch.equal(got[n], v) for n, v in expected.items()), harm
            assert warned == (rank == 0 and harm in MENDED), harm
    good = joined_files(folder, tmp_path / "whole")
    for harm in MENDED:  # and all files are as they were, but for what no node is to have
        for node in range(3):
            part = read_part(disks[harm] / f"node{node}" / "b")
            assert harm == damaged_beside_a_lost_disk or part == read_part(folder / f"node{node}" / "b")
            for file, begin, end in part.spans:
                now = (disks[harm] / f"node{node}" / "b" / file).read_bytes()
                assert len(good[file]) == len(now) and good[file][begin:end] == now[begin:end], (harm, node, file)


def joined_files(folder, target):
    from dsx_checkpoint.nodes.joining import join

    whole = join([folder / f"node{node}" for node in range(3)], target, "b")
    return {path.name: path.read_bytes() for path in whole.iterdir()}


def save_on_two_nodes(rank, world, folder):
    with Nodes(world, 2).environment(rank):
        engine = build(world)
        engine.backward(engine(torch.ones(1, 9)).square().sum())
        engine.step()
        engine.save_checkpoint(f"{folder}/node{rank // 2}", tag="b")
        return state(engine)


def load_on_two_nodes(rank, world, folder):
    with Nodes(world, 2).environment(rank):
        engine = build(world, seed=5)
        engine.load_checkpoint(f"{folder}/node{rank // 2}")
        return state(engine)


def test_ranks_of_one_node_look_for_damage_together(tmp_path):
    """Two nodes of two ranks: each node has all bytes, and every rank looks at a half of them."""
    saved = run_ranks(save_on_two_nodes, 4, str(tmp_path))
    part = read_part(tmp_path / "node0" / "b")
    places = [place for file, begin, end in part.spans if file == TRAINED for place in range(begin, end)]
    before = (tmp_path / "node0" / "b" / TRAINED).read_bytes()
    for node, place in ((0, 0), (0, len(places) // 4), (1, len(places) // 2), (1, -1)):
        path = tmp_path / f"node{node}" / "b" / TRAINED
        data = bytearray(path.read_bytes())
        data[places[place]] ^= 1
        path.write_bytes(data)
    for got, expected in zip(run_ranks(load_on_two_nodes, 4, str(tmp_path)), saved):
        assert got.keys() == expected.keys() and all(torch.equal(got[n], v) for n, v in expected.items())
    assert [(tmp_path / f"node{node}" / "b" / TRAINED).read_bytes() for node in (0, 1)] == [before] * 2


def test_one_node_alone_verifies_the_chunks_that_it_has(saved, tmp_path, capsys):
    from dsx_checkpoint.command import main

    disks = tmp_path / "disks"
    shutil.copytree(saved[0], disks)
    assert main(["verify", str(disks / "node1")]) == 0
    said = capsys.readouterr().out
    assert "ok, as far as one node can say" in said and "node 1 of 3" in said
    found = 0
    for node in range(3):
        for _, end in own_bytes(disks, node, TRAINED):
            flip(disks, node, TRAINED, [end - 1])
            found += main(["verify", str(disks / f"node{node}")])
            flip(disks, node, TRAINED, [end - 1])
    assert found and "not those that were saved" in capsys.readouterr().err
    assert [main(["verify", str(disks / f"node{node}")]) for node in range(3)] == [0, 0, 0]


def save_over_a_bad_network(rank, world, folder):
    """One byte of a message changes on its way from rank 1 to rank 2."""
    from dsx_checkpoint.ranks import GroupRanks

    with Nodes(world, 1).environment(rank):
        engine = build(world)
        engine.save_checkpoint(f"{folder}/node{rank}", tag="old")
        send, bad = GroupRanks.send, rank == 1

        def sent(self, data, to):
            nonlocal bad
            data = data.clone()
            if bad:
                data[len(data) // 2] ^= 1
                bad = False
            send(self, data, to)

        GroupRanks.send = sent
        try:
            engine.save_checkpoint(f"{folder}/node{rank}", tag="new")
        except CheckpointError as error:
            text = str(error)
        engine.save_checkpoint(f"{folder}/node{rank}", tag="after")
        return text, sorted(p.name for p in Path(f"{folder}/node{rank}").iterdir())


def test_a_copy_that_is_another_one_is_not_kept(tmp_path):
    (text, left), *others = run_ranks(save_over_a_bad_network, 3, str(tmp_path))
    assert others == [(text, left)] * 2 and left == ["after", "latest", "old"]
    assert "the copy of " in text and "on node 2 is not what was written" in text and "nothing was saved" in text
