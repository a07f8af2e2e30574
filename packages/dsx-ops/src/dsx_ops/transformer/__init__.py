"""A transformer encoder layer from the fused functions, with the options of DeepSpeed's; import it from `dsx_ops`.

| file | what |
|---|---|
| `config` | `TransformerConfig`: sizes, dropout, options |
| `keyed` | dropout whose seed is a tensor, so that compiled graphs draw a new one in every step |
| `attention` | softmax(QK^T)V with dropout that is replayed, or torch's fused attention |
| `feedforward` | GELU and the linear map after it, without keeping the GELU's result |
| `layer` | `TransformerLayer` |
| `bert` | weights from and to a Hugging Face `BertLayer` |
"""
