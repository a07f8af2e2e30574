"""A model that Transformers has cut by its own tensor-parallel plan (`tp_plan`, `DistributedConfig`) trains sharded as
the whole model does in one process.
"""

from __future__ import annotations

import os

import pytest
import torch
from dsx_testkit import run_ranks

pytest.importorskip("transformers", reason="Transformers is not installed")
pytest.importorskip("accelerate", reason="Accelerate is not installed, which Transformers asks for beside a plan")

STEPS = 3


def data():
    return torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def losses_of(model, optimizer):
    found = []
    for _ in range(STEPS):
        loss = model(input_ids=data(), labels=data()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def cut_by_plan(rank, world, folder, expected, weight):
    import dsx_zero
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM

    os.environ["LOCAL_RANK"] = str(rank)
    for stage in (1, 3):
        model = AutoModelForCausalLM.from_pretrained(folder, **loading())
        with pytest.raises(dsx_zero.ZeroModelError, match="hold different parts"):
            dsx_zero.shard(model, sgd, stage=stage)
        mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
        config = {"stage": stage, "stage3_param_persistence_threshold": 0}
        model, optimizer = dsx_zero.shard(model, sgd, config=config, mesh=mesh["dp"])
        assert losses_of(model, optimizer) == pytest.approx(expected, rel=1e-5)
        whole = dsx_zero.full_state_dict(optimizer, rank0_only=False)["model"]
        torch.testing.assert_close(whole["model.layers.0.self_attn.q_proj.weight"], weight, rtol=1e-4, atol=1e-6)


def loading():
    """`tp_plan="auto"` in the form that Transformers has not deprecated."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def test_a_model_of_a_tp_plan_trains_as_in_one_process(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(tmp_path)
    expected = losses_of(model, sgd(model.parameters()))
    weight = model.model.layers[0].self_attn.q_proj.weight.detach()
    run_ranks(cut_by_plan, 2, str(tmp_path), expected, weight)
