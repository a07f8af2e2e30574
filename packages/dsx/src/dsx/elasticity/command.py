"""``dsx elastic`` (and ``ds_elastic``): the batch of a configuration with elasticity, and the numbers of devices; or
the store in which the hosts of an elastic job meet.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta

from .api import ElasticityError, compute_elastic_config


def main(argv: Sequence[str] | None = None) -> int:
    """Print the section and what follows from it. Returns 1 where nothing does."""
    parser = argparse.ArgumentParser(
        prog="dsx elastic",
        description="Batch sizes for any number of devices; or a meeting point for hosts that come and go.",
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="a configuration with elasticity")
    parser.add_argument(
        "-w", "--world-size", type=int, default=0, metavar="N", help="number of devices; version 0.2 needs it"
    )
    parser.add_argument(
        "--rendezvous",
        metavar="PORT",
        type=int,
        help="hold the store of elastic jobs on this port until ended (0: a free one); no host of a job need stay then",
    )
    parser.add_argument(
        "--address",
        default="",
        help="with --rendezvous: listen at this address only (default: all; who reaches the port can end the jobs)",
    )
    args = parser.parse_args(argv)
    if (args.config is None) == (args.rendezvous is None):
        parser.error("got " + ("neither" if args.config is None else "both") + ", expected --config or --rendezvous")
    if args.address and args.rendezvous is None:
        parser.error("got --address without --rendezvous")
    if args.config is None:
        return _hold_store(args.rendezvous, args.address)
    return _print_batch(args.config, args.world_size)


def _print_batch(config: str, world_size: int) -> int:
    from ..config.source import read  # lazy import: `--help` needs none of it

    try:
        data = read(config).data
        found = compute_elastic_config(data, world_size=world_size, return_microbatch=world_size > 0)
    except (OSError, ElasticityError, ValueError) as error:
        sys.stderr.write(f"dsx elastic: {error}\n")
        return 1
    write = sys.stdout.write
    write(f"Elasticity config:\n{json.dumps(data['elasticity'], indent=4, sort_keys=True)}\n")
    write(f"final_batch_size .... {found[0]}\nvalid_gpus .......... {found[1]}\n")
    if len(found) == 3:
        write(f"micro_batch_size .... {found[2]}\n")
    return 0


def _hold_store(port: int, address: str) -> int:
    """Serve a store until SIGTERM or Ctrl-C. Returns 1 where the port is taken."""
    if not 0 <= port <= 65535:
        sys.stderr.write(f"dsx elastic --rendezvous {port}: expected a port between 0 and 65535\n")
        return 1
    from dsx_launch.listening import store_at  # lazy import: seconds

    try:
        store = store_at(address, port, timedelta(minutes=1))
    except OSError as error:
        place = f"{address}:{port}" if address else str(port)
        sys.stderr.write(f"dsx elastic --rendezvous {port}: cannot listen at {place}: {error}\n")
        return 1
    sys.stdout.write(f"rendezvous on port {store.port}\n")
    sys.stdout.flush()
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    return 0
