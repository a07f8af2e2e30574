"""Owners and messages of matrices, by the real layouts of published models on meta tensors: buffers without padding,
work in balance, and each element once in each direction.
"""

import random

import pytest
import torch
from dsx_comm import RankSet
from dsx_zero.plan.layout import FlatLayout
from dsx_zero.plan.matrices import Matrix, largest_load_at_least, owners_of, rounds_of
from dsx_zero.plan.units import find_parameters, plan_units
from torch import nn

dsx_ops = pytest.importorskip("dsx_ops")


class Stack(nn.Module):
    """Parameters of the given shapes."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta", dtype=torch.bfloat16)))


class Decoder(nn.Module):
    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.embed, self.lm_head = Stack({"weight": (vocabulary, width)}), Stack({"weight": (vocabulary, width)})
        self.layers = nn.ModuleList(Stack(layer) for layer in layers)
        self.norm = Stack({"weight": (width,)})


def llama(width, inner, key_rows, depth):
    layer = {
        "q": (width, width), "k": (key_rows, width), "v": (key_rows, width), "o": (width, width),
        "gate": (inner, width), "up": (inner, width), "down": (width, inner), "norm1": (width,), "norm2": (width,),
    }  # fmt: skip
    return Decoder(128256, width, [layer] * depth)


def qwen3_30b():
    layer = {
        "q": (4096, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 4096), "router": (128, 2048),
        "gate_up": (128, 1536, 2048), "down": (128, 2048, 768), "norm1": (2048,), "norm2": (2048,),
        "q_norm": (128,), "k_norm": (128,),
    }  # fmt: skip
    return Decoder(151936, 2048, [layer] * 48)


def deepseek_v3():
    attention = {
        "q_a": (1536, 7168), "q_b": (24576, 1536), "kv_a": (576, 7168), "kv_b": (32768, 512), "o": (7168, 16384),
        "norm1": (7168,), "norm2": (7168,), "q_norm": (1536,), "kv_norm": (512,),
    }  # fmt: skip
    dense = {"gate": (18432, 7168), "up": (18432, 7168), "down": (7168, 18432)}
    sparse = {
        "router": (256, 7168), "gate_up": (256, 4096, 7168), "down": (256, 7168, 2048),
        "shared_gate": (2048, 7168), "shared_up": (2048, 7168), "shared_down": (7168, 2048),
    }  # fmt: skip
    return Decoder(129280, 7168, [attention | dense] * 3 + [attention | sparse] * 58)


MODELS = {
    "Llama-8B": lambda: llama(4096, 14336, 1024, 32),
    "Llama-70B": lambda: llama(8192, 28672, 1024, 80),
    "Qwen3-30B-A3B": qwen3_30b,
    "DeepSeek-V3": deepseek_v3,
}


def muon(model):
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if name.startswith("layers") and p.dim() > 1]
    packed = [p for p in matrices if p.dim() == 3 and p.shape[1] % 2 == 0 and p.shape[1] in (1536, 4096)]
    others = [p for p in matrices if all(p is not q for q in packed)]
    rest = [p for name, p in named.items() if not (name.startswith("layers") and p.dim() > 1)]
    groups = [
        {"params": packed, "stacked": True, "split_rows": 2},
        {"params": others, "stacked": True},
        {"params": rest, "use_muon": False},
    ]
    return dsx_ops.Muon([group for group in groups if group["params"]])


def planned(model, optimizer, ranks, rank):
    """The layouts of `shard` at stage 3, as one of many ranks, and the matrices in them."""
    infos = find_parameters(model, frozenset(id(p) for p in model.parameters()))
    own = RankSet(rank=rank, size=ranks)
    plans = plan_units(model, infos, stage=3, ranks_of=lambda info: own)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    named, layouts, matrices = dict(model.named_parameters()), [], []
    for layout in (group.layout for plan in plans for group in plan.groups):
        for name, shape in zip(layout.names, layout.shapes):
            settings, start = groups[id(named[name])], 0
            for rows, columns in optimizer.matrices(shape, settings):
                work = optimizer.work((rows, columns), settings)
                matrices.append(Matrix(len(layouts), start, rows, columns, work))
                start += rows * columns
            layouts.append((layout, name))
    return layouts, matrices


@pytest.mark.parametrize("ranks", [8, 64, 1024])
@pytest.mark.parametrize("name", MODELS)
def test_published_models_have_no_padding_and_work_in_balance(name, ranks):
    model = MODELS[name]()
    optimizer = muon(model)
    layouts, matrices = planned(model, optimizer, ranks, ranks - 1)
    buffers = {id(layout): layout for layout, _ in layouts}.values()
    elements = sum(p.numel() for p in model.parameters())
    assert elements <= sum(layout.numel for layout in buffers) <= 1.01 * elements
    assert sum(layout.shard_numel for layout in buffers) <= 1.01 * elements / ranks  # masters and states of a rank

    works = [matrix.work for matrix in matrices]
    loads = [0.0] * ranks
    for owner, work in zip(owners_of(works, ranks), works):
        loads[owner] += work
    least = largest_load_at_least(works, ranks)
    assert max(loads) <= max(1.05 * sum(works) / ranks, least * (1 + 1e-9))
    if len(matrices) > 100 * ranks:
        assert max(loads) <= 1.05 * sum(works) / ranks

    # what one rank sends is its part of the momentum, each element once
    rounds = rounds_of(matrices, layouts, ranks - 1)
    own = {(place, place_of.start): place_of.numel
           for place, (layout, name) in enumerate(layouts)
           if (place_of := layout.local_slice(name, ranks - 1)) is not None}  # fmt: skip
    of_matrices = {matrix.place for matrix in matrices}
    momentum = sum(numel for (place, _), numel in own.items() if place in of_matrices)
    assert sum(sum(around.send_sizes) for around in rounds) == momentum


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_what_one_rank_sends_another_expects(seed, world):
    rng = random.Random(seed)
    shapes = [(f"p{n}", (rng.randint(1, 9), rng.randint(1, 12), rng.randint(1, 7))) for n in range(rng.randint(1, 12))]
    cut = rng.randint(0, len(shapes))
    layouts = [
        (layout, name)
        for part in (shapes[:cut], shapes[cut:])
        for layout in (FlatLayout.build(part, world_size=world, itemsize=4),)
        for name, _ in part
    ]
    matrices = [
        Matrix(place, number * rows * columns, rows, columns, rows * columns * min(rows, columns))
        for place, (_, (stack, rows, columns)) in enumerate(shapes)
        for number in range(stack)
    ]
    by_rank = [rounds_of(matrices, layouts, rank) for rank in range(world)]
    assert len({len(rounds) for rounds in by_rank}) == 1
    arrived = {index: [] for index in range(len(matrices))}
    for of_ranks in zip(*by_rank):
        for owner, around in enumerate(of_ranks):
            sent = [[p for p in other.sends if p.matrix in around.owned] for other in of_ranks]
            assert list(around.receives) == [piece for pieces in sent for piece in pieces]
            assert list(around.receive_sizes) == [other.send_sizes[owner] for other in of_ranks]
            for piece in around.receives:
                arrived[piece.matrix].append((piece.start, piece.stop))
    for index, pieces in arrived.items():  # in order, without gaps: that is how an owner joins them
        starts, stops = [start for start, _ in pieces], [stop for _, stop in pieces]
        assert starts == [matrices[index].start, *stops[:-1]] and stops[-1] == matrices[index].stop


def test_the_bound_of_the_largest_load_is_one():
    """By trying all divisions of a few matrices."""
    import itertools

    rng = random.Random(0)
    for _ in range(30):
        works = [rng.randint(1, 9) for _ in range(6)]
        best = min(
            max(sum(w for w, owner in zip(works, owners) if owner == rank) for rank in range(3))
            for owners in itertools.product(range(3), repeat=6)
        )
        bound = largest_load_at_least(works, 3)
        mine = owners_of(works, 3)
        largest = max(sum(w for w, owner in zip(works, mine) if owner == rank) for rank in range(3))
        assert bound <= best <= largest <= 4 / 3 * best
