"""The experts that one rank holds: copies of a module, or packed weights that one grouped GEMM multiplies.

* `Experts`: one child module per expert. Children are numbered from 0 on every rank, because code that divides a model
  among ranks needs equal names on all of them. Its state dict has global numbers: those of the experts of all ranks. So
  the state dicts of all ranks together are that of a model on one rank, and load with any expert-parallel size.
* `PackedExperts`: feed-forward experts as three-dimensional tensors [experts, out, in], the layout of Hugging Face's
  models. A rank holds a slice along the first dimension; a tensor-parallel group may slice the inner size too.

Both compute *segments*: rows sorted by expert with a count for each. A segment without rows is computed as well, on
zero rows, so that every parameter gets a zero gradient.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import dsx_comm
import torch
import torch.nn.functional as F
from torch import nn

from .errors import ExpertStateError, MoEConfigError
from .marks import mark_expert_parameters
from .segments import repeat_per_segment, segment_matmul
from .slices import ExpertSlices
from .tensor_parallel import copy_to_group, sum_over_group

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class ExpertShard(nn.Module):
    """Base of modules that hold the experts first ... first + count - 1 of `num_experts`.

    Copies of the module set the attributes of expert parameters again (`marks`).

    Attributes:
        slices: how the weights are cut over tensor-parallel ranks.
    """

    def __init__(self, num_experts: int, first: int, count: int, group_name: str) -> None:
        super().__init__()
        self.num_experts, self.first, self.count, self.group_name = num_experts, first, count, group_name
        self.slices = ExpertSlices()

    def mark(self) -> None:
        """Mark the parameters as expert parameters, and the cut ones as slices."""
        mark_expert_parameters(self, self.group_name)
        self.slices.mark(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark()  # copying a parameter drops its attributes

    def extra_repr(self) -> str:
        return f"experts {self.first} to {self.first + self.count - 1} of {self.num_experts}"


class Experts(ExpertShard):
    """Modules of any kind that map [n, h] to [n, h] row by row, n = 0 included.

    Args:
        expert: a module of which every expert is a copy; or a function that builds the expert of a global number. The
            function is called for all experts on every rank, so that the random numbers it draws do not depend on the
            number of ranks.
        num_experts: number of experts of all ranks together.
        first, count: this rank holds the experts first ... first + count - 1; default: all.
        group_name: name of the expert-parallel groups, with which the parameters are marked.

    Raises:
        MoEConfigError: the function does not return a module.
    """

    def __init__(
        self,
        expert: nn.Module | Callable[[int], nn.Module],
        num_experts: int,
        *,
        first: int = 0,
        count: int | None = None,
        group_name: str = "ep_size_1",
    ) -> None:
        super().__init__(num_experts, first, num_experts if count is None else count, group_name)
        for number in range(num_experts):
            if isinstance(expert, nn.Module):
                made = copy.deepcopy(expert) if self._is_local(number) else None
            else:
                made = expert(number)
                if not isinstance(made, nn.Module):
                    raise MoEConfigError(f"expert: the function returned {type(made).__name__}, expected a module")
            if made is not None and self._is_local(number):
                self.add_module(str(number - self.first), made)
        self.register_state_dict_post_hook(_use_global_numbers)
        self.mark()

    def _is_local(self, number: int) -> bool:
        return self.first <= number < self.first + self.count

    def __getitem__(self, number: int) -> nn.Module:
        """The expert of a global number.

        Raises:
            IndexError: another rank holds it.
        """
        if not self._is_local(number):
            raise IndexError(f"expert {number} is on another rank; this one holds {self.extra_repr()}")
        return self._modules[str(number - self.first)]  # type: ignore[return-value]

    def forward(self, rows: torch.Tensor, counts: Sequence[int], first: int = 0) -> torch.Tensor:
        """See `dsx_moe.dispatch.LocalExperts`."""
        done = []
        for i, segment in enumerate(rows.split(list(counts))):
            out = self[self.first + first + i](segment)
            out = out[0] if isinstance(out, tuple) else out  # Megatron's layers return (output, bias)
            if not isinstance(out, torch.Tensor) or out.shape != segment.shape:
                got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
                raise MoEConfigError(
                    f"expert {self.first + first + i} returned {got}, expected the shape {tuple(segment.shape)}"
                )
            done.append(out)
        return done[0] if len(done) == 1 else torch.cat(done)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load this rank's experts from a state dict of all experts; those of other ranks are skipped."""
        for key, value in [(key, state_dict[key]) for key in state_dict if key.startswith(prefix)]:
            number, _, rest = key[len(prefix) :].partition(".")
            if number.isdigit() and int(number) < self.num_experts:
                del state_dict[key]
                if self._is_local(int(number)):
                    # under a temporary name, because local and global numbers overlap
                    state_dict[f"{prefix}local.{int(number) - self.first}.{rest}"] = value
        for key in [key for key in state_dict if key.startswith(f"{prefix}local.")]:
            state_dict[prefix + key[len(prefix) + len("local.") :]] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _use_global_numbers(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    """Rename the entries of `Experts` from local to global numbers.

    They get a temporary name first, because local and global numbers overlap.
    """
    if not isinstance(module, Experts) or not module.first:
        return
    for key in [key for key in state_dict if key.startswith(prefix)]:
        number, _, rest = key[len(prefix) :].partition(".")
        state_dict[f"{prefix}local.{number}.{rest}"] = state_dict.pop(key)
    for key in [key for key in state_dict if key.startswith(f"{prefix}local.")]:
        number, _, rest = key[len(prefix) + len("local.") :].partition(".")
        state_dict[f"{prefix}{int(number) + module.first}.{rest}"] = state_dict.pop(key)


class PackedExperts(ExpertShard):
    """Feed-forward experts in packed weights: down(act(up(x))), or down(act(gate(x)) * up(x)) if gated.

    The user makes it with all experts; `MoE` keeps the experts of its rank (`shard`).

    Args:
        num_experts: number of all experts, E.
        hidden_size: h, the size of input and output rows.
        ffn_size: the inner size, ffn.
        activation: "gelu", "gelu_tanh", "relu" or "silu".
        gated: whether the experts have a gate; with "silu" this is SwiGLU.
        bias: whether the experts have biases.
        tensor_group: process group whose ranks hold slices of the inner size. Each rank initialises its slice with the
            random numbers that it draws.
        device, dtype: device and dtype of the weights.

    Attributes:
        up_proj: [E, ffn, h], or with a gate `gate_up_proj`: [E, 2 * ffn, h], the gate first.
        down_proj: [E, h, ffn].
        up_bias, down_bias: [E, ffn] (gated: [E, 2 * ffn]) and [E, h], or None.

    Raises:
        MoEConfigError: the activation is unknown, or the group does not divide the inner size.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        tensor_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, 0, num_experts, "ep_size_1")
        if activation not in ACTIVATIONS:
            raise MoEConfigError(f"activation: got {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
        slices = 1 if tensor_group is None else dsx_comm.get_world_size(tensor_group)
        if ffn_size % slices:
            raise MoEConfigError(f"ffn_size: got {ffn_size}, expected a multiple of {slices} (tensor-parallel ranks)")
        self.hidden_size, self.ffn_size, self.activation, self.gated = hidden_size, ffn_size, activation, gated
        parts = 2 if gated else 1
        cuts = {"gate_up_proj" if gated else "up_proj": (1, parts), "up_bias": (1, parts), "down_proj": (2, 1)}
        self.slices = ExpertSlices(tensor_group, cuts)
        inner = ffn_size // slices
        made = {"device": device, "dtype": dtype}
        up = nn.Parameter(torch.empty(num_experts, inner * (2 if gated else 1), hidden_size, **made))
        self.register_parameter("gate_up_proj" if gated else "up_proj", up)
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, inner, **made))
        self.up_bias = nn.Parameter(torch.empty(num_experts, up.shape[1], **made)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size, **made)) if bias else None
        self.reset_parameters()
        self.mark()

    @property
    def tensor_group(self) -> Any:
        """The group over which the inner size is sliced, or None."""
        return self.slices.group

    @property
    def up(self) -> nn.Parameter:
        """The first weight: `gate_up_proj` if gated, else `up_proj`."""
        return self.get_parameter("gate_up_proj" if self.gated else "up_proj")

    def reset_parameters(self) -> None:
        """Initialise every expert as `nn.Linear` does: uniform within +- 1 / sqrt(number of inputs)."""
        with torch.no_grad():
            for weight, bias in ((self.up, self.up_bias), (self.down_proj, self.down_bias)):
                fan_in = weight.shape[2] * (self.slices.size if weight is self.down_proj else 1)
                weight.uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
                if bias is not None:
                    bias.uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def shard(self, first: int, count: int, group_name: str) -> PackedExperts:
        """Keep only the experts first ... first + count - 1 of those held now. Returns this module."""
        keep_expert_slices(self, self.count, first, count)
        self.first, self.count, self.group_name = self.first + first, count, group_name
        self.mark()
        return self

    def forward(self, rows: torch.Tensor, counts: Sequence[int], first: int = 0) -> torch.Tensor:
        """See `dsx_moe.dispatch.LocalExperts`."""
        counts, span = list(counts), slice(first, first + len(counts))
        if self.tensor_group is not None:
            rows = copy_to_group(rows, self.tensor_group)
        rows, up, up_bias, down, down_bias = _autocast_operands(
            rows, self.up, self.up_bias, self.down_proj, self.down_bias, span=span
        )
        inner = segment_matmul(rows, up.transpose(1, 2), counts, up_bias)
        act = ACTIVATIONS[self.activation]
        if self.gated:
            gate, value = inner.chunk(2, dim=-1)
            inner = act(gate) * value
        else:
            inner = act(inner)
        if self.tensor_group is None:
            return segment_matmul(inner, down.transpose(1, 2), counts, down_bias)
        out = sum_over_group(segment_matmul(inner, down.transpose(1, 2), counts), self.tensor_group)
        return out if down_bias is None else out + repeat_per_segment(down_bias, counts)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, _ in self.named_parameters(recurse=False):
            cut_to_shard(state_dict, prefix, name, self)
        super()._load_from_state_dict(state_dict, prefix, *args)


def keep_expert_slices(module: nn.Module, total: int, first: int, count: int) -> None:
    """Replace every direct parameter and buffer of `total` rows by its rows first ... first + count - 1.

    Raises:
        MoEConfigError: a parameter's first dimension is not the experts'.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.dim() == 0 or parameter.shape[0] != total:
            raise MoEConfigError(
                f"{name}: got the shape {tuple(parameter.shape)}, expected {total} experts in the first dimension"
            )
    if count == total:
        return
    for parameter in module.parameters(recurse=False):
        # only the data changes: optimizers hold the parameter object
        parameter.data = parameter.detach()[first : first + count].clone()
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.dim() and buffer.shape[0] == total:
            module.register_buffer(name, buffer[first : first + count].clone())


def cut_to_shard(state_dict: Any, prefix: str, name: str, shard: ExpertShard) -> None:
    """Replace a tensor of all experts in a state dict by this rank's part, unless it has this rank's size.

    Args:
        state_dict: changed in place.
        prefix: prefix of the shard's names in the state dict.
        name: name of the parameter in the shard.
        shard: the experts of this rank.

    Raises:
        ExpertStateError: the tensor has neither size.
    """
    key = prefix + name
    value = state_dict.get(key)
    if value is None or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return
    if value.shape[0] == shard.num_experts:
        state_dict[key] = value[shard.first : shard.first + shard.count]
    elif value.shape[0] != shard.count:
        raise ExpertStateError(
            f"{key}: got {value.shape[0]} experts, expected {shard.num_experts} (all) or {shard.count} (this rank's)"
        )
    state_dict[key] = shard.slices.piece_of(key, name, state_dict[key], shard.get_parameter(name).shape)


def _autocast_operands(rows: torch.Tensor, *weights: torch.Tensor | None, span: slice) -> tuple[Any, ...]:
    """The rows, and the slices `span` of the weights; under autocast cast to its dtype, as for linear layers."""
    kind = rows.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    sliced = [w if w is None or (span.start == 0 and span.stop == w.shape[0]) else w[span] for w in weights]
    if dtype is None:
        return rows, *sliced
    return rows.to(dtype), *(w if w is None else w.to(dtype) for w in sliced)
