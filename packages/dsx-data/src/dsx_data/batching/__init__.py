"""Batches by number of tokens (`plan`), learning rates for batches of unequal size (`rates`), packed rows
(`packing`).
"""

from .packing import PackingCollator, block_diagonal_mask, pack_lengths
from .plan import BatchPlan, TokenBudget
from .rates import lr_factor

__all__ = ["BatchPlan", "PackingCollator", "TokenBudget", "block_diagonal_mask", "lr_factor", "pack_lengths"]
