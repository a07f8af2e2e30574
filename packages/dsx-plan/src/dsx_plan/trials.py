"""Makes an engine measure itself if its `autotuning` section says so: an extension that `dsx.initialize` is given.

An experiment adds three things to an engine: a limit on its memory, so that a candidate that does not fit fails without
disturbing others; a session that measures and ends the program; and, in the first experiment, facts about the model and
the planner's result for every candidate. The planner is called here because only here are the model and a batch
available.

Files besides `metric_path` and `model_info_path`: `started.json` says that `initialize` was reached; `candidates.json`,
which the tuner writes, lists configurations; `plans.json` has the planner's results for them.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import dsx_comm
import dsx_monitor
import dsx_monitor.memory
import psutil
import torch
from dsx_core.device import Device, accelerator_kind
from torch import nn
from torch.utils import _pytree as pytree

from .autotuning.files import CANDIDATES, PLANS, STARTED, write_whole
from .autotuning.predictions import Facts
from .autotuning.probe import Probe
from .engine import EngineToPlan, Trained, Watchers, engine_to_plan
from .planner import plan
from .section import Autotuning
from .trial_session import TrialSession, TrialTasks

__all__ = ["Trial", "limit_memory"]

logger = logging.getLogger("dsx.plan")

_DEVICE_PART, _HOST_PART = 0.95, 0.9
_CUT_ALREADY = (
    "the model is a PipelineModule, which holds the layers of this rank alone; let pipeline.stages cut the whole model,"
    " and the planner can be asked"
)
_THREADS = 64 * 2**20
"""Room for the stacks of threads that start later. The kernel counts them as data, although they are hardly used."""


class Trial:
    """An experiment, or nothing where the section asks for no measurement.

    Its methods are called by an engine while it is built (`dsx.Extension`).

    Args:
        engine: what the planner runs; None: the installed one, which is looked up only where the planner is asked.
    """

    name, section = "autotuning", Autotuning

    def __init__(self, engine: EngineToPlan | None = None) -> None:
        self._engine = engine
        self._skeleton: nn.Module | str = ""
        self._batch: Any = None
        self._first = False
        self._limit: int | None = None

    def begin(self, keys: Mapping[str, Any], model: nn.Module, rank: int) -> None:
        """Copy the model without its values, before the configuration cuts it: the planner is asked about it.

        Args:
            keys: of the configuration as they were written; what is wrong in them is left to the engine to say.
            model: as the caller gave it.
            rank: of this process.
        """
        self._first = rank == 0
        if not self._first or not _profiles(keys.get("autotuning")):
            return
        self._engine = engine_to_plan(self._engine)
        self._skeleton = _CUT_ALREADY if self._engine.is_pipeline(model) else _skeleton_of(model)

    def prepare(self, keys: Mapping[str, Any], request: Any) -> Any:
        """The request as it is: a trial measures what would be trained."""
        return request

    def configured(self, config: Any) -> None:
        """The configuration is right, and the ranks have not joined yet: say that the program has come so far."""
        self._config, self._section = config, config.use(self.name)
        if not self._section.measures:
            if self._section.enabled and self._first:
                logger.info(
                    "autotuning.enabled: this run trains as configured; `dsx launch --autotuning tune` searches"
                )
            return
        self._folder = Path(self._section.metric_path or self._section.model_info_path).parent
        # On a host the model itself may be too large, so memory is limited now. A device is not chosen yet.
        self._limit = None if accelerator_kind() else self._limited(torch.device("cpu"))
        if self._first:
            first, last = self._section.start_profile_step, self._section.end_profile_step
            logger.info("autotuning: updates %d to %d are measured, then the program ends", first, last)
            write_whole(self._folder / STARTED, json.dumps({"process": os.getpid(), "time": time.time()}))

    def before_shard(self, request: Any, config: Any, topology: Any) -> Any:
        """The request as it is: a trial measures what would be trained."""
        return request

    def state(self) -> None:
        """There is none: a trial ends with its program."""

    def join(self, watch: Watchers, to: Trained) -> None:
        """Add a session that measures and ends the program after `end_profile_step`. It must be the last observer."""
        section = self._section
        if not section.measures:
            return
        limit = self._limited(to.device) if self._limit is None else self._limit
        device = Device.of(to.device)
        profiler = dsx_monitor.FlopsProfiler(to.module) if section.counts_operations and self._first else None
        tasks = TrialTasks(
            gather=partial(_rows_of_ranks, to) if to.topology.world_size > 1 else lambda mine: [mine],
            in_use=dsx_monitor.memory.memory_in_use,
            peak=device.peak_allocated if device.is_accelerator else _peak_resident,
            restart_peak=device.restart_peaks if device.is_accelerator else _restart_resident,
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

    def _conclude(self, to: Trained, limit: int, found: dict[str, Any]) -> None:
        section = self._section
        facts = _facts(self._config, to, limit, found)
        if self._first and section.metric_path is not None:
            metrics = json.dumps(self._metrics(found, facts), indent=2)
            write_whole(Path(section.metric_path), metrics + "\n")
        if not section.profiles:
            return
        dsx_comm.destroy_process_group()  # no rank trains any more, and the planner makes plans for other ranks
        if self._first:
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
            probe = Probe(
                self._skeleton, self._batch, micro, ranks, facts.memory_bytes, partial(plan, engine=self._engine)
            )
            answer = probe.answer(json.loads((folder / CANDIDATES).read_text(encoding="utf-8")))
        write_whole(folder / PLANS, json.dumps(answer))


def _profiles(section: Any) -> bool:
    """Whether the section as it was written asks for facts about the model; see `Autotuning.profiles`."""
    if not isinstance(section, Mapping):
        return False
    info = section.get("model_info")
    wanted = isinstance(info, Mapping) and info.get("profile") is True
    return section.get("enabled") is True and wanted and section.get("model_info_path") is not None


def _rows_of_ranks(to: Trained, own: list[float]) -> list[list[float]]:
    """All ranks' lists of numbers. Collective."""
    mine = torch.tensor(own, dtype=torch.float64, device=to.device)
    rows = [torch.empty_like(mine) for _ in range(to.topology.world_size)]
    dsx_comm.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def _facts(config: Any, to: Trained, limit: int, found: Mapping[str, Any]) -> Facts:
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
        total = Device.of(device).properties.total_memory
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
