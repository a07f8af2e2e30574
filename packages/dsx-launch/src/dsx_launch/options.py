"""The options of ``dsx launch``: their names, their help, and the checks that need nothing but the options themselves.

The names are those of the DeepSpeed launcher; every ``--long_name`` is also accepted as ``--long-name``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields

from dsx_core import CommandParser

from ._version import __version__
from .errors import ResourceError

_NAMES_ELSEWHERE = {
    "nproc-per-node": "--num_gpus N, or --num_procs N without devices",
    "nnodes": "--num_nodes N",
    "node-rank": "--node_rank N with --no_ssh",
    "rdzv-endpoint": "--master_addr ADDR and --master_port PORT",
    "max-restarts": "--elastic_training",
    "num-processes": "--num_gpus N, or --num_procs N without devices",
    "num-machines": "--num_nodes N",
    "main-process-port": "--master_port PORT",
    "redirects": "--enable_each_rank_log DIR",
    "log-dir": "--enable_each_rank_log DIR",
    "log-line-prefix-template": "--prefix_output",
}
"""Options of torchrun and `accelerate launch`, and what they are called here."""

DEFAULT_HOSTFILE = "/job/hostfile"
LAUNCHERS = ("ssh", "pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")
AUTOTUNING = ("tune", "run")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The values of the command line. Options that were not given are None (numbers) or empty (texts)."""

    script: str
    script_args: tuple[str, ...] = ()
    hostfile: str = ""
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    num_gpus: int | None = None
    num_procs: int | None = None
    master_addr: str = ""
    master_port: int | None = None
    node_rank: int | None = None
    launcher: str = ""
    launcher_args: str = ""
    module: bool = False
    no_python: bool = False
    no_local_rank: bool = False
    no_ssh: bool = False
    no_ssh_check: bool = False
    force_multi: bool = False
    save_pid: bool = False
    enable_each_rank_log: str = ""
    tee: int | None = None
    local_ranks_filter: str = ""
    prefix_output: bool = False
    max_output_lines: int | None = None
    bind_cores_to_rank: bool = False
    bind_core_list: str = ""
    ssh_port: int | None = None
    venv_script: str = ""
    log_level: str = "info"
    quiet: bool = False
    dry_run: bool = False
    restarts: int | None = None
    autotuning: str = ""
    elastic_training: bool = False
    min_elastic_nodes: int | None = None
    max_elastic_nodes: int | None = None

    @property
    def kind(self) -> str:
        """The kind of the script: "script", "module" or "program"."""
        return "module" if self.module else "program" if self.no_python else "script"

    @property
    def shown_ranks(self) -> tuple[int, ...] | None:
        """The local ranks of which output is shown; None: all. Raises `ResourceError` for anything but numbers."""
        words = [word.strip() for word in self.local_ranks_filter.split(",")] if self.local_ranks_filter else []
        if not all(word.isdecimal() and word.isascii() for word in words):
            raise ResourceError(
                f"--local_ranks_filter: got {self.local_ranks_filter!r}, expected numbers of processes on each host,"
                " such as 0 or 0,1"
            )
        return tuple(sorted({int(word) for word in words})) or None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the launcher's options, the script and its arguments to ``parser``."""
    _add_resources(parser)
    _add_hosts(parser)
    _add_elastic(parser)
    _add_program(parser)
    _add_output(parser)
    add_program(parser)


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add an argument for the script and all words after it. argparse keeps a ``--`` only with ``nargs=PARSER``."""
    parser.add_argument(
        "command",
        nargs=argparse.PARSER,
        metavar="script",
        help="the program every process runs (a path; a module name with --module), and its arguments",
    )


def split_program(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The script and its arguments; a ``--`` before the script only ends the options."""
    script, *args = words[1:] if words[0] == "--" and len(words) > 1 else words
    return script, tuple(args)


def _option(group: argparse._ArgumentGroup, *names: str, **kwargs: object) -> None:
    dashed = [name.replace("_", "-") for name in names if "_" in name]
    group.add_argument(*names, *dashed, **kwargs)  # type: ignore[arg-type]


