"""``Init``: a context in which a model's parameters are partitioned while the model is built.

Inside the context a module's parameters stay ordinary until the module is put into its parent. Its constructor has
returned by then, so the parameters are partitioned (rank 0's values, one parameter at a time), and the whole tensors
are freed. The root has no parent; its own parameters are partitioned when the context ends. Random numbers are drawn
exactly as without ``Init``: the same seed gives the same model. ``dsx_zero.shard(stage=3)`` later moves the values into
units; below stage 3 it makes the parameters whole again. Between the two the model can be converted like any other
(``model.to(torch.bfloat16)``).

Parameters on the meta device have no values to divide. Each rank allocates memory for its part, and
``dsx_zero.load_weights``, or a write to the parameter, gives it values. ``remote_device`` says where the parts live
until the model is sharded.

If a launcher started this process (also as the only rank) and no process group exists yet, ``Init`` makes the default
one.

Only torch's registration hooks are used; no class or function of torch is replaced. Left out: quantised parameters.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dsx_comm
import torch
from dsx_comm import ParameterMarks, RankSet, RankSets
from dsx_core.device import Device
from torch import nn
from torch.nn.modules import module as registration

from ..errors import ZeroConfigError
from ..homes.home import Home, read, write
from ..homes.stored import TensorStore
from ..homes.tiers import DeviceTier, DiskTier, HostTier, Tier
from ..plan.layout import FlatLayout, pieces
from .init_config import check_later, dtype_of, offload_of, read_config
from .memory import OrdinaryMemory
from .partitioned import PartitionedParameter, PartitionedParameterError
from .whole import read_whole, write_whole

__all__ = ["Init", "InitParameter", "MiCS_Init"]


_NUMBERS = itertools.count()
"""Of parameters. All ranks divide them in one order, so a parameter's number is the same everywhere."""
_AT_ONCE = 1 << 24
"""Elements of one piece, when values are copied between homes without a view."""


