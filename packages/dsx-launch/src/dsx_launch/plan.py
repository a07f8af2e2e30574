"""Makes a plan from options. Everything is decided before anything is started.

A plan is frozen data that can be printed (``--dry_run``). Either this process runs the ranks itself (`HostJob`), or it
starts one agent per host with the commands of a `HostsPlan`.
"""

from __future__ import annotations

import logging
import os
import random
import shlex
import shutil
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsx_core import with_code

from .binding import cores_for
from .devices import device_count, devices_for, local_devices
from .elastic_settings import DEFAULT_RESTARTS, Elastic
from .environment import exported, is_secret, read_env_files
from .errors import ResourceError
from .host import HostJob, Program
from .host_rank import host_rank_from
from .options import DEFAULT_HOSTFILE, LaunchOptions
from .output import output_of
from .resources import Pool, apply_filters, encode_world, limit, read_hostfile, slot_count, with_procs
from .runners import BUILDERS, PROGRAMS, Command, Remote
from .runners.base import check_arguments
from .runners.slurm import expand_nodelist

log = logging.getLogger("dsx.launcher")

LOCALHOST = "localhost"
DEFAULT_PORT = 29500  # only for hosts that are started by hand, which cannot agree on a port beforehand
_PORTS = range(20000, 32768)  # below the range from which kernels choose free ports


@dataclass(frozen=True)
class HostsPlan:
    """Agents on several hosts: the commands to start here, and where the hosts meet."""

    launcher: str
    remote: Remote
    commands: tuple[Command, ...]
    master_addr: str
    master_port: int
    run_id: str


def make_plan(options: LaunchOptions, environ: Mapping[str, str]) -> HostJob | HostsPlan:
    """Make the plan. Raises `ResourceError` for resources that are missing or do not fit."""
    pool = _pool(options, environ)
    if options.no_ssh:
        return (_one_of_changing if options.elastic_training else _one_of_many)(options, environ, pool)
    if pool is None:
        return _this_machine(options, environ)
    pool = _chosen(options, pool)
    if len(pool) == 1 and not options.force_multi and is_this_machine(next(iter(pool))):
        return _single_host(options, environ, pool)
    return _several_hosts(options, environ, pool)


def elastic_of(options: LaunchOptions, hosts: int) -> Elastic:
    """The bounds of an elastic job of which `hosts` hosts are known."""
    low = options.min_elastic_nodes or 1
    restarts = DEFAULT_RESTARTS if options.restarts is None else options.restarts
    return Elastic(low, options.max_elastic_nodes or max(low, hosts), restarts)


def is_this_machine(host: str) -> bool:
    """Whether ``host`` is a usual name of this machine. Names are compared, nothing is asked of the network."""
    own = socket.gethostname()
    return host in (LOCALHOST, "127.0.0.1", "::1", own, own.partition(".")[0])


def _pool(options: LaunchOptions, environ: Mapping[str, str]) -> Pool | None:
    """All hosts; None for this machine alone."""
    if options.hostfile:
        return read_hostfile(options.hostfile)
    if options.launcher == "slurm":
        hosts = expand_nodelist(environ.get("SLURM_JOB_NODELIST", ""))
        count = options.num_procs or options.num_gpus or _number(environ.get("SLURM_GPUS_ON_NODE")) or 1
        count = slot_count(count, option="--num_procs" if options.num_procs else "--num_gpus")
        return {host: tuple(map(str, range(count))) for host in hosts}
    if os.path.isfile(DEFAULT_HOSTFILE):
        return read_hostfile(DEFAULT_HOSTFILE)
    if options.num_nodes is not None and options.num_nodes > 1 and not options.no_ssh:
        raise ResourceError(
            f"--num_nodes {options.num_nodes} needs the names of the hosts; pass a file with lines 'host slots=N' as"
            " --hostfile"
        )
    if options.force_multi:
        return {socket.gethostname(): _slots_here(options, environ)[0]}
    return None


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _chosen(options: LaunchOptions, pool: Pool) -> Pool:
    """The hosts and slots that filters and counts leave."""
    pool = apply_filters(pool, include=options.include, exclude=options.exclude)
    pool = limit(pool, nodes=options.num_nodes, per_host=options.num_gpus)
    return pool if options.num_procs is None else with_procs(pool, options.num_procs)


