"""The interface of an accelerator, and the methods that are the same for every device.

A device index may be left out everywhere; then the current device is used. Sizes are bytes. A device is used only when
a method that needs it is called.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from dsx.errors import DsxError
from torch import Tensor


class AcceleratorError(DsxError, RuntimeError):
    """The chosen accelerator is missing, or does not support a call; the text says what to do."""


class Accelerator(abc.ABC):
    """The devices of one kind in this process."""

    _name = ""
    _communication_backend_name = ""
    _compile_backend = "inductor"

    # ---- devices ----------------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """`cuda`, or `cuda:1` for an index; on a CPU always `cpu`."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """The device. As a context manager it is the default device of new tensors."""
        return torch.device(self.device_name(device_index))

    def current_device_name(self) -> str:
        """The name of the current device, as `torch.device` takes it."""
        return self.device_name(self.current_device())

    @abc.abstractmethod
    def set_device(self, device_index: int) -> None:
        """Make a device the current one."""

    @abc.abstractmethod
    def current_device(self) -> int:
        """The current device's index."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """The number of devices."""

    @abc.abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has done all work given to it."""

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Whether there is such a device."""

    @abc.abstractmethod
    def is_synchronized_device(self) -> bool:
        """Whether work is done when the call returns."""

    def use_host_timers(self) -> bool:
        """Whether the host's clock measures work."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Whether work begins only after its inputs are computed, so that no stream has to wait."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Whether memory can be freed as soon as a call returns."""
        return self.is_synchronized_device()

    # ---- random numbers ---------------------------------------------------------------------------------------------

    def random(self) -> Any:
        """The module `torch.random`."""
        return torch.random

    @abc.abstractmethod
    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Set the state of the device's generator."""

    @abc.abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """The state of the device's generator."""

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> Any:
        """Seed the current device's generator."""

    @abc.abstractmethod
    def manual_seed_all(self, seed: int) -> Any:
        """Seed the generators of all devices."""

    @abc.abstractmethod
    def initial_seed(self) -> int:
        """The current generator's seed."""

    @abc.abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator of a device."""

    # ---- streams and events -----------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def Stream(self) -> Any:
        """The class of streams."""

    @property
    @abc.abstractmethod
    def Event(self) -> Any:
        """The class of events."""

    @abc.abstractmethod
    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which work goes to `stream`."""

    @abc.abstractmethod
    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream that work goes to now."""

    @abc.abstractmethod
    def default_stream(self, device_index: int | None = None) -> Any:
        """The stream that work goes to by default."""

    # ---- memory -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def empty_cache(self) -> None:
        """Release the unused memory that torch's allocator keeps."""

    @abc.abstractmethod
    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that tensors use (CPU: the process)."""

    @abc.abstractmethod
    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The largest `memory_allocated` since it was reset."""

    @abc.abstractmethod
    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Reset `max_memory_allocated`."""

    @abc.abstractmethod
    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that torch's allocator holds."""

    @abc.abstractmethod
    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The largest `memory_reserved` since it was reset."""

    @abc.abstractmethod
    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset all peaks."""

    @abc.abstractmethod
    def memory_stats(self, device_index: int | None = None) -> Mapping[str, Any]:
        """Numbers of torch's allocator by name, at least `allocated_bytes.all.current` and `.peak`."""

    @abc.abstractmethod
    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""

    @abc.abstractmethod
    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free now."""

    def memory_cached(self, device_index: int | None = None) -> int:
        """The old name of `memory_reserved`."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """The old name of `max_memory_reserved`."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """The old name of `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    # ---- dtypes -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bfloat16."""

    @abc.abstractmethod
    def is_fp16_supported(self) -> bool:
        """Whether the device computes in float16."""

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that models may be trained in; float32 is always one of them."""
        found = [torch.float32]
        if self.is_fp16_supported():
            found.append(torch.float16)
        if self.is_bf16_supported():
            found.append(torch.bfloat16)
        return found

    def _maker(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        return partial(torch.tensor, dtype=dtype, device=self.device_name())

    @property
    def BFloat16Tensor(self) -> Callable[..., Tensor]:
        """Makes a bfloat16 tensor on the current device from numbers."""
        return self._maker(torch.bfloat16)

    @property
    def ByteTensor(self) -> Callable[..., Tensor]:
        """Makes a uint8 tensor on the current device from numbers."""
        return self._maker(torch.uint8)

    @property
    def DoubleTensor(self) -> Callable[..., Tensor]:
        """Makes a float64 tensor on the current device from numbers."""
        return self._maker(torch.float64)

    @property
    def FloatTensor(self) -> Callable[..., Tensor]:
        """Makes a float32 tensor on the current device from numbers."""
        return self._maker(torch.float32)

    @property
    def HalfTensor(self) -> Callable[..., Tensor]:
        """Makes a float16 tensor on the current device from numbers."""
        return self._maker(torch.float16)

    @property
    def IntTensor(self) -> Callable[..., Tensor]:
        """Makes an int32 tensor on the current device from numbers."""
        return self._maker(torch.int32)

    @property
    def LongTensor(self) -> Callable[..., Tensor]:
        """Makes an int64 tensor on the current device from numbers."""
        return self._maker(torch.int64)

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether `tensor` is on a device of this kind."""
        return tensor.device.type == self._name

    @abc.abstractmethod
    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """`tensor` in page-locked host memory, if that is useful for the device. `align_bytes` has no effect."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in page-locked host memory."""
        return tensor.is_pinned()

    # ---- graphs -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def create_graph(self) -> Any:
        """A new, empty graph of kernels. Raises `AcceleratorError` if the device has no graphs."""

    @abc.abstractmethod
    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """A context whose work is recorded in `graph` instead of executed. Raises `AcceleratorError`."""

    @abc.abstractmethod
    def replay_graph(self, graph: Any) -> None:
        """Execute the recorded work. Raises `AcceleratorError`."""

    # ---- profiling --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Begin a named range in the profiler's timeline."""

    @abc.abstractmethod
    def range_pop(self, domain: str | None = None) -> Any:
        """End the range begun last."""

    # ---- environment ------------------------------------------------------------------------------------------------

    def communication_backend_name(self) -> str:
        """The backend of process groups for tensors on this device."""
        return self._communication_backend_name

    @abc.abstractmethod
    def communication_backend_version(self) -> Any:
        """The backend's version."""

    @abc.abstractmethod
    def is_triton_supported(self) -> bool:
        """Whether Triton compiles for the current device."""

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call `callback` when the device is initialised; at once if the device needs no initialisation."""
        return callback()

    @abc.abstractmethod
    def export_envs(self) -> list[str]:
        """Prefixes of environment variables that a launcher should send to all hosts."""

    @abc.abstractmethod
    def visible_devices_envs(self) -> list[str]:
        """The environment variables that say which devices a process sees."""

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int | str]
    ) -> None:
        """Write the devices of a process into its environment."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        """The backend that `torch.compile` should use."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Set the backend that `torch.compile` should use. Raises `AcceleratorError` for an unknown one."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise AcceleratorError(f"compile backend: got {backend!r}, expected one of {', '.join(sorted(known))}")
        self._compile_backend = backend

    # ---- op builders ------------------------------------------------------------------------------------------------

    def op_builder_dir(self) -> str:
        """The module that has the op builders."""
        return "dsx_compat.op_builder"

    def get_op_builder(self, class_name: str) -> type | None:
        """The builder class of a name such as `CPUAdamBuilder`; None if there is no such class."""
        from .. import op_builder  # lazy import: most scripts need no builders

        found = getattr(op_builder, class_name, None)
        return found if class_name.endswith("Builder") and isinstance(found, type) else None

    def create_op_builder(self, class_name: str) -> Any:
        """A builder by its name; None if there is none."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def build_extension(self) -> Any:
        """torch's class for building extensions with setuptools."""
        from torch.utils.cpp_extension import BuildExtension  # lazy import: it imports setuptools

        return BuildExtension
