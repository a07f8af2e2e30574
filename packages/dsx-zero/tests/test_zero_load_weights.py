"""`load`: weights from safetensors folders, straight to where each rank keeps them."""

from __future__ import annotations

import json
import tracemalloc

import dsx_zero
import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn

pytest.importorskip("safetensors")
from safetensors.torch import save_file

EXACT = {"stage3_param_persistence_threshold": 0}


class Net(nn.Module):
    """Ties, a buffer, a buffer that no checkpoint has, and modules that can initialise themselves."""

    def __init__(self, width=8, seed=3):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.register_buffer("other", torch.ones(2), persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x * self.scale.to(x.dtype)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def stored(model):
    """As Hugging Face writes it: one name of a tied weight."""
    return {name: t.detach().clone() for name, t in model.state_dict().items() if name != "head.weight"}


def write(folder, tensors, files=2):
    """A folder with an index."""
    names, weight_map = list(tensors), {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[number::files]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def whole(model):
    parameters = {name: p.full_tensor() if isinstance(p, dsx_zero.PartitionedParameter) else p.detach().clone()
                  for name, p in model.named_parameters()}  # fmt: skip
    return parameters | {name: b.clone() for name, b in model.named_buffers()}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def built(how, dtype):
    if how == "meta init":
        with torch.device("meta"), dsx_zero.Init(dtype=dtype):
            return Net()
    if how == "host init":
        with dsx_zero.Init(remote_device="cpu", dtype=dtype):
            return Net(seed=9)
    if how == "init":
        with dsx_zero.Init(dtype=dtype):
            return Net(seed=9)
    return Net(seed=9).to(dtype)


def loaded(rank, world, folder, how, stage, dtype, trains_first):
    source = Net()
    model = built(how, dtype)
    model.scale, model.other = torch.zeros(8), torch.ones(2)
    if how == "sharded":
        model, optimizer = dsx_zero.shard(model, adamw, stage=stage, config=EXACT)
        if trains_first:
            model(torch.arange(4)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    report = dsx_zero.load_weights(model, folder)
    assert set(report.loaded) == set(stored(source))
    assert report.missing == report.unexpected == report.initialised == ()
    if how != "sharded":
        model, optimizer = dsx_zero.shard(model, adamw, stage=stage, config=EXACT)
    with dsx_zero.GatheredParameters(model):
        found = {n: t.clone() for n, t in model.state_dict().items()}
    wanted = {n: t.to(dtype) if n != "scale" else t for n, t in source.state_dict().items()}
    assert {n for n in wanted if not torch.equal(found[n], wanted[n])} == set()
    if dtype == torch.bfloat16 and how == "sharded":  # the masters get the digits that the file has
        master = dsx_zero.safe_get_full_fp32_param("blocks.1.0.weight", optimizer=optimizer)
        assert torch.equal(master, source.blocks[1][0].weight)
    model(torch.arange(4)).float().square().mean().backward()
    optimizer.step()
    return whole(model)


KINDS = [("plain", 1), ("init", 3), ("host init", 3), ("meta init", 3), ("meta init", 2),
         *(("sharded", stage) for stage in (0, 1, 2, 3))]  # fmt: skip
SAMPLE = {("meta init", 3, 3), ("host init", 3, 1), ("sharded", 0, 1), ("sharded", 2, 3), ("sharded", 3, 3)}


@pytest.mark.parametrize(
    ("how", "stage", "world"),
    [
        pytest.param(*kind, world, marks=() if (*kind, world) in SAMPLE else pytest.mark.slow)
        for kind in KINDS
        for world in (1, 3)
    ],
)
def test_every_kind_of_model_gets_the_files_values(how, stage, world, tmp_path):
    write(tmp_path, stored(Net()))
    for dtype in (torch.float32, torch.bfloat16):
        run_ranks(loaded, world, str(tmp_path), how, stage, dtype, stage == 3)


def test_offloaded_shards_are_filled_where_they_live(tmp_path):
    write(tmp_path, stored(Net()))
    settings = EXACT | {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    model, _ = dsx_zero.shard(Net(seed=9).bfloat16(), adamw, stage=3, config=settings)
    dsx_zero.load_weights(model, tmp_path)
    assert torch.equal(model.blocks[0][0].weight.full_tensor(), Net().blocks[0][0].weight.bfloat16())


def test_one_file_and_a_folder_without_an_index_and_other_names(tmp_path):
    save_file({f"wrap.{n}": t for n, t in stored(Net()).items()}, tmp_path / "weights.safetensors")
    for path in (tmp_path, tmp_path / "weights.safetensors"):
        model = Net(seed=9)
        dsx_zero.load_weights(model, path, rename=lambda name: name.removeprefix("wrap."))
        assert torch.equal(model.blocks[2][0].bias, Net().blocks[2][0].bias)
    strided = Net(seed=9)
    strided.blocks[0][0].weight.data = torch.empty(8, 8).t()
    dsx_zero.load_weights(strided, tmp_path, rename=lambda name: name.removeprefix("wrap."))
    assert torch.equal(strided.blocks[0][0].weight, Net().blocks[0][0].weight)


def test_what_does_not_fit_is_named_and_nothing_is_changed(tmp_path):
    tensors = stored(Net())
    del tensors["blocks.0.0.bias"]
    tensors["lm_head.weight"] = torch.ones(2, 2)
    write(tmp_path, tensors)
    model = Net(seed=9)
    before = stored(model)
    with pytest.raises(dsx_zero.ZeroLoadError, match=r"missing: blocks.0.0.bias; unexpected: lm_head.weight\. Give"):
        dsx_zero.load_weights(model, tmp_path)
    tensors["blocks.1.0.weight"] = torch.ones(3)
    write(tmp_path, tensors)
    with pytest.raises(dsx_zero.ZeroLoadError, match=r"blocks.1.0.weight: got shape \(3,\), expected \(8, 8\)"):
        dsx_zero.load_weights(model, tmp_path, strict=False)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), stored(model).values()))


def _renamed(rank, world_size, folder):
    """The user's own function fails on one rank, with an error that is not ours."""

    def rename(name):
        return {}[name] if rank == 1 else name

    model = Net(seed=9)
    before = stored(model)
    with pytest.raises(
        dsx_zero.ZeroLoadError, match=r"dsx_zero.load_weights: rank 1 failed: KeyError: 'blocks"
    ) as found:
        dsx_zero.load_weights(model, folder, rename=rename)
    assert isinstance(found.value.__cause__, KeyError) == (rank == 1)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), stored(model).values()))


