"""``dsx elastic`` (and ``ds_elastic``): the batch of a configuration with elasticity, and the numbers of devices."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from .api import ElasticityError, compute_elastic_config


def main(argv: Sequence[str] | None = None) -> int:
    """Print the section and what follows from it. Returns 1 where nothing does."""
    parser = argparse.ArgumentParser(prog="dsx elastic", description="Batch sizes for any number of devices.")
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="a configuration with elasticity")
    parser.add_argument(
        "-w", "--world-size", type=int, default=0, metavar="N", help="number of devices; version 0.2 needs it"
    )
    args = parser.parse_args(argv)
    from ..config.source import read  # late: `--help` needs none of it

    try:
        data = read(args.config).data
        found = compute_elastic_config(data, world_size=args.world_size, return_microbatch=args.world_size > 0)
    except (OSError, ElasticityError, ValueError) as error:
        sys.stderr.write(f"dsx elastic: {error}\n")
        return 1
    write = sys.stdout.write
    write(f"Elasticity config:\n{json.dumps(data['elasticity'], indent=4, sort_keys=True)}\n")
    write(f"final_batch_size .... {found[0]}\nvalid_gpus .......... {found[1]}\n")
    if len(found) == 3:
        write(f"micro_batch_size .... {found[2]}\n")
    return 0
