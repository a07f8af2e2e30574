"""The names of torch that dsx-zero uses and that torch does not promise to keep. All of them stand here.

Checked with torch 2.13.0. A release of torch that renames one of them fails at the import of this file, which says
which.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim._muon import _adjust_lr as adjust_lr_of_muon
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz_of_muon
from torch.optim.optimizer import _global_optimizer_post_hooks as global_optimizer_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "DisableTorchFunctionSubclass",
    "adjust_lr_of_muon",
    "amp_foreach_non_finite_check_and_unscale_",
    "current_graph_task_id",
    "foreach_copy_",
    "foreach_mul_",
    "global_optimizer_post_hooks",
    "global_optimizer_pre_hooks",
    "has_compatible_shallow_copy_type",
    "make_wrapper_subclass",
    "newton_schulz_of_muon",
    "parse_to",
    "preserve_version_counters",
    "queue_callback",
    "tree_leaves",
    "tree_map_only",
    "will_engine_execute_node",
]

_torch: Any = torch  # torch's types do not have these names

DisableTorchFunctionSubclass = _torch._C.DisableTorchFunctionSubclass
"""A context in which subclasses of tensors are plain tensors for torch's functions."""
current_graph_task_id = _torch._C._current_graph_task_id
"""The number of the backward that this thread runs; -1 outside of backwards."""
will_engine_execute_node = _torch._C._will_engine_execute_node
"""Whether the running backward comes to a node of the graph."""
queue_callback = torch.autograd.Variable._execution_engine.queue_callback
"""Call a function when the outermost backward that runs now has ended."""
make_wrapper_subclass = _torch.Tensor._make_wrapper_subclass
"""Makes a tensor subclass without memory, with a shape, dtype and device."""
parse_to = _torch._C._nn._parse_to
"""The device and dtype that the arguments of `Tensor.to` mean."""
preserve_version_counters = _torch.autograd._unsafe_preserve_version_counter
"""A context after which tensors have the version counters that they had before."""
foreach_copy_ = _torch._foreach_copy_
"""Copies several tensors into others, in few kernels."""
foreach_mul_ = _torch._foreach_mul_
"""Multiplies several tensors in place, in few kernels."""
amp_foreach_non_finite_check_and_unscale_ = _torch._amp_foreach_non_finite_check_and_unscale_
"""By it `torch.amp.GradScaler` unscales gradients."""
has_compatible_shallow_copy_type = _torch._has_compatible_shallow_copy_type
"""`nn.Module.to` asks it whether a parameter may stay the same object."""
