"""The agent of one host as a command. ssh, pdsh, srun or mpirun start it once per host.

``python -m dsx_launch.node --world_info=... --master_addr=... --master_port=... [--node_rank=N] -- script args``.
People do not type this command; ``dsx launch --dry_run`` shows the full lines.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence

from .binding import cores_for
from .devices import device_count, devices_for
from .elastic_settings import Elastic
from .errors import LaunchError, ResourceError
from .host import HostJob, Program, run_host
from .host_rank import host_rank_from
from .logs import configure_logging, import_torch_quietly
from .options import add_program, split_program
from .output import Output
from .resources import decode_world


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dsx_launch.node", allow_abbrev=False)
    parser.add_argument("--world_info", required=True)
    parser.add_argument("--master_addr", required=True)
    parser.add_argument("--master_port", type=int, required=True)
    parser.add_argument("--run_id", required=True)
    parser.add_argument("--node_rank", type=int)
    parser.add_argument("--rank_from", default="", choices=("", "mpi", "slurm"))
    parser.add_argument("--no_devices", action="store_true")
    parser.add_argument("--no_local_rank", action="store_true")
    parser.add_argument("--bind_cores_to_rank", action="store_true")
    parser.add_argument("--bind_core_list", default="")
    parser.add_argument("--log_dir", default="")
    parser.add_argument("--output", default="", metavar="RANKS:PREFIX:MOST:TEE")
    parser.add_argument("--log_level", default="info")
    parser.add_argument("--kind", default="script")
    parser.add_argument("--watch_stdin", action="store_true")
    parser.add_argument("--elastic", default="", metavar="MIN:MAX:RESTARTS")
    add_program(parser)
    return parser


def job_from(args: argparse.Namespace, environ: Mapping[str, str]) -> HostJob:
    """This host's part of the job. Raises `ResourceError` if the host has too few devices for its slots."""
    script, script_args = split_program(args.command)
    pool = decode_world(args.world_info)
    hosts = tuple(pool)
    rank = args.node_rank if args.node_rank is not None else host_rank_from(environ, hosts, args.rank_from)
    if not 0 <= rank < len(hosts):
        raise ResourceError(f"this host is number {rank}, but the job has {len(hosts)} hosts: {', '.join(hosts)}")
    slots = pool[hosts[rank]]
    devices = None if args.no_devices else devices_for(slots, environ, device_count(environ))
    return HostJob(
        program=Program(script, script_args, kind=args.kind, pass_local_rank=not args.no_local_rank),
        procs=len(slots),
        hosts=hosts,
        host_rank=rank,
        devices=devices,
        cores=cores_for(len(slots), bind=args.bind_cores_to_rank, core_list=args.bind_core_list),
        log_dir=args.log_dir,
        output=Output.from_text(args.output),
        master_addr=args.master_addr,
        master_port=args.master_port,
        run_id=args.run_id,
    )


def follow_stdin() -> None:
    """Stop this process when its standard input ends: the launcher, or the connection to it, is gone.

    The ranks are stopped as if the user had asked for it on this host. Their own standard input is empty.
    """
    lifeline = os.dup(0)
    os.set_inheritable(lifeline, False)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    threading.Thread(target=_follow, args=(lifeline,), name="dsx-lifeline", daemon=True).start()


def _follow(lifeline: int) -> None:
    while os.read(lifeline, 64):
        continue
    os.kill(os.getpid(), signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks of this host. Returns the exit code."""
    args = _parser().parse_args(argv)
    configure_logging(args.log_level)
    if args.watch_stdin:
        follow_stdin()
    try:
        job = job_from(args, os.environ)
        if args.elastic:
            from .elastic import run_elastic_host

            return run_elastic_host(job, Elastic.from_text(args.elastic))
        import_torch_quietly()
        return run_host(job)
    except (LaunchError, ResourceError) as error:
        sys.stderr.write(f"dsx launch: {os.uname().nodename}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
