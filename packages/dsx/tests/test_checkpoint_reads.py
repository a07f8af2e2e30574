"""A load of an engine reads what its ranks hold once, at the layout of the save and at any other."""

import os

import pytest
import torch
from dsx_testkit import run_ranks

WIDTH = 96


def build(stage, world, seed=0, low=False):
    import dsx

    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    config = {
        "train_batch_size": world,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
        **({"bf16": {"enabled": True}} if low else {}),
    }
    return dsx.initialize(model=model, config=config)[0]


def write(rank, world, folder, stage, low):
    engine = build(stage, world, low=low)
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(1, WIDTH, dtype=dtype)).float().square().mean())
    engine.step()
    engine.save_checkpoint(folder)


def read(rank, world, folder, stage, low):
    """Bytes read from data files, and bytes of masters, states and random states that this rank holds afterwards."""
    from dsx.checkpoint import open_checkpoint

    engine = build(stage, world, seed=1, low=low)
    count, original = 0, os.preadv

    def preadv(*args):
        nonlocal count
        got = original(*args)
        count += got
        return got

    os.preadv = preadv
    engine.load_checkpoint(folder)
    os.preadv = original
    client = open_checkpoint(folder).index.tensors["client"]
    same_ranks = f"rank{world}.random.torch" not in client and f"rank{world - 1}.random.torch" in client
    held = sum(e.spec.nbytes for n, e in client.items() if same_ranks and n.startswith(f"rank{rank}."))
    for part in engine.optimizer.slices(held=True):
        held += part.master.nbytes + sum(v.nbytes for v in part.states.values() if torch.is_tensor(v) and v.dim())
    return count, held


LAYOUTS = [(2, 2), (3, 2), (2, 1), (1, 3), (0, 2)]


@pytest.mark.parametrize("low", [False, True])
def test_bytes_read_are_bytes_held(tmp_path, low):
    run_ranks(write, 2, str(tmp_path), 2, low)
    for stage, world in LAYOUTS if low else LAYOUTS[:1]:
        counts = run_ranks(read, world, str(tmp_path), stage, low)
        assert [count for count, _ in counts] == [held for _, held in counts], (stage, world)


class Calls:
    """Notes every collective that goes through dsx_comm."""

    def __init__(self):
        self.names = []

    def begin(self, call):
        self.names.append(call.op)

    def end(self, token, call, result, is_async):
        pass


def export_in_16_bits(rank, world, folder):
    import dsx_comm
    from dsx.checkpoint import writing
    from safetensors.torch import load_file

    engine = build(3, world, low=True)
    calls, write, during = Calls(), writing.write_pieces, []

    def write_pieces(*args, **kwargs):
        before = len(calls.names)
        written = write(*args, **kwargs)
        during.append(calls.names[before:])
        return written

    writing.write_pieces = write_pieces
    stop = dsx_comm.observe(calls)
    path = engine.save_checkpoint(folder)
    stop()
    writing.write_pieces = write
    weights = engine.module_state_dict()
    stored = load_file(os.path.join(path, "model.safetensors"))
    same = all(torch.equal(stored[name], value) and value.dtype == torch.bfloat16 for name, value in weights.items())
    return calls.names, during, same


def test_the_16_bit_weights_are_written_without_gathering_them(tmp_path):
    """No collective while they are written; the few around it carry lists of what is there, and whether all went well,
    whatever the number of weights.
    """
    for world in (2, 3):
        for names, during, same in run_ranks(export_in_16_bits, world, str(tmp_path / str(world))):
            assert during == [[]] and same
            tree = {"gather_object", "join_objects", "scatter_object_list"}  # to rank 0 and back
            assert set(names) <= {"all_gather_object", *tree} and len(names) < 40


def export_alone(rank, world, folder):
    """The 16-bit weights of what several ranks have saved, for other programs, by one process."""
    import dsx_comm
    from dsx_checkpoint.exporting import export
    from dsx_checkpoint.foreign.recognising import source_of

    calls = Calls()
    stop = dsx_comm.observe(calls)
    for to in ("safetensors", "torch"):
        export(source_of(f"{folder}/saved"), f"{folder}/rank{rank}.{to}", to=to, dtype="bf16")
    stop()
    return calls.names


def test_an_export_needs_no_other_rank(tmp_path):
    run_ranks(write, 2, str(tmp_path / "saved"), 3, True)
    assert run_ranks(export_alone, 2, str(tmp_path)) == [[], []]
    weights = torch.load(tmp_path / "rank1.torch", weights_only=True)
    assert len(weights) == 8 and all(value.dtype == torch.bfloat16 for value in weights.values())