def _add_resources(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which hosts and devices")
    _option(
        group, "-H", "--hostfile", default="", help=f"lines 'host slots=N' (default: {DEFAULT_HOSTFILE} if it exists)"
    )
    _option(group, "-i", "--include", default="", metavar="FILTER", help="use only these: host@host:slot,slot")
    _option(group, "-e", "--exclude", default="", metavar="FILTER", help="use all but these; excludes --include")
    _option(group, "--num_nodes", type=int, metavar="N", help="use the first N hosts")
    _option(
        group,
        "--num_gpus",
        "--num_accelerators",
        dest="num_gpus",
        type=int,
        metavar="N",
        help="use the first N devices of each host",
    )
    _option(group, "--num_procs", type=int, metavar="N", help="start N processes per host that own no device (CPU)")
    _option(group, "--bind_cores_to_rank", action="store_true", help="pin each process to its share of the cores")
    _option(
        group,
        "--bind_core_list",
        default="",
        metavar="LIST",
        help="the cores to share out, such as 0-3,8 (implies --bind_cores_to_rank)",
    )


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reaching several hosts")
    _option(
        group,
        "--launcher",
        default="",
        choices=LAUNCHERS,
        help="what starts the hosts (default: pdsh if installed, else ssh)",
    )
    _option(group, "--launcher_args", default="", metavar="TEXT", help="further arguments for it, as one text")
    _option(
        group, "--master_addr", default="", metavar="ADDR", help="address of the first host, as the others reach it"
    )
    _option(group, "--master_port", type=int, metavar="PORT", help="port of the rendezvous (default: a free one)")
    _option(group, "--node_rank", type=int, metavar="N", help="which host of the list this one is (with --no_ssh)")
    _option(
        group,
        "--no_ssh",
        action="store_true",
        help="start only this host's processes; the same command is run on every host",
    )
    _option(group, "--no_ssh_check", action="store_true", help="do not test the connection to every host first")
    _option(group, "--force_multi", action="store_true", help="go through the launcher even for one host")
    _option(group, "--ssh_port", type=int, metavar="PORT", help="port of the ssh servers")
    _option(
        group, "--venv_script", default="", metavar="FILE", help="sourced on every host first; its python runs the job"
    )


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hosts that come and go")
    _option(
        group,
        "--elastic_training",
        action="store_true",
        help="start the processes again when one fails or a host arrives or leaves (see docs/guides/elasticity.md)",
    )
    _option(group, "--min_elastic_nodes", type=int, metavar="N", help="least number of hosts (default: 1)")
    _option(group, "--max_elastic_nodes", type=int, metavar="N", help="greatest number (default: all that are known)")


def _add_program(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the program")
    _option(group, "--module", action="store_true", help="the script is a module name, run as python -m")
    _option(group, "--no_python", action="store_true", help="the script is an executable, run without python")
    _option(
        group,
        "--autotuning",
        default="",
        choices=AUTOTUNING,
        help="search for a good configuration by starting the script several times; run: then start it with that",
    )
    _option(
        group,
        "--restarts",
        type=int,
        metavar="N",
        help="start the processes again, up to N times, when they end with exit code 75 (preempted, saved); with"
        " --elastic_training: after N failures in a row without a new snapshot the job ends (default: 3)",
    )
    _option(group, "--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    _option(
        group,
        "--save_pid",
        action="store_true",
        help="keep this process's id in <temporary folder>/<id>.dsx while it runs",
    )
    _option(
        group,
        "--log_level",
        default="info",
        choices=LOG_LEVELS,
        help="how much the launcher itself says (default: info)",
    )
    _option(group, "-q", "--quiet", action="store_true", help="the launcher says nothing but errors")
    _option(group, "--dry_run", action="store_true", help="print every command and start nothing")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the output of the processes")
    _option(
        group,
        "--enable_each_rank_log",
        default="",
        metavar="DIR",
        help="write each process's output to DIR/rank<N>.log",
    )
    _option(
        group,
        "--tee",
        type=int,
        choices=(0, 1, 2, 3),
        help="with --enable_each_rank_log: show it too, as --prefix_output does (1: stdout, 2: stderr, 3: both)",
    )
    _option(group, "--prefix_output", action="store_true", help="show whole lines that begin with [rank N]")
    _option(
        group,
        "--local_ranks_filter",
        default="",
        metavar="N,N",
        help="show only the output of these processes of each host, counted from 0",
    )
    _option(
        group,
        "--max_output_lines",
        type=int,
        metavar="N",
        help="show at most N lines of each process in a second, and count the others (implies --prefix_output)",
    )


def options_from(namespace: argparse.Namespace) -> LaunchOptions:
    """Check a parsed command line. Raises `ResourceError` for combinations that contradict each other."""
    values = dict(vars(namespace))
    fields = LaunchOptions.__dataclass_fields__
    known = {name: value for name, value in values.items() if name in fields}
    for name in ("num_nodes", "num_gpus", "node_rank", "min_elastic_nodes", "max_elastic_nodes"):
        known[name] = None if known[name] == -1 else known[name]  # DeepSpeed writes its default as -1
    script, args = split_program(values["command"])
    options = LaunchOptions(**known, script=script, script_args=args)
    check_options(options)
    return options


def to_argv(options: LaunchOptions, script_args: Sequence[str]) -> list[str]:
    """A command line for `options`, with other arguments of the script."""
    words = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in ("script", "script_args") or value == field.default:
            continue
        words.append(f"--{field.name}" if value is True else f"--{field.name}={value}")
    return [*words, "--", options.script, *script_args]


def check_options(options: LaunchOptions) -> None:
    """Raise `ResourceError` for options that contradict each other."""
    filters = "--include/--exclude"
    counts = {"--num_nodes": options.num_nodes, "--num_gpus": options.num_gpus}
    given = [name for name, value in counts.items() if value is not None]
    if (options.include or options.exclude) and given:
        raise ResourceError(
            f"{filters} and {given[0]} exclude each other: a filter already says which hosts and slots; got both"
        )
    if options.include and options.exclude:
        raise ResourceError("--include and --exclude exclude each other; got both, pass one")
    if options.num_gpus is not None and options.num_procs is not None:
        raise ResourceError("--num_gpus counts devices, --num_procs processes without devices; got both, pass one")
    if options.restarts is not None and options.restarts < 0:
        raise ResourceError(f"--restarts: got {options.restarts}, expected 0 or more")
    _check_elastic(options)
    _check_output(options)
    if options.module and options.no_python:
        raise ResourceError("--module runs python -m, --no_python runs no python; got both, pass one")
    for name in ("num_nodes", "num_gpus", "num_procs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ResourceError(f"--{name} {value}: expected at least 1 (leave the option out for all)")
    for name in ("master_port", "ssh_port"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= 65535:
            raise ResourceError(f"--{name} {value}: expected a port between 1 and 65535")
    if options.no_ssh and not options.master_addr:
        raise ResourceError(
            "--no_ssh needs --master_addr, the address of the first host: the hosts have no other way to meet"
        )
    if options.node_rank is not None and not options.no_ssh:
        raise ResourceError(
            "--node_rank says which host this is when the command is run on each of them; it needs --no_ssh"
        )


def _check_output(options: LaunchOptions) -> None:
    if options.max_output_lines is not None and options.max_output_lines < 1:
        raise ResourceError(
            f"--max_output_lines {options.max_output_lines}: expected at least 1 (leave the option out for all lines)"
        )
    shown = {
        "--prefix_output": options.prefix_output,
        "--local_ranks_filter": options.shown_ranks is not None,
        "--max_output_lines": options.max_output_lines is not None,
    }
    given = [name for name, value in shown.items() if value]
    if options.tee and not options.enable_each_rank_log:
        raise ResourceError(
            "--tee shows what goes into the files of --enable_each_rank_log DIR, which is not given; add it, or use"
            " --prefix_output, which needs no files"
        )
    if given and options.enable_each_rank_log and not options.tee:
        raise ResourceError(
            f"{given[0]} is about output that is shown, and --enable_each_rank_log sends all of it to files; add"
            " --tee 3 to show it too"
        )


def _check_elastic(options: LaunchOptions) -> None:
    low, high = options.min_elastic_nodes, options.max_elastic_nodes
    for name, value in (("--min_elastic_nodes", low), ("--max_elastic_nodes", high)):
        if value is not None and not options.elastic_training:
            raise ResourceError(f"{name} needs --elastic_training; add it, or leave {name} out")
        if value is not None and value < 1:
            raise ResourceError(f"{name} {value}: expected at least 1")
    if low is not None and high is not None and low > high:
        raise ResourceError(f"--min_elastic_nodes {low} is more than --max_elastic_nodes {high}; exchange them")
    if options.elastic_training and options.launcher not in ("", "ssh"):
        raise ResourceError(
            f"--elastic_training: {options.launcher} ends all hosts when one is lost; use --launcher ssh, or start the"
            " same command on every host with --no_ssh"
        )
    if options.elastic_training and options.node_rank is not None:
        raise ResourceError("--elastic_training: hosts get new numbers in each round; leave --node_rank out")


_LAUNCH = "Start a program on every device of this machine, or of the hosts of a hostfile."
_AUTOTUNE = (
    "Search for the configuration with which a program is fastest. Trials are started on the devices that the options"
    " below choose, as dsx launch --autotuning tune does; the section autotuning of the configuration says what to try."
)


class _Parser(CommandParser):
    """Also knows the names that other launchers give to our options."""

    def meant(self, word: str) -> str:
        """The name to use instead of an unknown option; empty if nothing is like it."""
        return _NAMES_ELSEWHERE.get(word[2:].partition("=")[0].replace("_", "-"), "") or super().meant(word)


def parse(argv: Sequence[str], *, prog: str = "dsx launch") -> LaunchOptions:
    """Parse and check a command line (without the program's name)."""
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        description=_AUTOTUNE if prog == "dsx autotune" else _LAUNCH,
        usage=f"{prog} [options] script [script arguments]",
        version=f"dsx-launch {__version__}",
    )
    add_arguments(parser)
    return options_from(parser.parse_args(argv))
