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

def make():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=1024, max_position_embeddings=64, tie_word_embeddings=False, use_cache=False))
"""
PROGRAM = """
import json, os, torch, dsx
from dsx_monitor.phases import PhaseMemory
engine, *_ = dsx.initialize(model=make(), config=CONFIG)
phases = PhaseMemory(engine.optimizer.state_bytes_by_tier)
rows = torch.randint(0, 512, (2, 32), device="cuda")
for _ in range(4):
    with phases("train"):
        engine.backward(engine(input_ids=rows, labels=rows).loss)
        engine.step()
with phases("sleep"):
    engine.offload_states()
generator = make().to(device="cuda", dtype=torch.bfloat16)
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


def config(stage):
    """The kernels of an Adam step are not compiled on the simulated device, and torch's clip into temporaries."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stage", "world"), [(1, 2), (3, 1), (3, 2)])
def test_phases_are_planned_as_the_device_counts_them(stage, world, tmp_path):
    pytest.importorskip("transformers")
    from dsx.planning import plan
    from dsx_plan.phases import Generator

    code = f"TOKENS, BUCKET, CONFIG = {TOKENS}, {BUCKET}, {config(stage)!r}\n{MODEL}\n{PROGRAM}"
    done = run_code(code, world=world)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    measured = json.loads(line.removeprefix("FOUND"))
    path = Path(tmp_path, "model.py")
    path.write_text(MODEL)
    found = plan(
        f"{path}:make", config(stage), world_size=world, machine="A100-80", sequence=32, changes=False,
        generator=Generator(tokens=TOKENS, bucket_bytes=BUCKET),
    )  # fmt: skip
    planned = {name: sum(parts.values()) for name, parts in found.phases.items()}
    assert list(planned) == ["train", "sleep", "generate", "push"]
    for name in ("train", "generate", "push"):
        assert planned[name] == pytest.approx(measured[name][0], rel=0.03), (name, planned, measured)
    assert planned["sleep"] == pytest.approx(measured["sleep"][1], abs=ROUNDING), (planned, measured)
