"""The planned memory of each phase beside what the simulated device's allocator counts in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from device_runs import run_code

pytestmark = pytest.mark.simcuda

# Tensors of 4 MiB fill the allocator's segments of 20 MiB; with other sizes it counts what is left of a segment, too.
TOKENS, BUCKET, ROUNDING = 16_384, 1 << 20, 64 << 10
MODEL = """
import transformers
from torch import nn

def base(width=256):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=512, hidden_size=width, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=4 * width, max_position_embeddings=64, tie_word_embeddings=False, use_cache=False))

class Adapted(nn.Module):
    def __init__(self, layer, rank=16):
        super().__init__()
        self.base_layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))

def adapted():
    model = base(512).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return model
"""
PROGRAM = """
import json, os, torch, dsx
from dsx_monitor.phases import PhaseMemory
engine, *_ = dsx.initialize(model=MAKE(), config=CONFIG)
phases = PhaseMemory(engine.optimizer.state_bytes_by_tier)
rows = torch.randint(0, 512, (2, 32), device="cuda")
for _ in range(4):
    with phases("train"):
        engine.backward(engine(input_ids=rows, labels=rows).loss)
        engine.step()
with phases("sleep"):
    engine.offload_states()
generator = base(512 if MAKE is adapted else 256).to(device="cuda", dtype=torch.bfloat16)
with phases("push"):
    for bucket in engine.weights.buckets(bucket_bytes=BUCKET):
        generator.load_state_dict(bucket, strict=False)
del bucket
with phases("generate"):
    with torch.no_grad():
        cache = generator(input_ids=rows[:1], use_cache=True).past_key_values
        kept = [x[:, :, :1].repeat(1, 1, TOKENS, 1) for layer in cache.layers for x in (layer.keys, layer.values)]
if os.environ.get("RANK", "0") == "0":
    print("FOUND", json.dumps({one.name: [one.peak, one.after] for one in phases.phases}))
engine.destroy()
"""


ON_HOST = {"offload_optimizer": {"device": "cpu"}}
CASES = {  # stage, ranks, the largest norm of the gradients, settings of zero_optimization, the model
    "stage1": (1, 2, 0.0, {}, "base"),
    "stage2-clipped": (2, 2, 1.0, {}, "base"),
    "stage3": (3, 1, 0.0, {}, "base"),
    "stage3-clipped": (3, 2, 1.0, {}, "base"),
    "stage3-offload": (3, 1, 1.0, ON_HOST, "base"),
    "stage3-lora": (3, 1, 1.0, {}, "adapted"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_phases_are_planned_as_the_device_counts_them(case, tmp_path):
    """The kernels of an Adam step are not compiled on the simulated device: torch's fused one is planned, too."""
    pytest.importorskip("transformers")
    from dsx.planning import plan
    from dsx_plan.phases import Generator

    stage, world, clip, settings, make = CASES[case]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **settings},
    }
    code = f"{MODEL}\nMAKE, TOKENS, BUCKET, CONFIG = {make}, {TOKENS}, {BUCKET}, {config!r}\n{PROGRAM}"
    done = run_code(code, world=world)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    measured = json.loads(line.removeprefix("FOUND"))
    path = Path(tmp_path, "model.py")
    path.write_text(MODEL)
    found = plan(
        f"{path}:{make}", config, world_size=world, machine="A100-80", sequence=32, changes=False, kernels="torch",
        generator=Generator(tokens=TOKENS, bucket_bytes=BUCKET),
    )  # fmt: skip
    planned = {name: sum(parts.values()) for name, parts in found.phases.items()}
    assert list(planned) == ["train", "sleep", "generate", "push"]
    for name in ("train", "generate", "push"):
        assert planned[name] == pytest.approx(measured[name][0], rel=0.03), (name, planned, measured)
    assert planned["sleep"] == pytest.approx(measured["sleep"][1], abs=ROUNDING), (planned, measured)
