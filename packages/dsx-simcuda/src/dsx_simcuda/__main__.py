"""`dsx simcuda`: run a program, and all that it starts, on a simulated CUDA device."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ._version import __version__
from .building import build, refuse_real_gpu
from .errors import SimcudaError
from .options import MODES, VARIABLES, Options

SITE = Path(__file__).resolve().parent / "site"


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [options] train.py [arguments]   (or -m MODULE, or -c CODE)",
        description="Run a PyTorch program on a CUDA device in software.",
        epilog="Processes that the program starts run on it too: `python -m dsx_simcuda -m torch.distributed.run"
        " --nproc-per-node 2 train.py`. Each has devices of its own. Exit status 86: the program was right but for its"
        " reports.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"dsx-simcuda {__version__}")
    parser.add_argument("--mode", choices=MODES, help="when streams run (default: random)")
    parser.add_argument("--seed", type=int, help="the seed of the random delays (default: 0)")
    parser.add_argument("--devices", type=int, help="devices per process (default: 1, under torchrun LOCAL_WORLD_SIZE)")
    parser.add_argument("--memory-mib", type=int, help="memory of each device (default: 2048)")
    parser.add_argument("--gbps", type=float, help="pace of copies between host and device (default: not paced)")
    parser.add_argument("--one-collective", action="store_true", default=None, help="one collective at a time")
    parser.add_argument("--report", metavar="FOLDER", help="write the reports of every process there (JSON and HTML)")
    parser.add_argument("--build", action="store_true", help="only build the native library, and say where it is")
    return parser


FLAGS = ("--one-collective", "--build", "-h", "--help", "-V", "--version")  # options without a value


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the program: what begins with a file, with -m or with -c."""
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word in ("-m", "-c") or not word.startswith("-"):
            break
        at += 1 if word in FLAGS or "=" in word else 2
    return arguments[:at], arguments[at:]


def environment(options: argparse.Namespace) -> dict[str, str]:
    """The environment in which a program and its children run on the simulated device."""
    variables = dict(os.environ)
    variables["DSX_SIMCUDA"] = "1"
    for name, variable in VARIABLES.items():
        value = getattr(options, name, None)
        if value is not None:
            variables[variable] = str(int(value) if isinstance(value, bool) else value)
    if options.report:
        variables["DSX_SIMCUDA_REPORT"] = str(Path(options.report).resolve())
    before = variables.get("PYTHONPATH")
    variables["PYTHONPATH"] = os.pathsep.join([str(SITE), *([before] if before else [])])
    return variables


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m dsx_simcuda") -> int:
    """Checks and builds here, once and with a message, then becomes the program."""
    own, program = _split(list(sys.argv[1:] if argv is None else argv))
    options = _parser(prog).parse_args(own)
    try:
        Options.from_environment(**{n: getattr(options, n) for n in VARIABLES if hasattr(options, n)})
        refuse_real_gpu()
        folder = build()
    except (SimcudaError, ValueError) as error:
        print(f"dsx-simcuda: {error}", file=sys.stderr)
        return 2
    if options.build:
        print(folder)
        return 0
    if not program:
        _parser(prog).error(f"which program? For example: {prog} train.py")
    os.execve(sys.executable, [sys.executable, *program], environment(options))


if __name__ == "__main__":
    sys.exit(main())
