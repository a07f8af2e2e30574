"""The first code of every rank: prepares the process, then *is* the user's program.

It is run by path (``python -u .../_worker.py train.py args``) and uses only the standard library, so that a rank starts
as fast as the program alone. In this order it asks the kernel to kill it when the launcher dies, redirects the output
if asked, pins cores, completes the environment, and runs the program as ``__main__``. An uncaught exception of the
program is written to a file instead of the terminal; the launcher prints the first one, once. Programs that are not
Python (``--no_python``) replace this process.

Left out: restarting, timeouts, log rotation. Those belong to the launcher's agent or to the program.
"""

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this folder: its modules must not be found by the user's imports

import builtins
import contextlib
import faulthandler
import io
import json
import os
import runpy
import signal
import time
import traceback
import types
from importlib.machinery import SourceFileLoader

SPEC_VARIABLE = "DSX_WORKER"
EXIT_AFTER_FAILURE_S = 3  # a failed rank that hangs in its own clean-up is ended by the kernel


def main() -> None:
    """Prepare this process and run the program."""
    spec = json.loads(os.environ.pop(SPEC_VARIABLE))
    local_rank = int(os.environ["LOCAL_RANK"])
    die_with_parent(spec["agent_pid"])
    redirect_output(spec, local_rank)
    if spec["cores"]:
        os.sched_setaffinity(0, spec["cores"][local_rank])
    complete_environment(spec)
    args = sys.argv[2:]
    if spec["pass_local_rank"]:
        args = [f"--local_rank={local_rank}", *args]
    faulthandler.enable(all_threads=True)
    run_recorded(spec, sys.argv[1], args)


def die_with_parent(agent_pid: int) -> None:
    """Ask the kernel to kill this process when the launcher's agent dies (Linux only; elsewhere the agent cleans
    up).
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # lazy import: only here

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != agent_pid:  # the agent died before the request took effect
        os._exit(1)


def redirect_output(spec: dict, local_rank: int) -> None:
    """Send this rank's stdout and stderr to the pipes of its agent, to ``log_dir/rank<N>.log`` in the order they are
    written, or nowhere. Without such a wish they stay what they are.
    """
    shown = spec["shown"] is None or local_rank in spec["shown"]
    if shown and spec["pipes"]:
        for number, name in ((1, "stdout"), (2, "stderr")):
            write_to(os.path.join(spec["pipes"], f"{local_rank}.{name}"), 0, number)
    elif spec["log_dir"]:
        os.makedirs(spec["log_dir"], exist_ok=True)
        path = os.path.join(spec["log_dir"], f"rank{os.environ['RANK']}.log")
        write_to(path, os.O_CREAT | os.O_TRUNC, 1, 2)
    elif not shown:
        write_to(os.devnull, 0, 1, 2)


def write_to(path: str, flags: int, *descriptors: int) -> None:
    opened = os.open(path, os.O_WRONLY | flags, 0o644)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    os.close(opened)


def complete_environment(spec: dict) -> None:
    """Set variables that scripts expect in addition to those of the elastic agent. Values that the user set are
    kept.
    """
    env = os.environ
    env["CROSS_RANK"], env["CROSS_SIZE"] = env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]
    env["LOCAL_SIZE"] = env["LOCAL_WORLD_SIZE"]
    if "round" in spec:
        # torch puts it before the ranks' keys in their store; agents count their own restarts, so hosts would differ.
        env["TORCHELASTIC_RESTART_COUNT"] = str(spec["round"])
    if sys.platform.startswith("linux") and env.get("MASTER_ADDR", "").startswith("127."):
        env.setdefault(
            "GLOO_SOCKET_IFNAME", "lo"
        )  # all ranks are on this machine: gloo need not be reached from others
    if spec["devices"] is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(spec["devices"])
    threads = threads_of_a_rank(spec["cores"], int(env["LOCAL_SIZE"]))
    if threads:
        env["OMP_NUM_THREADS"] = threads


def threads_of_a_rank(cores: list, ranks: int) -> str:
    """The number of OpenMP's threads in each of this host's ranks; empty where it is left as it is."""
    if "OMP_NUM_THREADS" in os.environ or not (cores or ranks > 1):
        return ""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return str(len(cores[0]) if cores else max(1, available // ranks))


def run_recorded(spec: dict, target: str, args: list) -> None:
    try:
        run(spec["kind"], target, args)
    except SystemExit:
        raise
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # the user pressed Ctrl-C once: no traceback from every rank
    except BaseException as error:  # noqa: BLE001 - whatever leaves the program is its failure
        record(spec["failure_dir"], error)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(EXIT_AFTER_FAILURE_S)
        sys.exit(1)


def run(kind: str, target: str, args: list) -> None:
    """Run the program: ``script`` (a path), ``module`` (as ``python -m``) or ``program`` (any executable)."""
    if kind == "program":
        run_program(target, args)
    sys.argv = [target, *args]
    if kind == "module":
        add_to_path(os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif os.path.isdir(target) or target.endswith((".zip", ".pyz")):
        runpy.run_path(target, run_name="__main__")
    else:
        run_script(target)


def run_program(target: str, args: list) -> None:
    """Replace this process by another program; an error names that program."""
    try:
        os.execvp(target, [target, *args])
    except OSError as error:
        raise type(error)(error.errno, f"{error.strerror}: the program of --no_python", target) from None


def run_script(path: str) -> None:
    """Execute the file in a fresh ``__main__`` that stays until the process ends, so that pickling and spawning find
    it.
    """
    add_to_path(os.path.dirname(os.path.realpath(path)))
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    vars(module).update(__builtins__=builtins, __cached__=None)
    sys.modules["dsx_worker"] = sys.modules["__main__"]  # keeps this module's names alive
    sys.modules["__main__"] = module
    with io.open_code(os.path.abspath(path)) as source:
        code = compile(source.read(), path, "exec", dont_inherit=True)
    exec(code, vars(module))


def add_to_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def record(folder: str, error: BaseException) -> None:
    """Write the failure to ``folder/rank<N>.json``, atomically; to stderr if that is impossible."""
    env = os.environ
    failure = {
        "rank": int(env["RANK"]),
        "local_rank": int(env["LOCAL_RANK"]),
        "pid": os.getpid(),
        "time": time.time(),
        "type": type(error).__name__,
        "message": text_of(error),
        "traceback": describe(error),
    }
    path = os.path.join(folder, f"rank{env['RANK']}.json")  # written without dsx_core: see the head of this file
    try:
        with open(path + ".part", "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(failure, file)
        os.replace(path + ".part", path)
    except OSError:
        sys.stderr.write(failure["traceback"])


def text_of(error: BaseException) -> str:
    """The error's message. An error whose ``__str__`` fails must be reported too."""
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 - the user's __str__ may raise anything
        return f"<its message cannot be shown: __str__ raised {type(second).__name__}>"


def describe(error: BaseException) -> str:
    """The traceback without this file's frames, as the program's own ``sys.excepthook`` prints it if it has set one."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        tb = tb.tb_next
    if sys.excepthook is not sys.__excepthook__:
        text = io.StringIO()
        with contextlib.redirect_stderr(text), contextlib.suppress(Exception):
            sys.excepthook(type(error), error.with_traceback(tb), tb)
        if text.getvalue():
            return text.getvalue().replace(f"[rank{os.environ['RANK']}]: ", "")  # torch's hook adds this prefix
    return "".join(traceback.format_exception(type(error), error, tb))


if __name__ == "__main__":
    main()
