"""``Init``: build a model whose parameters are partitioned as they come into being.

Inside the context a module's parameters stay ordinary until the module is put into its parent; then its constructor is
done, so they are partitioned (rank 0's values, one parameter at a time) and the whole tensors go. What no parent takes,
the root, is partitioned when the context ends. Random numbers are drawn exactly as without ``Init``: the same seed
gives the same model. ``dsx_zero.shard(stage=3)`` later moves the values into units; below stage 3 it makes the
parameters whole again. In between the model can be converted as any other (``model.to(torch.bfloat16)``).

Where a launcher started this process as one of several and no process group exists yet, ``Init`` makes the default one.

Only torch's registration hooks are used; no class or function of torch is replaced.
It leaves out homes other than the device (``remote_device``) and quantised parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dsx_comm
import torch
from dsx_comm import ParameterMarks, RankSet, RankSets
from torch import nn
from torch.nn.modules import module as registration

from ..errors import ZeroConfigError
from ..groups import join_launched_ranks
from ..homes.home import DeviceHome, Home
from ..plan.layout import FlatLayout
from .partitioned import PartitionedParameter
from .whole import read_whole, write_whole

__all__ = ["Init", "InitParameter"]


class InitParameter:
    """The ``ParameterSource`` of a parameter that is partitioned but not yet in a unit."""

    def __init__(self, name: str, layout: FlatLayout, values: torch.Tensor, ranks: RankSet) -> None:
        self.name, self.layout, self._values, self.ranks = name, layout, values, ranks
        self.shard: Home = DeviceHome(values)
        self.master: Home | None = None
        self._opened: torch.Tensor | None = None

    @classmethod
    def divide(cls, name: str, value: torch.Tensor, ranks: RankSet) -> InitParameter:
        """Keep this rank's part of the first rank's ``value`` (collective)."""
        layout = FlatLayout.build([(name, tuple(value.shape))], world_size=ranks.size, itemsize=value.element_size())
        shard = torch.zeros(layout.shard_numel, dtype=value.dtype, device=value.device)
        made = cls(name, layout, shard, ranks)
        write_whole(made, name, value)
        return made

    def local_shard(self) -> torch.Tensor:
        part = self.layout.local_slice(self.name, self.ranks.rank)
        return self._values[:0] if part is None else self._values.narrow(0, part.offset, part.numel)

    def full_tensor(self) -> torch.Tensor:
        return read_whole(self.layout, self.name, self.shard, self.ranks, device=self.shard.device)

    def write(self, edit: Callable[[torch.Tensor], object]) -> None:
        if self._opened is not None:
            edit(self._opened)
            return
        whole = self.full_tensor()
        edit(whole)
        write_whole(self, self.name, whole)

    def borrow(self) -> torch.Tensor | None:
        return self._opened

    def read(self) -> torch.Tensor | None:
        return self.full_tensor() if _CONTEXTS else None

    def lend(self, output: Any) -> Any:
        return output

    def set_requires_grad(self, value: bool) -> str | None:
        return None  # before `shard` nothing depends on it

    def gradient(self) -> torch.Tensor | None:
        return None

    def set_gradient(self, value: torch.Tensor | None) -> bool:
        return value is None

    def leaf(self) -> torch.Tensor | None:
        return None

    def converted(self, dtype: torch.dtype, device: torch.device) -> InitParameter | None:
        if self._opened is not None:
            return None  # what is gathered for editing must not lose its shard
        values = self._values.to(device=device, dtype=dtype)
        return InitParameter(self.name, self.layout, values, self.ranks)

    def open(self) -> torch.Tensor:
        """Gather the whole parameter for reading and writing (collective)."""
        self._opened = self.full_tensor()
        return self._opened

    def close(self, *, source_rank: int | None) -> None:
        """Let the whole go; with a ``source_rank``, keep that rank's values (collective)."""
        whole, self._opened = self._opened, None
        if whole is not None and source_rank is not None:
            write_whole(self, self.name, whole, source_rank=source_rank)


_CONTEXTS: list[Init] = []