class InitParameter:
    """The ``ParameterSource`` of a parameter that is partitioned but not yet in a unit.

    Args:
        dtype, device: dtype and device of the whole parameter.
        tier: where this rank's part lives.
    """

    def __init__(
        self, name: str, layout: FlatLayout, ranks: RankSet, *, dtype: torch.dtype, device: torch.device, tier: Tier
    ) -> None:
        self.number = next(_NUMBERS)
        self.name, self.layout, self.ranks, self.device, self._tier = name, layout, ranks, device, tier
        stored = f"init.{uuid.uuid4().hex}.{name}"  # the names alone repeat: they begin with the class of a module
        self.shard: Home = tier.home(stored, layout.shard_numel, dtype, device, OrdinaryMemory())
        if (view := self.shard.view()) is not None:
            view.zero_()
        self.master: Home | None = None
        self.has_values = False
        """Whether the parameter has been written."""
        self._opened: torch.Tensor | None = None

    @classmethod
    def divide(cls, name: str, value: torch.Tensor, ranks: RankSet, tier: Tier | None = None) -> InitParameter:
        """Keep this rank's part of the first rank's ``value`` (collective)."""
        made = cls.empty(name, value, ranks, device=value.device, tier=tier)
        write_whole(made, name, value)
        made.has_values = True
        return made

    @classmethod
    def empty(
        cls, name: str, like: torch.Tensor, ranks: RankSet, *, device: torch.device, tier: Tier | None = None
    ) -> InitParameter:
        """Allocate this rank's part of a parameter with the shape and dtype of ``like``. It has no values yet."""
        layout = FlatLayout.build([(name, tuple(like.shape))], world_size=ranks.size, itemsize=like.element_size())
        return cls(name, layout, ranks, dtype=like.dtype, device=device, tier=tier or DeviceTier())

    def local_shard(self) -> torch.Tensor:
        part = self.layout.local_slice(self.name, self.ranks.rank)
        return read(self.shard, *((0, 0) if part is None else (part.offset, part.offset + part.numel)))

    def full_tensor(self) -> torch.Tensor:
        if not self.has_values:
            raise PartitionedParameterError(
                f"parameter '{self.name}' (shape {self.layout.shapes[0]}) was made on the meta device and has no values"
                " yet; fill the model with dsx_zero.load_weights(model, path), or write the parameter on every rank"
                " (p.data.normal_())"
            )
        return read_whole(self.layout, self.name, self.shard, self.ranks, device=self.device)

    def shard_view(self) -> None:
        """None: the model is not sharded yet."""
        return None

    def write(self, edit: Callable[[torch.Tensor], object]) -> None:
        if self._opened is not None:
            edit(self._opened)
            return
        if not self.has_values and torch.get_default_device().type == "meta":
            return  # as for every tensor on the meta device
        whole = self._whole()
        edit(whole)
        write_whole(self, self.name, whole)
        self.has_values = True

    def _whole(self) -> torch.Tensor:
        """The whole values; zeros if none have been written."""
        return read_whole(self.layout, self.name, self.shard, self.ranks, device=self.device)

    def write_part(self, start: int, values: torch.Tensor) -> None:
        """Set elements of this rank's part. Not collective: each rank sets its own.

        Args:
            start: position of the first element in the whole parameter.
        """
        part = self.layout.local_slice(self.name, self.ranks.rank)
        if part is not None:
            write(self.shard, values, part.offset + start - part.start)

    def borrow(self) -> torch.Tensor | None:
        return self._opened

    def read(self) -> torch.Tensor | None:
        return self.full_tensor() if _CONTEXTS else None

    def watch_output(self, output: Any) -> Any:
        return output

    def set_requires_grad(self, value: bool) -> str | None:
        return None  # before `shard` it is always possible

    def gradient(self) -> torch.Tensor | None:
        return None

    def set_gradient(self, value: torch.Tensor | None) -> bool:
        return value is None

    def leaf(self) -> torch.Tensor | None:
        return None

    def converted(self, dtype: torch.dtype, device: torch.device) -> InitParameter | None:
        if self._opened is not None:
            return None  # a parameter that is gathered for editing must keep its shard
        made = InitParameter(self.name, self.layout, self.ranks, dtype=dtype, device=device, tier=self._tier)
        for start, stop in pieces(self.shard.numel, _AT_ONCE) if self.has_values else ():
            write(made.shard, read(self.shard, start, stop), start)
        made.has_values, made.number = self.has_values, self.number
        return made

    def open(self) -> torch.Tensor:
        """Gather the whole parameter for reading and writing (collective)."""
        self._opened = self._whole()
        return self._opened

    def close(self, *, source_rank: int | None) -> None:
        """Free the whole parameter. With a ``source_rank`` all ranks keep that rank's values (collective)."""
        whole, self._opened = self._opened, None
        if whole is not None and source_rank is not None:
            write_whole(self, self.name, whole, source_rank=source_rank)
            self.has_values = True


_CONTEXTS: list[Init] = []