def program_of(options: LaunchOptions) -> Program:
    """The program that every rank runs."""
    pass_rank = not options.no_local_rank
    return Program(options.script, options.script_args, kind=options.kind, pass_local_rank=pass_rank)


def _log_dir(options: LaunchOptions) -> str:
    return os.path.abspath(options.enable_each_rank_log) if options.enable_each_rank_log else ""


def _slots_here(options: LaunchOptions, environ: Mapping[str, str]) -> tuple[tuple[str, ...], bool]:
    """The slots of this machine and whether they are devices."""
    if options.num_procs is not None:
        return tuple(map(str, range(slot_count(options.num_procs, option="--num_procs")))), False
    devices = local_devices(environ)
    if not devices and options.num_gpus is not None:
        count = slot_count(options.num_gpus, option="--num_gpus")
        text = "--num_gpus %d: this machine offers no device, so %d process(es) without a device are started"
        log.warning(with_code(text, "DSX252"), count, count)
        return tuple(map(str, range(count))), False
    return (devices, True) if devices else (("0",), False)


def _this_machine(options: LaunchOptions, environ: Mapping[str, str]) -> HostJob:
    slots, are_devices = _slots_here(options, environ)
    names = (options.include or options.exclude).replace("@", ":").split(":")[0]
    host = names if is_this_machine(names) else LOCALHOST
    pool = limit(
        apply_filters({host: slots}, include=options.include, exclude=options.exclude),
        nodes=options.num_nodes,
        per_host=options.num_gpus,
    )
    chosen = pool[host]
    return _job(options, procs=len(chosen), devices=chosen if are_devices else None)


def _single_host(options: LaunchOptions, environ: Mapping[str, str], pool: Pool) -> HostJob:
    """A hostfile that has only this machine: the ranks are started directly."""
    (slots,) = pool.values()
    return _job(options, procs=len(slots), devices=_devices(slots, environ, wanted=options.num_procs is None))


def _devices(slots: tuple[str, ...], environ: Mapping[str, str], *, wanted: bool) -> tuple[str, ...] | None:
    if not wanted:
        return None
    return devices_for(slots, environ, device_count(environ))


def _job(options: LaunchOptions, *, procs: int, devices: tuple[str, ...] | None) -> HostJob:
    if options.master_addr and not _resolves(options.master_addr):
        raise ResourceError(
            f"--master_addr {options.master_addr}: this name has no address; a job on one machine needs no"
            " --master_addr"
        )
    return HostJob(
        program=program_of(options),
        procs=procs,
        devices=devices,
        cores=cores_for(procs, bind=options.bind_cores_to_rank, core_list=options.bind_core_list),
        log_dir=_log_dir(options),
        output=output_of(options, procs),
        master_addr=options.master_addr or "127.0.0.1",
        master_port=options.master_port or 0,
        run_id=uuid.uuid4().hex,
    )


def _one_of_many(options: LaunchOptions, environ: Mapping[str, str], pool: Pool | None) -> HostJob:
    """``--no_ssh``: the user runs the same command on every host; this is the part of this host."""
    if pool is None:
        slots, _ = _slots_here(options, environ)
        pool = {f"host{rank}": slots for rank in range(options.num_nodes or 1)}
    pool = _chosen(options, pool)
    hosts = tuple(pool)
    rank = options.node_rank if options.node_rank is not None else host_rank_from(environ, hosts)
    if not 0 <= rank < len(hosts):
        raise ResourceError(
            f"--node_rank {rank}: expected between 0 and {len(hosts) - 1}, there are {len(hosts)} hosts"
        )
    slots = pool[hosts[rank]]
    return HostJob(
        program=program_of(options),
        procs=len(slots),
        hosts=hosts,
        host_rank=rank,
        devices=_devices(slots, environ, wanted=options.num_procs is None),
        cores=cores_for(len(slots), bind=options.bind_cores_to_rank, core_list=options.bind_core_list),
        log_dir=_log_dir(options),
        output=output_of(options, max(map(len, pool.values()))),
        master_addr=options.master_addr,
        master_port=options.master_port or DEFAULT_PORT,
    )


