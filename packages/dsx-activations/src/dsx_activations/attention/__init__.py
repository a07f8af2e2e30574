"""Attention over a sequence that is cut over the ranks of a group: every rank has the queries, keys and values of its
own tokens, and gets the attention of these tokens over the whole sequence, with exact gradients.

    x = shard_sequence(tokens, group, dim=1)                       # this rank's tokens
    out = UlyssesAttention(group=group)(q, k, v, is_causal=True)   # heads are dealt out instead of tokens
    out = ring_attention(q, k, v, group, causal=True)              # keys and values go around
    out = sequence_attention(q, k, v, group, causal=True, window=4096, documents=packed)   # both, with masks

`cutting` says which rank has which tokens, `ulysses` and `ring` are the two ways, `combined` both at once, `visible`
masks and dropout, `pieces` the arithmetic, `swapping` the all-to-alls, `facts` what a call is about and the checks of
its arguments. `models` converts whole models (`handle`, `hugging_face`, `own_models`), `loader` cuts batches,
`loss` has the exact mean over all ranks' tokens. Nothing here needs an engine or a sharded model.
"""

from .combined import gather_documents, sequence_attention
from .cutting import sequence_segments, shard_sequence
from .handle import SequenceParallel
from .layers import run_in_host_chunks
from .loader import SequenceLoader
from .loss import token_mean
from .models import sequence_parallel
from .ring import ring_attention
from .ulysses import UlyssesAttention

__all__ = [
    "SequenceLoader",
    "SequenceParallel",
    "UlyssesAttention",
    "gather_documents",
    "ring_attention",
    "run_in_host_chunks",
    "sequence_attention",
    "sequence_parallel",
    "sequence_segments",
    "shard_sequence",
    "token_mean",
]
