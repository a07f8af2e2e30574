"""`weight_buckets`: a sharded model's whole tensors in buckets, for a generator."""

from __future__ import annotations

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn


class Net(nn.Module):
    """Odd and tied shapes, a frozen bias, an empty parameter, a buffer, a buffer that is not saved."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.norm = nn.BatchNorm1d(10)
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].bias.requires_grad_(False)
        self.nothing = nn.Parameter(torch.empty(0))
        self.register_buffer("not_saved", torch.ones(3), persistent=False)
        self.to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x)).float().square().mean()


def built(rank, stage, dtype=torch.float32, model=None, **more):
    config = {"stage": stage, "stage3_param_persistence_threshold": 12, **more}
    model, optimizer = dsx_zero.shard(model or Net(dtype), lambda p: torch.optim.AdamW(p, lr=1e-2), config=config)
    step(rank, model, optimizer)
    return model, optimizer


def step(rank, model, optimizer, seed=0):
    tokens = torch.randint(0, 13, (8,), generator=torch.Generator().manual_seed(10 * seed + rank))
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def collected(optimizer, **options):
    """(what all buckets gave, names and bytes of each bucket)."""
    found, buckets = {}, []
    for bucket in dsx_zero.export.weight_buckets(optimizer, **options):
        found |= {name: value.clone() for name, value in bucket.items()}
        buckets.append((list(bucket), sum(value.nbytes for value in bucket.values())))
    return found, buckets


def expected(optimizer):
    """First names only, as safetensors has them."""
    whole = dsx_zero.full_state_dict(optimizer, rank0_only=False)["model"]
    whole.pop("head.weight")
    return whole


def streamed(rank, world, stage, dtype, to, bucket_bytes, asleep):
    _, optimizer = built(rank, stage, dtype)
    want = expected(optimizer)
    if asleep:
        optimizer.offload_states()
    found, buckets = collected(optimizer, bucket_bytes=bucket_bytes, dtype=to)
    assert found.keys() == want.keys()
    for name, value in found.items():
        wanted = want[name].to(to) if to is not None and want[name].is_floating_point() else want[name]
        assert value.dtype == wanted.dtype and torch.equal(value, wanted), name
    return buckets


CASES = [
    (stage, world, dtype, to, size, asleep)
    for stage in (0, 1, 2, 3)
    for world in (1, 2, 3)
    for dtype, to in ((torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32))
    for size in (1, 700, 1 << 20)
    for asleep in (False, True)
]
SAMPLE = {
    (0, 1, torch.float32, torch.bfloat16, 700, False),
    (1, 2, torch.float32, None, 1, False),
    (2, 2, torch.bfloat16, torch.float32, 1 << 20, True),
    (3, 2, torch.float32, None, 700, False),
    (3, 2, torch.float32, torch.bfloat16, 700, True),
    (3, 3, torch.bfloat16, torch.float32, 1, False),
}


@pytest.mark.parametrize(
    ("stage", "world", "dtype", "to", "size", "asleep"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow) for case in CASES],
)
def test_every_rank_gets_the_bits_of_the_whole_state_in_one_order(stage, world, dtype, to, size, asleep):
    first, *others = run_ranks(streamed, world, stage, dtype, to, size, asleep)
    assert all(other == first for other in others)
    for names, nbytes in first:
        assert len(names) == 1 or nbytes <= size


def selected(rank, world):
    _, optimizer = built(rank, 3)
    want = expected(optimizer)
    some, _ = collected(optimizer, names=["blocks.2.weight", "embed.weight"])
    assert list(some) == ["embed.weight", "blocks.2.weight"]  # the model's order
    renamed, _ = collected(optimizer, names=lambda name: f"model.{name}" if "blocks" in name else None)
    assert set(renamed) == {f"model.{name}" for name in want if "blocks" in name}
    assert torch.equal(renamed["model.blocks.0.bias"], want["blocks.0.bias"])


def test_names_select_and_rename():
    run_ranks(selected, 2)


def coded(rank, world, kind):
    _, optimizer = built(rank, 3)
    want = expected(optimizer)
    found, _ = collected(optimizer, quantised=kind, bucket_bytes=1000)
    matrices = {f"blocks.{i}.weight" for i in range(4)}
    assert {name for name in found if name.endswith("_scale")} == {f"{name}_scale" for name in matrices}
    for name in matrices:
        codes, scale = found[name], found[f"{name}_scale"]
        assert codes.dtype == {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind] and scale.shape == (10, 1)
        most = {"int8": 127, "fp8": 448}[kind]
        assert torch.equal(codes.float().abs().amax(1), torch.full((10,), float(most)))
        error = (codes.float() * scale - want[name]).abs()
        # half a step of int8; e4m3 has 3 bits behind the point, and steps of 2^-9 below 2^-6
        limit = scale / 2 if kind == "int8" else want[name].abs() / 16 + scale * 2**-10
        assert bool((error <= limit * (1 + 1e-5)).all())
    assert torch.equal(found["norm.weight"], want["norm.weight"])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_codes_are_within_half_a_step(kind):
    run_ranks(coded, 2, kind)


def refused(rank, world):
    _, optimizer = built(rank, 3)
    for options, text in (
        ({"bucket_bytes": 0}, "bucket_bytes: got 0, expected a positive number"),
        ({"dtype": torch.int8}, "dtype: got torch.int8, expected a floating-point"),
        ({"lora": "no"}, "lora: got 'no', expected one of 'merged', 'apart'"),
        ({"quantised": "int4"}, "quantised: got 'int4', expected one of 'int8', 'fp8', or None"),
        ({"names": "embed.weight"}, "expected a function, or a collection of names"),
        ({"names": ["embed.wait"]}, "the model has no tensor 'embed.wait'"),
        ({"names": lambda name: "same"}, "are both given as 'same'"),
    ):
        with pytest.raises(dsx_zero.ZeroConfigError, match=text):
            dsx_zero.export.weight_buckets(optimizer, **options)
    with pytest.raises(dsx_zero.RanksDifferError, match="bucket_bytes"):
        dsx_zero.export.weight_buckets(optimizer, bucket_bytes=100 + rank)
    with pytest.raises((dsx_zero.RanksDifferError, dsx_zero.ZeroConfigError), match="dtype"):
        dsx_zero.export.weight_buckets(optimizer, dtype=torch.int8 if rank == 0 else None)
    collected(optimizer)


def test_wrong_and_differing_arguments_are_refused_before_anything_is_sent():
    run_ranks(refused, 2)


def released(rank, world):
    _, optimizer = built(rank, 2)
    optimizer.release()
    with pytest.raises(dsx_zero.ZeroStateError, match="released"):
        dsx_zero.export.weight_buckets(optimizer)


def test_a_released_optimizer_has_no_weights():
    run_ranks(released, 1)


def boxes(rank, world, stage, asleep):
    _, optimizer = built(rank, stage)
    want = expected(optimizer)
    if asleep:
        optimizer.offload_states()
    found = [(s.name, s.shape, s.offset, s.values.clone()) for s in dsx_zero.export.weight_shards(optimizer)]
    for name, shape, offset, values in found:
        assert tuple(want[name].shape) == shape
        at = tuple(slice(start, start + size) for start, size in zip(offset, values.shape))
        assert torch.equal(want[name][at], values)
    return {name: tuple(value.shape) for name, value in want.items()}, [(*f[:3], tuple(f[3].shape)) for f in found]


@pytest.mark.parametrize(("stage", "world", "asleep"), [(0, 2, False), (1, 3, True), (3, 2, True), (3, 3, False)])
def test_boxes_of_all_ranks_cover_every_element_once(stage, world, asleep):
    ranks = run_ranks(boxes, world, stage, asleep)
    covered = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in ranks[0][0].items()}
    for _, found in ranks:
        for name, _, offset, size in found:
            covered[name][tuple(slice(start, start + extent) for start, extent in zip(offset, size))] += 1
    assert all(bool((count == 1).all()) for count in covered.values())