def test_an_error_of_the_users_function_on_one_rank_is_raised_on_all(tmp_path):
    write(tmp_path, stored(Net()))
    run_ranks(_renamed, 2, tmp_path, timeout=60)


def test_the_report_of_a_load_that_is_not_strict(tmp_path):
    tensors = stored(Net())
    del tensors["blocks.0.0.bias"], tensors["blocks.2.0.weight"]
    tensors["lm_head.weight"] = torch.ones(2, 2)
    write(tmp_path, tensors)
    with torch.device("meta"), dsx_zero.Init():
        model = Net()
    model.scale = torch.zeros(8)
    model.blocks[0][0].bias.data.fill_(7.0)  # somebody gave it values
    report = dsx_zero.load_weights(model, tmp_path, strict=False)
    assert report.missing == ("blocks.0.0.bias",)
    assert report.unexpected == ("lm_head.weight",)
    assert report.initialised == ("blocks.2.0.weight",)
    found = whole(model)
    assert (found["blocks.0.0.bias"] == 7.0).all()
    assert 0 < found["blocks.2.0.weight"].abs().max() <= 8**-0.5
    assert torch.equal(found["blocks.2.0.bias"], Net().blocks[2][0].bias)  # initialised with it, then loaded
    assert str(report) == "6 loaded, 1 missing, 1 unexpected, 1 initialised"


def test_parameters_without_values_are_refused(tmp_path):
    with torch.device("meta"), dsx_zero.Init():
        model = Net()
    with pytest.raises(
        dsx_zero.ZeroModelError, match=r"embedding.weight.*without values; fill the model with dsx_zero"
    ):
        dsx_zero.shard(model, adamw, stage=3)
    with pytest.raises(dsx_zero.PartitionedParameterError, match="has no values yet"):
        model.head.weight.full_tensor()
    with torch.device("meta"):
        plain = Net()
    write(tmp_path, stored(Net()))
    with pytest.raises(dsx_zero.ZeroLoadError, match=r"is on the meta device and has no memory; build the model under"):
        dsx_zero.load_weights(plain, tmp_path)


def differing(rank, world, folders):
    with pytest.raises(dsx_zero.ZeroLoadError) as caught:
        dsx_zero.load_weights(Net(), folders[rank])
    return str(caught.value)


@pytest.mark.parametrize("fault", ["folder", "cut", "index", "file", "half", "other"])
def test_all_ranks_raise_the_same_error(fault, tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        folder.mkdir()
        write(folder, stored(Net()))
    shards = sorted(bad.glob("model-*.safetensors"))
    expected = fault
    if fault == "folder":
        bad, expected = tmp_path / "nowhere", "nowhere: not there; expected a folder with"
    elif fault == "cut":
        shards[0].write_bytes(shards[0].read_bytes()[:-8])
        expected = "not a whole safetensors file"
    elif fault == "index":
        (bad / "model.safetensors.index.json").write_text("{")
        expected = "not an index of weights"
    elif fault == "file":
        shards[1].unlink()
        expected = "1 of its 2 files are not there (model-00002-of-00002.safetensors)"
    elif fault == "half":
        shards[0].write_bytes(b"\x01")
        expected = "not a whole safetensors file"
    else:
        write(bad, {name: t.bfloat16() for name, t in stored(Net()).items()})
        expected = "the ranks read different files"
    texts = run_ranks(differing, 2, [str(good), str(bad)])
    assert texts[0] == texts[1]
    assert expected in texts[0]


def peak_of_loading(rank, world, folder, width):
    with torch.device("meta"), dsx_zero.Init(remote_device="cpu"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(12)))
    tracemalloc.start()
    dsx_zero.load_weights(model, folder)
    _, peak = tracemalloc.get_traced_memory()
    return peak, sum(p.source.shard.nbytes for p in model.parameters())


def test_no_rank_holds_more_than_its_part_and_one_range(tmp_path):
    """`tracemalloc` sees the buffers of files; parts are allocated by torch before it starts."""
    width = 512
    tensors = {f"{n}.weight": torch.randn(width, width) for n in range(12)}
    write(tmp_path, tensors, files=3)
    for peak, held in run_ranks(peak_of_loading, 2, str(tmp_path), width):
        assert held == 12 * width * width * 4 // 2
        assert peak < 1.5 * width * width * 4  # of 12 such matrices
