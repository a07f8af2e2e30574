"""Block-sparse attention for PyTorch that is fast, exact and trainable, on CPU and CUDA.

    from dsx_sparse_attn import BigBirdSparsityConfig, block_sparse_attention
    layout = BigBirdSparsityConfig(num_heads=8, block=64).make_layout(4096)
    out = block_sparse_attention(q, k, v, layout)          # q, k, v: [batch, heads, 4096, dim]

`python -m dsx_sparse_attn` reports which implementations are built and run on this machine;
`python -m dsx_sparse_attn show bigbird` draws a layout.
"""

from ._version import __version__
from .attention import block_sparse_attention, explain_backends
from .blocks import MatMul, Softmax
from .dispatch import backend_status
from .errors import SparseAttentionError
from .layout import Layout
from .modules.apply import apply_sparse_attention
from .modules.bert import BertSparseSelfAttention
from .modules.self_attention import SparseSelfAttention
from .modules.utils import SparseAttentionUtils
from .native import native_status, reference_only
from .patterns import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "Layout",
    "LocalSlidingWindowSparsityConfig",
    "MatMul",
    "Softmax",
    "SparseAttentionError",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "__version__",
    "apply_sparse_attention",
    "backend_status",
    "block_sparse_attention",
    "explain_backends",
    "native_status",
    "reference_only",
]
