"""Makes an engine measure itself if the `autotuning` section says so (`engine/trial.py`). Part of the wiring.

An experiment adds three things to an engine: a limit on its memory, so that a candidate that does not fit fails without
disturbing others; a session that measures and ends the program; and, in the first experiment, facts about the model and
the planner's result for every candidate. The planner is called here because only here are the model and a batch
available.

Files besides `metric_path` and `model_info_path`: `started.json` says that `initialize` was reached; `candidates.json`,
which the tuner writes, lists configurations; `plans.json` has the planner's results for them.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import ValidationError
from torch import nn
from torch.utils import _pytree as pytree

from .autotuning.files import CANDIDATES, PLANS, STARTED, write_whole
from .autotuning.predictions import Facts
from .autotuning.probe import Probe
from .config import Config
from .config.autotuning import Autotuning
from .config.source import read
from .engine.request import launched_as
from .engine.trial import TrialSession, TrialTasks
from .errors import DsxConfigError
from .pipelining import is_pipeline
from .utils.logging import logger
from .watching import Watch, Watched, rows_of_ranks

__all__ = ["begin_trial", "skeleton_before_cutting"]

_DEVICE_PART, _HOST_PART = 0.95, 0.9
_THREADS = 64 * 2**20
"""Room for the stacks of threads that start later. The kernel counts them as data, although they are hardly used."""


class NoTrial:
    """The program trains as configured."""

    def join(self, watch: Watch, to: Watched) -> None:
        """Does nothing."""


def skeleton_before_cutting(source: Any, model: nn.Module) -> nn.Module | str:
    """The model without values, before the configuration cuts it: the planner is asked about it. "" where nobody asks.

    Args:
        source: the configuration as given; what is wrong in it is left to `load_config` to say.
        model: as the caller gave it.
    """
    if launched_as()[0] != 0:
        return ""
    try:
        section = Autotuning.model_validate(dict(read(source).data.get("autotuning") or {}))
    except (DsxConfigError, ValidationError, TypeError, ValueError):
        return ""
    if not section.profiles:
        return ""
    if is_pipeline(model):
        return (
            "the model is a PipelineModule, which holds the layers of this rank alone; let pipeline.stages cut the"
            " whole model, and the planner can be asked"
        )
    return _skeleton_of(model)


def begin_trial(config: Config, skeleton: nn.Module | str) -> NoTrial | Trial:
    """The experiment that the section asks for, if any.

    Args:
        config: the configuration.
        skeleton: see `skeleton_before_cutting`.
    """
    section = config.use("autotuning")
    if not section.measures:
        if section.enabled and launched_as()[0] == 0:
            logger.info("autotuning.enabled: this run trains as configured; `dsx launch --autotuning tune` searches")
        return NoTrial()
    return Trial(config, skeleton)


class Trial:
    """An experiment.

    Args:
        config: the configuration, whose section asks for a measurement.
        skeleton: see `skeleton_before_cutting`.
    """

    def __init__(self, config: Config, skeleton: nn.Module | str) -> None:
        self._config, self._section = config, config.autotuning
        self._folder = Path(self._section.metric_path or self._section.model_info_path).parent
        # On a host the model itself may be too large, so memory is limited now. A device is not chosen yet.
        self._limit = None if torch.cuda.is_available() else self._limited(torch.device("cpu"))
        self._skeleton = skeleton
        self._batch: Any = None
        if launched_as()[0] == 0:
            first, last = self._section.start_profile_step, self._section.end_profile_step
            logger.info("autotuning: updates %d to %d are measured, then the program ends", first, last)
            write_whole(self._folder / STARTED, json.dumps({"process": os.getpid(), "time": time.time()}))

    def join(self, watch: Watch, to: Watched) -> None:
        """Add a session that measures and ends the program after `end_profile_step`. It must be the last observer."""
        section, monitoring = self._section, to.monitoring
        limit = self._limited(to.device) if self._limit is None else self._limit
        on_device = to.device.type == "cuda"
        profiler = monitoring.FlopsProfiler(to.module) if section.counts_operations and to.first else None
        tasks = TrialTasks(
            gather=partial(rows_of_ranks, to) if to.distributed else lambda mine: [mine],
            in_use=monitoring.memory_in_use,
            peak=partial(torch.cuda.max_memory_allocated, to.device) if on_device else _peak_resident,
            restart_peak=partial(torch.cuda.reset_peak_memory_stats, to.device) if on_device else _restart_resident,
            state_bytes=lambda: sum(to.optimizer.state_bytes().values()),
            conclude=partial(self._conclude, to, limit),
            look=self._look,
            profiler=profiler,
        )
        watch.add(TrialSession(section.start_profile_step, section.end_profile_step, to.device, tasks))

    def _limited(self, device: torch.device) -> int:
        return limit_memory(self._section.max_memory_per_gpu, device, _ranks_here())

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(self._skeleton, nn.Module):
            given = pytree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
            self._batch = _one_batch(self._skeleton, *given)

    def _conclude(self, to: Watched, limit: int, found: dict[str, Any]) -> None:
        section = self._section
        facts = _facts(self._config, to, limit, found)
        if to.first and section.metric_path is not None:
            metrics = json.dumps(self._metrics(found, facts), indent=2)
            write_whole(Path(section.metric_path), metrics + "\n")
        if not section.profiles:
            return
        to.comm.destroy_process_group()  # no rank trains any more, and the planner makes plans for other ranks
        if to.first:
            path = Path(section.model_info_path)
            write_whole(path, json.dumps(facts.to_json(), indent=2) + "\n")
            self._ask(path.parent, facts)

    def _metrics(self, found: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
        operations, batch = facts.flops_per_sample, self._config.batch
        return {
            **{key: value for key, value in found.items() if key != "flops_per_micro_batch"},
            "FLOPS_per_gpu": None if operations is None else operations * found["throughput"] / facts.world_size,
            "train_batch_size": batch.train,
            "train_micro_batch_size_per_gpu": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
            "zero_stage": self._config.zero.stage,
        }

    def _cut_by_configuration(self) -> bool:
        """Whether plans are about all ranks: those that share a copy of the model, too."""
        return self._config.pipeline.stages not in (1, "auto") or self._config.tensor_parallel.autotp_size > 1

    def _ask(self, folder: Path, facts: Facts) -> None:
        """Ask the planner about the candidates that the tuner has left in the folder."""
        if not (folder / CANDIDATES).exists():
            return
        if isinstance(self._skeleton, str):
            answer = Probe.refused(self._skeleton)
        elif self._batch is None:
            answer = Probe.refused("the model's inputs were not seen")
        else:
            micro = self._config.batch.micro
            ranks = facts.world_size if self._cut_by_configuration() else facts.data_parallel
            probe = Probe(self._skeleton, self._batch, micro, ranks, facts.memory_bytes, _plan)
            answer = probe.answer(json.loads((folder / CANDIDATES).read_text(encoding="utf-8")))
        write_whole(folder / PLANS, json.dumps(answer))


def _plan(*args: Any, **kwargs: Any) -> Any:
    # Imported by name, because the planner imports the wiring, and an import of the planner would be a cycle.
    return importlib.import_module("dsx.planning").plan(*args, **kwargs)


def _facts(config: Config, to: Watched, limit: int, found: Mapping[str, Any]) -> Facts:
    parameters = list(to.module.parameters())
    counted = found["flops_per_micro_batch"]
    passes = [found[name] for name in ("fwd", "bwd")]
    offload = config.zero.offload_optimizer
    return Facts(
        num_params=sum(p.numel() for p in parameters),
        trainable_num_params=sum(p.numel() for p in parameters if p.requires_grad),
        activation_mem_per_gpu=found["activation_mem_per_gpu"],
        peak_bytes=found["peak_bytes"],
        memory_bytes=limit,
        device=to.device.type,
        world_size=to.topology.world_size,
        data_parallel=to.topology.batches[1],
        ranks_per_host=_ranks_here(),
        sixteen_bit=config.precision.params != "fp32",
        step_seconds=found["latency"],
        optimizer_offloaded=offload is not None and offload.device != "none",
        pass_seconds=None if None in passes else sum(passes),
        flops_per_sample=None if counted is None else counted / config.batch.micro,
        startup_seconds=found["startup_seconds"],
    )


# - Memory


def limit_memory(limit: int | None, device: torch.device, ranks: int) -> int:
    """Let this process fail if it needs more memory than its share; returns the share in bytes.

    On a device the caching allocator refuses more. Without a device the kernel does (RLIMIT_DATA, Linux). Otherwise the
    kernel would kill any process when the machine is full.

    Args:
        limit: bytes; None: 0.95 of the device, or this rank's share of 0.9 of the host's free memory.
        device: the device of the model.
        ranks: number of processes that share this host.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = int(_DEVICE_PART * total) if limit is None else limit
        torch.cuda.set_per_process_memory_fraction(min(1.0, share / total), device)
        return share
    resident = psutil.Process().memory_info().rss
    share = int(_HOST_PART * psutil.virtual_memory().available / ranks) + resident if limit is None else limit
    unused = _status("VmData") - _status("RssAnon")  # address space that is reserved but not used
    if _status("VmData"):
        import resource  # lazy import: there is none on Windows

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        wanted = share + max(0, unused) + _THREADS
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return share


def _ranks_here() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _status(name: str) -> int:
    """Bytes in a line of /proc/self/status; 0 if there is no such line."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def _restart_resident() -> None:
    """Reset the kernel's peak of resident memory (Linux; elsewhere the peak is that since the start of the process)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        logger.debug("the peak of resident memory cannot be restarted: %s", error)


def _peak_resident() -> int:
    return _status("VmHWM") or psutil.Process().memory_info().rss


# - The model without its values


def _skeleton_of(model: nn.Module) -> nn.Module | str:
    """A copy of a model on the meta device, with its ties; or a text that says why it cannot be copied."""
    values: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        made = _without_values(tensor)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        values[id(tensor)] = made
    try:
        return copy.deepcopy(model, values)
    except Exception as error:  # noqa: BLE001 - modules may hold anything, and the search goes on without a plan
        return f"the model cannot be copied: {type(error).__name__}: {error}"


def _one_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call in the form that the planner takes: positional ones as a tuple, or all by name."""
    if not kwargs:
        return args
    names = inspect.signature(model.forward).parameters
    return {**dict(zip(names, args)), **kwargs}


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
