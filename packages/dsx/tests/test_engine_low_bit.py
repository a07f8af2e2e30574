"""`optimizer.type` Adam4bit and Adam8bit, and moments in bf16 with stochastic rounding: what the configuration takes
and refuses, training at every stage, and a checkpoint at another stage and number of ranks.
"""

import dsx
import dsx_ops
import pytest
import torch
from dsx.errors import DsxConfigError
from dsx.optimizers import choose_optimizer
from dsx_testkit import run_ranks
from torch import nn

ROUNDED = {"state_dtype": "bf16", "stochastic_rounding": True}
SECTIONS = {
    "Adam4bit": {"type": "Adam4bit", "params": {"lr": 1e-2, "weight_decay": 0.01, "seed": 5}},
    "Adam8bit": {"type": "AdamW8bit", "params": {"lr": 1e-2}},
    "bf16": {"type": "AdamW", "params": {"lr": 1e-2, **ROUNDED}},
}


def built(name, **params):
    return choose_optimizer(name, {"lr": 1e-3, **params}).build([nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize("name", ["Adam4bit", "AdamW4bit", "adam8bit", "AdamW8bit"])
def test_names(name):
    optimizer = built(name, weight_decay=0.1, betas=[0.8, 0.9], seed=7)
    assert type(optimizer) is (dsx_ops.Adam4bit if "4" in name else dsx_ops.Adam8bit)
    (group,) = optimizer.param_groups
    assert group["adam_w_mode"] and group["betas"] == (0.8, 0.9) and optimizer.seed == 7
    if "W" not in name:
        assert not built(name, adam_w_mode=False).param_groups[0]["adam_w_mode"]


def test_states_in_bf16():
    p = nn.Parameter(torch.zeros(999))
    p.grad = torch.ones(999)
    optimizer = choose_optimizer("AdamW", {**ROUNDED, "seed": 2}).build([p])
    optimizer.step()
    kept = optimizer.state[p]["exp_avg_sq"]
    assert kept.dtype == torch.bfloat16 and optimizer.seed == 2
    assert len(kept.unique()) == 2  # to nearest it would be one
    low = choose_optimizer("Adam", {"stochastic_rounding": True}, masters="bf16", states="bf16")
    assert low.build([nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]).row_major


@pytest.mark.parametrize("params,options,wanted", [
    ({"stochastic_rounding": True}, {}, "only moments in bf16.*state_dtype"),
    ({"seed": 3}, {}, "seed of stochastic rounding"),
    ({**ROUNDED, "torch_adam": True}, {}, "torch_adam is set"),
    ({**ROUNDED, "amsgrad": True}, {}, "amsgrad is set"),
    ({**ROUNDED, "fp32_optimizer_states": True}, {}, "leave one of them out"),
    ({"state_dtype": "bf16"}, {"masters": "bf16"}, "bf16_optimizer_states"),
])  # fmt: skip
def test_contradictions_are_named(params, options, wanted):
    with pytest.raises(DsxConfigError, match=f"(?s){wanted}"):
        choose_optimizer("AdamW", params, **options)


def test_wide_states_and_unknown_arguments_are_named():
    with pytest.raises(DsxConfigError, match="has no fp32 states"):
        choose_optimizer("Adam4bit", {}, masters="bf16")
    with pytest.raises(DsxConfigError, match="amsgrad"):
        choose_optimizer("Adam4bit", {"amsgrad": True})


def engine_of(name, stage, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(13, 31), nn.Tanh(), nn.Linear(31, 9))
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": SECTIONS[name], "gradient_clipping": 100.0,
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **options}  # fmt: skip
    return dsx.initialize(model=net, config=config)[0]


def train(engine, steps):
    losses = []
    for step in steps:
        x = torch.randint(-8, 9, (4, 13), generator=torch.Generator().manual_seed(step)).float() / 8
        loss = (engine(x) - x[:, :9]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save(rank, world, folder, name, stage):
    engine = engine_of(name, stage)
    found = train(engine, range(3))
    engine.save_checkpoint(folder)
    found += train(engine, range(3, 6))
    engine.destroy()
    return found


def go_on(rank, world, folder, name, stage):
    engine = engine_of(name, stage)
    engine.load_checkpoint(folder)
    found = train(engine, range(3, 6))
    engine.destroy()
    return found


@pytest.mark.parametrize("name", SECTIONS)
def test_stages_and_ranks_have_the_same_losses_and_checkpoints(name, tmp_path):
    expected = run_ranks(save, 1, str(tmp_path / "one"), name, 0)[0]
    assert expected[-1] < expected[0]
    assert run_ranks(save, 2, str(tmp_path / "two"), name, 3) == [expected] * 2
    assert run_ranks(go_on, 4, str(tmp_path / "two"), name, 2) == [expected[3:]] * 4
    assert run_ranks(go_on, 2, str(tmp_path / "one"), name, 1) == [expected[3:]] * 2
