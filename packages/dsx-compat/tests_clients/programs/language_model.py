"""A causal language model of Hugging Face with random weights, its data, and the plain PyTorch curve."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 64, 12


def configuration() -> LlamaConfig:
    """Two small layers, untied embeddings of a size that takes part in gathering."""
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def language_model() -> LlamaForCausalLM:
    """The same weights everywhere."""
    torch.manual_seed(0)
    return LlamaForCausalLM(configuration())


def tokenizer():
    """Words `w3`, `w4`, ... for the ids of the vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(3, VOCABULARY)}
    made = Tokenizer(models.WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2, **words}, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<eos>"
    )


def text(count: int, length: int, seed: int) -> list[str]:
    """Rows of random words."""
    made = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, VOCABULARY, (count, length), generator=made).tolist()
    return [" ".join(f"w{number}" for number in row) for row in rows]


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Rows of ids without padding."""
    made = torch.Generator().manual_seed(1)
    rows = torch.randint(3, VOCABULARY, (count, LENGTH), generator=made)
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]


def plain_curve(net, steps: int, batch: int, *, lr, clip: float = 1.0, decay: float = 0.0) -> list[float]:
    """Mean loss of each update in one process."""
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1.0, weight_decay=decay)
    rows, curve = samples(steps * batch), []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr(step)
        ids = torch.stack([row["input_ids"] for row in rows[step * batch : (step + 1) * batch]])
        loss = net(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], clip)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve
