"""A BERT-like model learns to fill in masked bytes of Python sources, in bf16 where that is fast.

    dsx launch --num_procs 2 bert_masked.py --steps 200

Shows: a Hugging Face model with random weights, ZeRO stage 2, warm-up and decay, evaluation, a checkpoint.
"""

import argparse

import dsx
import torch
from gpt import load_text
from transformers import BertConfig, BertForMaskedLM

MASK, VOCABULARY = 256, 257  # bytes, and the mask


class Masked(torch.utils.data.Dataset):
    """Windows of a text. 15 % of the bytes are hidden; which ones depends on the number of the sample only."""

    def __init__(self, text: torch.Tensor, length: int, samples: int) -> None:
        self.text, self.length, self.samples = text, length, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        start = int(torch.randint(len(self.text) - self.length, (1,), generator=generator))
        labels = self.text[start : start + self.length].long()
        hidden = torch.rand(self.length, generator=generator) < 0.15
        return {"input_ids": labels.masked_fill(hidden, MASK), "labels": labels.masked_fill(~hidden, -100)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", default="runs/bert")
    options, _ = parser.parse_known_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": options.width, "intermediate_size": 4 * options.width, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, num_hidden_layers=options.layers, **sizes))
    training, held_out = load_text(None)
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": options.steps // 10 + 1, "total_num_steps": options.steps + 1},
        },
        "zero_optimization": {"stage": 2},
        "steps_per_print": 50,
    }
    data = Masked(training, 128, 16 * options.steps)
    engine, _, loader, _ = dsx.initialize(model=model, training_data=data, config=config)

    def evaluate() -> float:
        engine.eval()
        with torch.no_grad():
            batches = torch.utils.data.DataLoader(Masked(held_out, 128, 64), batch_size=16)
            loss = torch.stack([engine(**batch).loss for batch in batches]).mean().item()
        engine.train()
        return loss

    before = evaluate()
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(options.out)
    after = evaluate()
    if engine.global_rank == 0:
        print(f"masked bytes, held-out loss: {before:.3f} before, {after:.3f} after {engine.global_steps} steps")


if __name__ == "__main__":
    main()