class Init:
    """Partition parameters while a model is built.

    Args:
        module: partition the parameters of this module now.
        data_parallel_group: the ranks to partition over (default: all).
        dtype: floating-point parameters are converted to it; default: what the configuration's ``fp16`` or ``bf16``
            says, else as built.
        config_dict_or_path, config: a configuration (a dict or a JSON file, comments allowed); only the dtype is read
            from it.
        enabled: False makes the context do nothing.
        mpu: an object whose ``get_data_parallel_group()`` gives the ranks.
        mem_efficient_linear: accepted; gathered weights are never kept for backward.

    Raises:
        ZeroConfigError: for arguments whose feature is not there yet.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | Path | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **later: Any,
    ) -> None:
        _refuse(remote_device=remote_device not in (None, "none"), pin_memory=pin_memory, **later)
        if config is not None and config_dict_or_path is not None:
            raise ZeroConfigError("Init.config", "got config and config_dict_or_path; they are two names of one thing")
        self._dtype = dtype or _dtype_of(config if config is not None else config_dict_or_path)
        if enabled:
            join_launched_ranks()
        self._ranks = _rank_sets(data_parallel_group, mpu)
        self._enabled = enabled
        self._seen: list[nn.Module] = []
        self._stack = ExitStack()
        if module is not None and enabled:
            self._partition(module)

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        _CONTEXTS.append(self)
        self._stack.callback(_CONTEXTS.remove, self)
        for handle in (
            registration.register_module_module_registration_hook(self._on_module),
            registration.register_module_parameter_registration_hook(self._on_parameter),
        ):
            self._stack.callback(handle.remove)
        if there_is_cuda(self._ranks.data.group):
            self._stack.enter_context(torch.device("cuda", torch.cuda.current_device()))
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self._stack.close()
        seen, self._seen = self._seen, []
        if kind is None and self._enabled:
            for module in seen:
                self._partition(module, recurse=False)

    @staticmethod
    @contextmanager
    def paused() -> Iterator[None]:
        """What is built inside stays ordinary until its module is put into a parent outside: for experts, which are to
        be marked (`allreduce=False`, `group_name`) before they are divided among the ranks that hold them.
        """
        pause = Init(enabled=False)
        _CONTEXTS.append(pause)
        try:
            yield
        finally:
            _CONTEXTS.remove(pause)

    def _on_module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if _CONTEXTS[-1] is self and child is not None:
            self._partition(child)

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if _CONTEXTS[-1] is self and parameter is not None and not any(known is module for known in self._seen[-8:]):
            self._seen.append(module)

    def _partition(self, module: nn.Module, *, recurse: bool = True) -> None:
        for owner in module.modules() if recurse else (module,):
            for name, parameter in owner._parameters.items():
                if parameter is not None and not isinstance(parameter, PartitionedParameter):
                    self._replace(owner, name, parameter)

    def _replace(self, owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if parameter.device.type == "meta":
            return  # no values to divide; whoever materialises it registers a new parameter
        value = parameter.detach()
        if self._dtype is not None and value.is_floating_point():
            value = value.to(self._dtype)
        if value.numel() == 0:
            parameter.data = value
            return
        ranks = self._ranks.of(ParameterMarks.read(parameter))
        source = InitParameter.divide(f"{type(owner).__name__}.{name}", value.contiguous(), ranks)
        face = PartitionedParameter(
            source, value.shape, dtype=value.dtype, device=value.device, requires_grad=parameter.requires_grad
        )
        vars(face).update({k: v for k, v in vars(parameter).items() if k not in ("_source", "_is_param")})
        owner._parameters[name] = face  # type: ignore[assignment]


def _rank_sets(data_parallel_group: Any, mpu: Any) -> RankSets:
    if data_parallel_group is not None:
        return RankSets.over(data_parallel_group)
    return RankSets.current() if mpu is None else RankSets.of_mpu(mpu)


def there_is_cuda(group: Any) -> bool:
    """Whether the group's ranks train on CUDA devices."""
    return torch.cuda.is_available() and dsx_comm.is_initialized() and "nccl" in str(dsx_comm.get_backend(group))


def _refuse(*, remote_device: bool, pin_memory: bool, **later: Any) -> None:
    known = {
        "zero_param_parallel_group",
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "sequence_data_parallel_group",
        "param_swapper",
        "tensor_overrides",
    }
    for name, value in {"remote_device": remote_device, "pin_memory": pin_memory, **later}.items():
        if name not in known | {"remote_device", "pin_memory"}:
            raise TypeError(f"Init got an unexpected argument {name!r}")
        if value not in (None, False):
            raise ZeroConfigError(f"Init.{name}", "not available yet: leave it out")


_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_COMMA = re.compile(r'("(?:[^"\\\n]|\\.)*")|,(?=\s*[}\]])')


def _read(path: str | Path) -> Any:
    """The JSON in a file, comments and trailing commas left out as where an engine reads it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        for left_out in (_COMMENT, _COMMA):
            text = left_out.sub(lambda found: found[1] or "", text)
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise ZeroConfigError(
            "Init.config",
            f"got {str(path)!r:.200}, which cannot be read ({error}); expected a dictionary or the path of a JSON file",
        ) from error


def _dtype_of(config: Mapping[str, Any] | str | Path | None) -> torch.dtype | None:
    if isinstance(config, (str, Path)):
        config = _read(config)
    for section, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16)):
        if isinstance(config, Mapping) and dict(config.get(section) or {}).get("enabled") is True:
            return dtype
    return None