class Init:
    """Partition parameters while a model is built.

    Args:
        module: partition the parameters of this module now.
        data_parallel_group: process group of the ranks among which parameters are divided; None: all ranks.
        dtype: floating-point parameters are converted to it; None: the dtype of the configuration's ``fp16`` or
            ``bf16`` section if one is enabled, else parameters are not converted.
        remote_device: where each rank's part lives until the model is sharded: "cpu" or "nvme"; None or "none": the
            device of the configuration's ``offload_param``, else the device of the parameter.
        pin_memory: use page-locked host memory; for ``remote_device="cpu"``.
        config_dict_or_path, config: a configuration (a dict or a JSON file, comments allowed); the dtype and
            ``offload_param`` are read from it.
        enabled: False makes the context do nothing.
        mpu: an object whose ``get_data_parallel_group()`` returns the process group.
        mem_efficient_linear: has no effect; accepted because scripts pass it. Gathered weights are never kept for
            backward.
        store: the store for ``remote_device="nvme"``, such as a ``dsx_nvme.TensorStore`` of this rank
            (``dsx.zero.Init`` makes one).

    Raises:
        ZeroConfigError: an argument asks for a feature that dsx does not have, or contradicts another argument.
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
        store: TensorStore | None = None,
        **later: Any,
    ) -> None:
        check_later(**later)
        if config is not None and config_dict_or_path is not None:
            raise ZeroConfigError("Init.config", "got config and config_dict_or_path; they are two names of one thing")
        given = config if config is not None else config_dict_or_path
        settings = read_config(given) if isinstance(given, (str, Path)) else given
        self._dtype = dtype or dtype_of(settings)
        if enabled:
            dsx_comm.join_launched_ranks(alone=True)  # programs ask torch.distributed for the rank while they build
        self._ranks = _rank_sets(data_parallel_group, mpu)
        self._enabled = enabled
        self._tier: Tier = DeviceTier()
        if enabled:
            self._tier = self._chosen_tier(remote_device, pin_memory, offload_of(settings), store)
        self._seen: list[nn.Module] = []
        self._stack = ExitStack()
        if module is not None and enabled:
            self._partition(module)

    def _chosen_tier(
        self, remote_device: str | None, pin: bool, offload: Mapping[str, Any], store: TensorStore | None
    ) -> Tier:
        asked = getattr(remote_device, "value", remote_device)
        where = offload.get("device", "none") if asked in (None, "none") else asked
        if where == "none":
            return DeviceTier()
        if where == "cpu":
            return HostTier(pin=pin or bool(offload.get("pin_memory")))
        if where != "nvme":
            raise ZeroConfigError("Init.remote_device", f"got {remote_device!r}, expected 'cpu', 'nvme' or None")
        return DiskTier(self._store_on_disk(offload.get("nvme_path")) if store is None else store)

    def _store_on_disk(self, path: str | None) -> TensorStore:
        """The store for ``remote_device="nvme"``; ``path`` is the configuration's ``nvme_path``."""
        raise ZeroConfigError(
            "Init.remote_device",
            "got nvme, but there is no store on disk; give Init(store=dsx_nvme.TensorStore(folder)), with a folder for"
            " each rank, or use dsx.zero.Init, which makes one in zero_optimization.offload_param.nvme_path",
        )

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
        if there_is_cuda(self._ranks.data.group) and torch.get_default_device().type != "meta":
            self._stack.enter_context(Device.of("cuda").torch_device)
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
        """Modules that are built inside stay ordinary until they are put into a parent outside.

        This is for experts: they must be marked (`allreduce=False`, `group_name`) before they are divided among the
        ranks that hold them.
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
        value = parameter.detach()
        if self._dtype is not None and value.is_floating_point():
            value = value.to(self._dtype)
        if value.numel() == 0:
            parameter.data = value
            return
        ranks, label = self._ranks.of(ParameterMarks.read(parameter)), f"{type(owner).__name__}.{name}"
        device = self._target() if value.device.type == "meta" else value.device
        with torch.device(device):  # a model may be built under another default device, such as meta
            if value.device.type == "meta":
                source = InitParameter.empty(label, value, ranks, device=device, tier=self._tier)
            else:
                source = InitParameter.divide(label, value.contiguous(), ranks, self._tier)
        face = PartitionedParameter(
            source, value.shape, dtype=value.dtype, device=device, requires_grad=parameter.requires_grad
        )
        vars(face).update({k: v for k, v in vars(parameter).items() if k not in ("_source", "_is_param")})
        owner._parameters[name] = face  # type: ignore[assignment]

    def _target(self) -> torch.device:
        """The device of parameters that are on the meta device now."""
        on_cuda = there_is_cuda(self._ranks.data.group)
        return Device.of("cuda").torch_device if on_cuda else torch.device("cpu")


def _rank_sets(data_parallel_group: Any, mpu: Any) -> RankSets:
    if data_parallel_group is not None:
        return RankSets.over(data_parallel_group)
    return RankSets.current() if mpu is None else RankSets.of_mpu(mpu)


def there_is_cuda(group: Any) -> bool:
    """Whether the group's ranks train on CUDA devices."""
    return torch.cuda.is_available() and dsx_comm.is_initialized() and "nccl" in str(dsx_comm.get_backend(group))


MiCS_Init = Init
"""The name that scripts use for hybrid sharding. The number of ranks that divide a copy (`mics_shard_size`) is decided
when the model is sharded.
"""
