"""LLaMA-Factory's own training (`run_exp`): its arguments, data set, template, model loader, adapters and trainers.

The same program runs with an engine and without one (`--stage -1`); the test compares what both report. The package
imports torchaudio, whose wheel is a CUDA build: an empty module stands in for it, because no test reads audio.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch
from common import RANK, skip_one_update
from language_model import language_model, text, tokenizer
from trainer_curve import engine_settings, record_losses, report_run

MICRO, STEPS = 2, 6


def without_audio() -> None:
    """Let the package be imported without torchaudio."""
    module = sys.modules["torchaudio"] = ModuleType("torchaudio")
    module.__spec__ = ModuleSpec("torchaudio", None)


def inputs(folder: Path) -> None:
    """Write the model with its tokenizer, and the data sets with LLaMA-Factory's index of them."""
    language_model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    rows = STEPS * MICRO * 2
    columns = zip(text(rows, 4, 1), text(rows, 6, 2), text(rows, 6, 3))
    asked = [{"instruction": prompt, "output": good, "chosen": good, "rejected": bad} for prompt, good, bad in columns]
    (folder / "rows.json").write_text(json.dumps(asked))
    index = {
        "sft": {"file_name": "rows.json", "columns": {"prompt": "instruction", "response": "output"}},
        "dpo": {"file_name": "rows.json", "ranking": True,
                "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}},
    }  # fmt: skip
    (folder / "dataset_info.json").write_text(json.dumps(index))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, help="-1: without an engine")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--kind", default="sft", choices=("sft", "dpo"))
    parser.add_argument("--tuner", default="lora", choices=("lora", "full"))
    parser.add_argument("--gap", action="store_true", help="a control: one update is left out")
    args = parser.parse_args()
    without_audio()
    folder = args.folder.parent / "inputs"
    if RANK == 0:
        inputs(folder)
    more = engine_settings(args.stage)
    if args.stage < 0:
        torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    if args.gap:
        skip_one_update()
    losses = record_losses()
    from llamafactory.train.tuner import run_exp

    run_exp({
        "model_name_or_path": str(folder / "model"), "dataset_dir": str(folder), "dataset": args.kind,
        "template": "empty", "stage": args.kind, "finetuning_type": args.tuner, "do_train": True,
        "output_dir": str(args.folder), "max_steps": STEPS, "per_device_train_batch_size": MICRO,
        "learning_rate": 5e-3, "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_shuffling": True, "cutoff_len": 32, "overwrite_cache": True, "bf16": False,
        "disable_gradient_checkpointing": True, "lora_rank": 4, "lora_target": "q_proj,v_proj", "seed": 0, **more,
    })  # fmt: skip
    name = "adapter_model.safetensors" if args.tuner == "lora" else "model.safetensors"
    report_run(losses, args.folder / name)


main()