def _one_of_changing(options: LaunchOptions, environ: Mapping[str, str], pool: Pool | None) -> HostJob:
    """``--no_ssh --elastic_training``: the hosts are not known beforehand; the rendezvous numbers them as they come."""
    slots, are_devices = _slots_here(options, environ)
    own = {host: slots for host, slots in (pool or {}).items() if is_this_machine(host)}
    if own:
        (slots,) = _chosen(options, own).values()
        are_devices = options.num_procs is None
    return HostJob(
        program=program_of(options),
        procs=len(slots),
        hosts=(socket.gethostname(),),
        devices=_devices(slots, environ, wanted=are_devices),
        cores=cores_for(len(slots), bind=options.bind_cores_to_rank, core_list=options.bind_core_list),
        log_dir=_log_dir(options),
        output=output_of(options, len(slots)),
        master_addr=options.master_addr,
        master_port=options.master_port or DEFAULT_PORT,
    )


def _several_hosts(options: LaunchOptions, environ: Mapping[str, str], pool: Pool) -> HostsPlan:
    exports = exported(environ, read_env_files(environ, home=Path.home(), here=Path.cwd()))
    secret = any(is_secret(name, value) for name, value in exports.items())  # pdsh would show it to everybody
    launcher = options.launcher or ("pdsh" if shutil.which("pdsh") and not secret else "ssh")
    if options.ssh_port is not None and launcher not in ("ssh", "pdsh"):
        raise ResourceError(
            f"--ssh_port is for ssh and pdsh; {launcher} reaches the hosts in its own way, use --launcher_args"
        )
    if not options.dry_run and shutil.which(PROGRAMS[launcher]) is None:
        raise ResourceError(
            f"--launcher {launcher} needs {PROGRAMS[launcher]!r} on the PATH; install it or choose another --launcher"
        )
    addr = options.master_addr or _first_address(options, launcher, tuple(pool), environ)
    port = options.master_port or _port_for(next(iter(pool)))
    run_id = uuid.uuid4().hex
    remote = Remote(
        hosts=tuple(pool),
        python=sys.executable,
        agent_args=_agent_args(options, pool, addr=addr, port=port, run_id=run_id),
        cwd=os.getcwd(),
        exports=exports,
        launcher_args=tuple(shlex.split(options.launcher_args)),
        ssh_port=options.ssh_port,
        venv_script=os.path.abspath(options.venv_script) if options.venv_script else "",
    )
    commands = tuple(BUILDERS[launcher](remote, environ))
    check_arguments(commands[-1], launcher, len(pool))
    return HostsPlan(launcher, remote, commands, addr, port, run_id)


def _agent_args(options: LaunchOptions, pool: Pool, *, addr: str, port: int, run_id: str) -> tuple[str, ...]:
    """The arguments of ``python -m dsx_launch.node`` that are the same on every host."""
    args = [
        f"--world_info={encode_world(pool)}",
        f"--master_addr={addr}",
        f"--master_port={port}",
        f"--run_id={run_id}",
    ]
    flags = {
        "--no_devices": options.num_procs is not None,
        "--no_local_rank": options.no_local_rank,
        "--bind_cores_to_rank": options.bind_cores_to_rank,
    }
    args += [name for name, given in flags.items() if given]
    elastic = elastic_of(options, len(pool)).to_text() if options.elastic_training else ""
    texts = {
        "--bind_core_list": options.bind_core_list,
        "--log_dir": _log_dir(options),
        "--output": output_of(options, max(map(len, pool.values()))).to_text(),
        "--elastic": elastic,
    }
    args += [f"{name}={text}" for name, text in texts.items() if text]
    args += [f"--kind={options.kind}", f"--log_level={'error' if options.quiet else options.log_level}"]
    return (*args, "--", options.script, *options.script_args)


def _port_for(first_host: str) -> int:
    return _free_port() if is_this_machine(first_host) else random.choice(_PORTS)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _first_address(options: LaunchOptions, launcher: str, hosts: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """The address of the first host for the others: its name if that can be resolved, otherwise the address that the
    host reports over ssh.
    """
    first = hosts[0]
    if first in (LOCALHOST, "127.0.0.1", "::1"):
        if all(is_this_machine(host) for host in hosts):
            return "127.0.0.1"
        raise ResourceError(
            f"the first host is {first!r}, a name the other hosts cannot use; put its network name into the hostfile or"
            " pass --master_addr"
        )
    if launcher not in ("ssh", "pdsh") or options.dry_run or _resolves(first):
        return first
    from .connections import ask_address  # lazy import: starts a process

    return ask_address(first, options, environ)


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
