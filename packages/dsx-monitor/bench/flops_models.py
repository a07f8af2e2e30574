"""Multiply-accumulates of whole models: closed form, dsx, torch's FlopCounterMode, DeepSpeed's profiler.

    python packages/dsx-monitor/bench/flops_models.py [--hf] [--json FILE]

Small models of twelve kinds in plain PyTorch (tests/monitor_zoo.py); with --hf also architectures of `transformers`
with random weights. Nothing is timed. torch counts flops, two per multiply-accumulate; DeepSpeed assumes that backward
is twice forward, so only its forward can be compared. The goal is 0.1 % of the closed form.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from dsx_monitor import FlopsProfiler
from dsx_testkit.results import Table, add_json_option
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def by_dsx(model: nn.Module, args: tuple, kwargs: dict) -> tuple[int, int]:
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    output(model(*args, **kwargs)).sum().backward()
    profiler.stop_profile()
    if profiler.get_unknown_operators():
        print("unknown to dsx:", profiler.get_unknown_operators())
    return profiler.get_total_macs(), profiler.totals.backward_macs


def by_torch(model: nn.Module, args: tuple, kwargs: dict) -> tuple[int, int]:
    with FlopCounterMode(display=False) as counter:
        result = output(model(*args, **kwargs))
        forward = counter.get_total_flops() // 2
        result.sum().backward()
    return forward, counter.get_total_flops() // 2 - forward


def by_deepspeed(model: nn.Module, args: tuple, kwargs: dict) -> int | str:
    try:
        from deepspeed.profiling.flops_profiler import get_model_profile
    except ImportError:
        return "not installed"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            _, macs, _ = get_model_profile(
                model, args=list(args), kwargs=kwargs, print_profile=False, as_string=False, warm_up=0
            )
        return int(macs)
    except Exception as error:  # noqa: BLE001  a peer's failure is a figure too
        return type(error).__name__


def output(result: Any) -> torch.Tensor:
    for name in ("logits", "last_hidden_state"):
        if hasattr(result, name):
            return getattr(result, name)
    return result


def off(value: int | str, exact: int) -> float | str:
    return 100 * (value - exact) / exact if isinstance(value, int) else value


def row(table: Table, name: str, build: Any, forward: int, backward: int) -> None:
    torch.manual_seed(0)
    model, args, *rest = build()
    kwargs = rest[0] if rest else {}
    model.train()
    mine, mine_back = by_dsx(model, args, kwargs)
    torchs, torch_back = by_torch(model, args, kwargs)
    peer = by_deepspeed(build()[0], args, kwargs)
    ahead = (off(mine, forward), off(torchs, forward), off(peer, forward))
    back = (off(mine_back, backward), off(torch_back, backward), off(2 * forward, backward))
    table.add(name, forward, *ahead, backward, *back)


def transformers_rows(table: Table) -> None:
    import transformers as hf

    zoo = sys.modules["monitor_zoo"]
    b, t, d, h, f, v, layers = 2, 32, 64, 4, 128, 300, 2
    tokens = torch.randint(0, v, (b, t))
    project, dense, both = layers * zoo.attention(b, t, d, h), layers * 2 * b * t * d * f, layers * zoo.scores(b, t, d)
    head = b * t * d * v
    common = {"vocab_size": v, "attn_implementation": "sdpa"}

    gpt = {"n_embd": d, "n_head": h, "n_layer": layers, "n_inner": f, "n_positions": t, "attn_pdrop": 0.0}
    row(table, "GPT-2 (HF)",
        lambda: (hf.GPT2LMHeadModel(hf.GPT2Config(**gpt, **common)), (tokens,), {"use_cache": False}),
        project + dense + head + both, zoo.trained(project + dense + head, both))  # fmt: skip

    sizes = {"hidden_size": d, "num_attention_heads": h, "num_hidden_layers": layers, "intermediate_size": f}
    grouped = layers * zoo.attention(b, t, d, h, kv=2)
    llama = {**sizes, "num_key_value_heads": 2, "max_position_embeddings": t}
    products = grouped + dense * 3 // 2 + head
    rotary = (d // h // 2) * t  # the angles are a product of positions and frequencies
    row(table, "Llama (HF)",
        lambda: (hf.LlamaForCausalLM(hf.LlamaConfig(**llama, **common)), (tokens,), {"use_cache": False}),
        products + both + rotary, zoo.trained(products, both))  # fmt: skip

    bert = {**sizes, "max_position_embeddings": t, "attention_probs_dropout_prob": 0.0}
    products = project + dense + b * t * d * d + head  # the head transforms before it decides
    row(table, "BERT (HF)", lambda: (hf.BertForMaskedLM(hf.BertConfig(**bert, **common)), (tokens,)),
        products + both, zoo.trained(products, both))  # fmt: skip

    vit = {**sizes, "image_size": 32, "patch_size": 8, "num_labels": 10, "attn_implementation": "sdpa"}
    n = 17  # 16 patches and the class token
    patches = b * 16 * 3 * 64 * d
    products = layers * (zoo.attention(b, n, d, h) + b * n * 2 * d * f) + b * d * 10 + patches
    scores = layers * zoo.scores(b, n, d)
    image = torch.randn(b, 3, 32, 32)
    row(table, "ViT (HF)", lambda: (hf.ViTForImageClassification(hf.ViTConfig(**vit)), (image,)),
        products + scores, zoo.trained(products, scores, from_data=patches))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", action="store_true", help="also architectures of transformers")
    add_json_option(parser)
    options = parser.parse_args()
    zoo = load("monitor_zoo", Path(__file__).parent.parent / "tests" / "monitor_zoo.py")
    print("multiply-accumulates; dsx, torch and DeepSpeed as difference from the closed form\n")
    apart = "{:+.2f} %"
    table = Table({"model": "", "forward": "{:,}", "dsx": apart, "torch": apart, "DeepSpeed": apart, "backward": "{:,}",
                   "dsx, backward": apart, "torch, backward": apart, "2 x forward": apart})  # fmt: skip
    for case in zoo.CASES:
        row(table, case.name, case.build, case.forward, case.backward)
    if options.hf:
        transformers_rows(table)
    worst = max(abs(float(found[column] or 0)) for found in table.rows for column in ("dsx", "dsx, backward"))
    table.goal("dsx at most 0.1 % from the closed form", f"{worst:.2f} %", met=worst <= 0.1)
    table.save(options.json)


if __name__ == "__main__":
    main()
