"""trl with peft: SFT with LoRA and saved modules, DPO with a reference engine, and GRPO, which generates by itself.

The same program runs with an engine and without one (`--stage -1`); the test compares what both report.
"""

from __future__ import annotations

import argparse
import os

import torch
from common import RANK, report, skip_one_update
from language_model import language_model, text, tokenizer
from trainer_curve import engine_settings

MICRO, STEPS = 2, 6


def in_order(cls):
    class InOrder(cls):
        losses: list[torch.Tensor] = []

        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self.losses.append((loss[0] if isinstance(loss, tuple) else loss).detach())
            return loss

    return InOrder


def grpo(prompts: list[str], common: dict):
    """A trainer that rewards completions with many even tokens, with two samples for each prompt.

    It loads the model and the reference from a folder itself, at stage 3 straight into shards.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def even(completions, **_):
        words = [[word for word in text.split() if word.startswith("w")] for text in completions]
        return [sum(int(word[1:]) % 2 == 0 for word in row) / 8 for row in words]

    class Trainer(in_order(GRPOTrainer)):
        _get_train_sampler = GRPOTrainer._get_train_sampler  # repeats each prompt, in an order of the seed

    config = GRPOConfig(num_generations=2, max_completion_length=8, beta=0.05, temperature=1.0, **common)
    folder = os.path.join(common["output_dir"], "model")
    language_model().save_pretrained(folder)  # the first rank writes
    torch.distributed.barrier()
    return Trainer(
        model=folder, reward_funcs=even, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, help="-1: without an engine")
    parser.add_argument("--folder")
    parser.add_argument("--dpo", action="store_true")
    parser.add_argument(
        "--grpo", action="store_true", help="samples completions, which takes stage 3's hooks off and on"
    )
    parser.add_argument("--gap", action="store_true", help="a control: one update is left out")
    parser.add_argument("--tuner", default="lora", choices=("lora", "adalora", "none"))
    args = parser.parse_args()
    on_device = {key: {"device": "none"} for key in ("offload_optimizer", "offload_param") if args.stage == 3}
    more = engine_settings(args.stage, **on_device)
    if args.gap:
        skip_one_update()
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    rows = STEPS * MICRO * 2
    prompts, good, bad = text(rows, 4, 1), text(rows, 6, 2), text(rows, 6, 3)
    common = dict(
        output_dir=args.folder, max_steps=STEPS, per_device_train_batch_size=MICRO, learning_rate=5e-3, report_to=[],
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", disable_tqdm=True, bf16=False,
        gradient_checkpointing=False, dataloader_drop_last=True, max_length=16, seed=0, **more,
    )  # fmt: skip
    peft_config = None
    if args.tuner == "lora":
        from peft import LoraConfig

        peft_config = LoraConfig(
            r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]
        )
    elif args.tuner == "adalora":
        from peft import AdaLoraConfig

        peft_config = AdaLoraConfig(
            init_r=4, target_r=2, tinit=1, tfinal=1, deltaT=1, total_step=STEPS, target_modules=["q_proj"]
        )
    net = language_model()
    torch.manual_seed(5)
    if args.grpo:
        trainer = grpo(prompts, {name: value for name, value in common.items() if name != "max_length"})
    elif args.dpo:
        dataset = Dataset.from_dict(
            {"prompt": prompts, "chosen": [f" {t}" for t in good], "rejected": [f" {t}" for t in bad]}
        )
        trainer = in_order(DPOTrainer)(
            model=net, ref_model=None if peft_config else language_model(), args=DPOConfig(beta=0.5, **common),
            train_dataset=dataset, processing_class=tokenizer(),
            peft_config=peft_config,
        )  # fmt: skip
    else:
        dataset = Dataset.from_dict({"text": [f"{p} {g}" for p, g in zip(prompts, good)]})
        trainer = in_order(SFTTrainer)(
            model=net, args=SFTConfig(**common), train_dataset=dataset, processing_class=tokenizer(),
            peft_config=peft_config,
        )  # fmt: skip
    trainer.train()
    if args.stage >= 0:
        import deepspeed
        import dsx

        assert isinstance(trainer.model_wrapped, deepspeed.DeepSpeedEngine) and isinstance(
            trainer.model_wrapped, dsx.Engine
        )
        assert trainer.model_wrapped.zero_optimization_stage() == args.stage
    mine = torch.stack(trainer.losses).double()
    both = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(both, mine)
    curve = (sum(both) / 2).tolist()
    trainer.save_model(os.path.join(args.folder, "saved"))
    if RANK == 0 and peft_config is not None:
        from safetensors.torch import load_file

        saved = load_file(os.path.join(args.folder, "saved", "adapter_model.safetensors"))
        assert saved and all(value.numel() for value in saved.values())
        report(curve=curve, saved={name: [list(v.shape), v.double().norm().item()] for name, v in saved.items()})
    else:
        report(curve=curve, saved={})


main()
