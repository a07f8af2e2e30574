"""``dsx elastic``: choose batch sizes for a number of devices that changes. It also holds the store in which the hosts
of an elastic job meet.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta

from dsx_core import CommandParser

from .._version import __version__
from .api import ElasticityError, compute_elastic_config


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx elastic") -> int:
    """Print the section and what follows from it. Returns 1 where nothing does."""
    parser = CommandParser(
        prog=prog,
        version=f"dsx {__version__}",
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
    parser.add_argument("--json", action="store_true", help="print the batch as JSON")
    args = parser.parse_args(argv)
    if (args.config is None) == (args.rendezvous is None):
        parser.error("got " + ("neither" if args.config is None else "both") + ", expected --config or --rendezvous")
    if args.address and args.rendezvous is None:
        parser.error("got --address without --rendezvous")
    if args.config is None:
        return _hold_store(args.rendezvous, args.address)
    return _print_batch(args.config, args.world_size, args.json)


def _print_batch(config: str, world_size: int, as_json: bool) -> int:
    from ..config.source import read  # lazy import: `--help` needs none of it

    try:
        data = read(config).data
        found = compute_elastic_config(data, world_size=world_size, return_microbatch=world_size > 0)
    except (OSError, ElasticityError, ValueError) as error:
        sys.stderr.write(f"dsx elastic: {error}\n")
        return 1
    write = sys.stdout.write
    if as_json:
        names = ("final_batch_size", "valid_gpus", "micro_batch_size")
        write(json.dumps({"elasticity": data["elasticity"], **dict(zip(names, found))}, indent=2) + "\n")
        return 0
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
