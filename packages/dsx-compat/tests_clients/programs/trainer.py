"""transformers' Trainer with a configuration full of "auto": training, resume, zero3 from_pretrained, generate."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import deepspeed
import dsx
import torch
from common import RANK, close, forget_checkpoints, report
from language_model import VOCABULARY, language_model, plain_curve, samples

os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
from accelerate import PartialState
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

STEPS, MICRO, RATE = 8, 2, 5e-3


class InOrder(Trainer):
    """Takes the data in its order, and keeps the loss of each micro-batch."""

    losses: list[float]

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append((loss[0] if isinstance(loss, tuple) else loss).detach())
        return loss


def resize(net) -> None:
    """A larger vocabulary, whose new rows are zeros; they are random otherwise."""
    net.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    for weight in (net.get_input_embeddings().weight, net.get_output_embeddings().weight):
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
            if RANK == 0:
                weight.data[VOCABULARY:] = 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int)
    parser.add_argument("--config")
    parser.add_argument("--folder")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--forget", action="store_true", help="a control: the engine loads nothing")
    parser.add_argument("--resized", action="store_true", help="from_pretrained, and a larger vocabulary")
    args = parser.parse_args()
    if args.forget:
        forget_checkpoints()
    PartialState(backend="gloo")
    config = json.loads(Path(args.config).read_text())
    config["zero_optimization"]["stage"] = args.stage
    own = not args.resized and args.stage == 2  # the Trainer's own optimizer and scheduler, or the configuration's
    if own:
        del config["optimizer"], config["scheduler"]
    plain = language_model()  # before Hugging Face knows of stage 3
    if args.resized:
        resize(plain)
    settings = TrainingArguments(
        output_dir=args.folder, max_steps=STEPS, per_device_train_batch_size=MICRO, learning_rate=RATE,
        gradient_accumulation_steps=args.accumulation, warmup_steps=2, weight_decay=0.0, max_grad_norm=1.0,
        logging_steps=1, save_steps=4, report_to=[], deepspeed=config, disable_tqdm=True, use_cpu=False,
        accelerator_config={"use_configured_state": True}, lr_scheduler_type="linear", dataloader_drop_last=True,
    )  # fmt: skip
    if args.resized:
        pretrained = os.path.join(args.folder, "pretrained")
        if RANK == 0:
            language_model().save_pretrained(pretrained)
        torch.distributed.barrier()
        net = AutoModelForCausalLM.from_pretrained(pretrained)
        resize(net)
    else:
        net = language_model()
    batch = MICRO * 2 * args.accumulation
    trainer = InOrder(model=net, args=settings, train_dataset=samples(STEPS * batch))
    trainer.losses = []
    trainer.train(resume_from_checkpoint=os.path.join(args.folder, "checkpoint-4") if args.resume else None)
    assert isinstance(trainer.model_wrapped, deepspeed.DeepSpeedEngine) and isinstance(
        trainer.model_wrapped, dsx.Engine
    )
    assert trainer.model_wrapped.zero_optimization_stage() == args.stage
    mine = torch.stack(trainer.losses).view(-1, args.accumulation).mean(1)
    both = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(both, mine)
    curve = (sum(both) / 2).tolist()
    if own:
        rate = lambda step: RATE * (min(1.0, step / 2) if step < 2 else (STEPS - step) / (STEPS - 2))  # noqa: E731
    else:
        import math

        def rate(step):
            at = step - 1
            if at < 2:
                return RATE * (0.0 if at < 1 else math.log(at + 1) / math.log(2))
            return RATE * max(0.0, (STEPS - at) / (STEPS - 2))

    expected = plain_curve(plain, STEPS, batch, lr=rate)
    close(curve, expected[4:] if args.resume else expected, "resumed" if args.resume else "whole run")
    if args.stage == 3 and not args.resume:
        prompt = samples(1)[0]["input_ids"][None, :4]
        made = trainer.model_wrapped.module.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True)
        assert made.shape[1] > 4
    report(curve=curve)


main()
