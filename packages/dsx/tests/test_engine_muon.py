"""`optimizer.type` Muon, at every ZeRO stage, and the optimizers of the package mup."""

import sys
import types

import dsx
import pytest
import torch
from dsx.errors import DsxConfigError
from dsx.optimizers import choose_optimizer, groups_for_muon
from dsx_testkit import run_ranks
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.lm_head = nn.Linear(8, 7, bias=False)

    def forward(self, x):
        x = self.embed_tokens(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.lm_head(x).square().mean()


def test_matrices_of_hidden_layers_are_for_muon():
    net = Net()
    names = {id(p): name for name, p in net.named_parameters()}
    found = {g["use_muon"]: {names[id(p)] for p in g["params"]} for g in groups_for_muon(net.parameters(), net)}
    assert found[True] == {"layers.0.weight", "layers.1.weight"}
    assert found[False] == {"embed_tokens.weight", "lm_head.weight", "layers.0.bias", "layers.1.bias"}
    net.layers[0].weight.use_muon = False
    net.lm_head.weight.use_muon = True
    found = {g["use_muon"]: {names[id(p)] for p in g["params"]} for g in groups_for_muon(net.parameters(), net)}
    assert found[True] == {"layers.1.weight", "lm_head.weight"}


class Fused(nn.Module):
    """A fused projection, packed experts, a convolution over one dimension and an embedding."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 8)
        self.qkv_proj = nn.Linear(8, 16, bias=False)
        self.conv = nn.Conv1d(16, 16, 3, padding=1, bias=False)
        self.gate_up = nn.Parameter(torch.randn(3, 16, 6))

    def forward(self, x):
        x = self.conv(self.qkv_proj(self.embed_tokens(x)).mT).mT
        return torch.einsum("bsi,eio->bseo", x, self.gate_up).square().mean()


def test_fused_weights_are_split_by_name():
    net = Fused()
    split = {"qkv_proj": {"rows": [8, 4, 4]}, "gate_up": {"columns": 2}}
    optimizer = choose_optimizer("Muon", {"lr": 0.1, "split": split, "ns_method": "gram"}).build(
        net.parameters(), model=net
    )
    found = {tuple(p.shape): optimizer.matrices(p.shape, g) for g in optimizer.param_groups for p in g["params"]}
    assert found == {
        (5, 8): (), (16, 8): ((8, 8), (4, 8), (4, 8)), (16, 16, 3): ((16, 48),), (3, 16, 6): ((16, 6),) * 3
    }  # fmt: skip
    of_experts = next(g for g in optimizer.param_groups if g["params"][0] is net.gate_up)
    matrix = torch.randn(16, 6)
    halves = [optimizer.of_matrix(half, {**of_experts, "split_columns": 1}) for half in matrix.split(3, dim=1)]
    assert torch.equal(optimizer.of_matrix(matrix, of_experts), torch.cat(halves, dim=1))
    with pytest.raises(DsxConfigError, match="qkv_projection"):
        choose_optimizer("Muon", {"split": {"qkv_projection": {"rows": 2}}}).build(net.parameters(), model=net)


def train_fused(rank, world, stage):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {
            "type": "Muon",
            "params": {"lr": 0.02, "split": {"qkv_proj": {"rows": [8, 4, 4]}}, "adjust_lr_fn": "match_rms_adamw",
                       "ns_dtype": "float32", "ns_coefficients": [3.4445, -4.775, 2.0315], "decay": "cautious"},
        },
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    engine, *_ = dsx.initialize(model=Fused(), config=config)
    found = []
    for step in range(3):
        x = torch.randint(0, 5, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found


def test_fused_weights_train_alike_at_all_stages():
    plain = run_ranks(train_fused, 2, 0)
    for stage in (2, 3):
        assert run_ranks(train_fused, 2, stage) == [pytest.approx(of_rank, rel=1e-5) for of_rank in plain]


def train(rank, world, stage, folder):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {
            "type": "Muon",
            "params": {"muon_lr": 0.02, "adam_lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
        },
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = dsx.initialize(model=Net(), config=config)
    found = []
    for step in range(3):
        x = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    if folder is not None:
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        engine.backward(engine(x))
        engine.step()
    engine.destroy()
    return found


def test_stages_agree_and_checkpoints_resume(tmp_path):
    plain = run_ranks(train, 2, 0, None)
    for stage in (1, 3):
        got = run_ranks(train, 2, stage, str(tmp_path / str(stage)))
        assert got == [pytest.approx(of_rank, rel=1e-4) for of_rank in plain]


def test_states_stay_in_memory_beside_masters_on_disk(tmp_path):
    def tiers(keep):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Muon", "params": {"lr": 0.02}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
                "save_muon_momentum_buffer_in_memory": keep,
            },
        }
        engine, *_ = dsx.initialize(model=Net(), config=config)
        engine.backward(engine(torch.zeros(2, 5, dtype=torch.long)))
        engine.step()
        found = engine.optimizer.state_bytes_by_tier()
        engine.destroy()
        return found["master"], found["optimizer"]

    on_disk = tiers(False)[1]
    assert set(on_disk) == {"disk"}
    masters, states = tiers(True)
    assert "disk" in masters and states["host"] > 0.95 * on_disk["disk"]  # counts of steps stay beside the masters


def test_optimizers_of_mup(monkeypatch):
    with pytest.raises(DsxConfigError, match="pip install mup"):
        choose_optimizer("MuAdam", {"lr": 0.1})
    calls = []

    def made(parameters, **arguments):
        calls.append(arguments)
        return torch.optim.AdamW(parameters, **arguments)

    monkeypatch.setitem(sys.modules, "mup", types.SimpleNamespace(MuAdam=made, MuAdamW=made, MuSGD=made))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "MuAdamW", "params": {"lr": 0.1}}}
    engine, *_ = dsx.initialize(model=nn.Linear(2, 2), config=config)
    assert calls == [{"lr": 0.1}] and engine.get_type() == "AdamW"
    engine.destroy()


def test_mistakes_are_named():
    for params, match in (
        ({"split": {"qkv": 3}}, r"params\.split"),
        ({"split": {"qkv": {"heads": 3}}}, r"params\.split"),
        ({"muon_rate": 1}, r"(?s)muon_rate.*split"),
    ):
        with pytest.raises(DsxConfigError, match=match):
            choose_optimizer("Muon", params)


class Attention(nn.Module):
    """Attention of two heads, behind an embedding."""

    def __init__(self):
        super().__init__()
        self.embed_tokens, self.num_heads = nn.Embedding(7, 8), 2
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.q_proj.weight.data *= 20.0

    def forward(self, x):
        x = self.embed_tokens(x)
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


def clipped(rank, world, stage, clip):
    torch.manual_seed(0)
    params = {"lr": 1e-4, "weight_decay": 0.0} | ({} if clip is None else {"qk_clip": clip})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = dsx.initialize(model=Attention(), config=config)
    for _ in range(2):
        engine.backward(engine(torch.arange(10).view(2, 5) % 7))
        engine.step()
    found = {n: (p.full_tensor() if stage == 3 else p).detach().clone() for n, p in engine.module.named_parameters()}
    engine.destroy()
    return found


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_logits_are_clipped_where_the_configuration_asks(world, stage):
    plain, mine = run_ranks(clipped, world, stage, None)[0], run_ranks(clipped, world, stage, {"threshold": 0.5})[0]
    ratio = mine["q_proj.weight"] / plain["q_proj.weight"]
    assert (ratio < 0.7).all()
    for head in ratio.split(4):  # one factor per head, which the keys have, too
        torch.testing.assert_close(head, head[0, 0].expand(4, 8))
    torch.testing.assert_close(mine["k_proj.weight"] / plain["k_proj.weight"], ratio)
    assert torch.equal(mine["v_proj.weight"], plain["v_proj.weight"])


def test_a_clip_that_is_asked_for_wrongly_is_refused():
    def built(params, model=None, kind="Muon"):
        config = {"train_batch_size": 2, "optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}
        return dsx.initialize(model=model or Attention(), config=config)[0]

    with pytest.raises(DsxConfigError, match=r"(?s)optimizer.params.qk_clip.*threshold, alpha, heads, layers"):
        built({"qk_clip": {"tau": 100}})
    with pytest.raises(DsxConfigError, match="qk_clip"):
        built({"qk_clip": {"threshold": 100}}, kind="AdamW")
    with pytest.raises(ValueError, match="found no attention"):
        built({"qk_clip": {}}, Net())
    with pytest.raises(ValueError, match="alpha: got 3"):
        built({"qk_clip": {"alpha": 3}})


def train_low_rank(rank, world, kind, stage, folder):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": kind, "params": {"lr": 0.02, "rank": 3, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = dsx.initialize(model=Net(), config=config)
    found = []
    for step in range(4):
        if step == 2 and folder is not None:
            engine.save_checkpoint(folder)
            engine.backward(engine(torch.zeros(2, 5, dtype=torch.long)))  # to be forgotten
            engine.step()
            engine.load_checkpoint(folder)
        x = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    groups = {g["use_muon"] for g in engine.optimizer.param_groups}
    engine.destroy()
    assert groups == {True, False}
    return found


@pytest.mark.parametrize("kind", ["Dion", "Apollo"])
def test_rules_of_low_rank_train_alike_at_all_stages_and_resume(tmp_path, kind):
    plain = run_ranks(train_low_rank, 2, kind, 0, None)
    assert plain[0][-1] < plain[0][0]
    got = run_ranks(train_low_rank, 2, kind.lower(), 3, str(tmp_path))
    assert got == [pytest.approx(of_rank, rel=1e-4) for of_rank in plain]


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [("Dion", {"ns_steps": 5}, "ns_steps"), ("Apollo", {"rank": 0}, "rank"),
     ("Apollo", {"scale_type": "row"}, "channel"), ("Dion", {"split": {"layers": {"columns": 2}}}, "split_columns")],
)  # fmt: skip
def test_settings_of_low_rank_are_checked(kind, params, words):
    config = {"train_batch_size": 2, "optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}
    with pytest.raises(ValueError, match=words):
        dsx.initialize(model=Net(), config=config)
