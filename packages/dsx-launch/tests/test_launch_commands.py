"""The exact commands of every way to reach other hosts, and what arrives at the programs they start."""

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from dsx_launch import ResourceError
from dsx_launch.environment import exported
from dsx_launch.hosts import run_hosts, start_client
from dsx_launch.main import main
from dsx_launch.options import parse
from dsx_launch.plan import HostsPlan, make_plan
from dsx_launch.resources import decode_world
from dsx_launch.runners import BUILDERS, PROGRAMS, Remote
from dsx_launch.runners.base import Command

REMOTE = Remote(
    hosts=("a", "b"),
    python="/py",
    agent_args=("--world_info=W", "--", "train.py", "x y", "50%n"),
    cwd="/my dir",
    exports={"NCCL_DEBUG": "INFO", "UCX_NET": "mlx5_0:1,mlx5_1:1"},
    launcher_args=("--extra", "1"),
)
AGENT = ("/py", "-u", "-m", "dsx_launch.node")
TAIL = ("--world_info=W", "--", "train.py", "x y", "50%n")
EXPORTS = "export NCCL_DEBUG=INFO && export UCX_NET=mlx5_0:1,mlx5_1:1"


def script(*extra: str, tail: str = "--world_info=W -- train.py 'x y' 50%n", exports: str = EXPORTS) -> str:
    steps = f"cd '/my dir' && {exports} && exec /py -u -m dsx_launch.node"
    return f"sh -c {shlex.quote(' '.join([steps, *extra, tail]))}"


def test_ssh_one_client_per_host_with_a_lifeline():
    first, second = BUILDERS["ssh"](REMOTE, {})
    read = f'eval "$(head -c {len(EXPORTS)})"'
    assert first == Command(
        ("ssh", "-o", "BatchMode=yes", "--extra", "1", "a", script("--node_rank=0", "--watch_stdin", exports=read)),
        host="a",
        lifeline=True,
        exports=REMOTE.exports,
    )
    assert second.argv[-2:] == ("b", script("--node_rank=1", "--watch_stdin", exports=read))


def test_ssh_port_and_environment_script():
    remote = Remote(
        hosts=("a",), python="/py", agent_args=("t.py",), cwd="/", ssh_port=2222, venv_script="/v/bin/activate"
    )
    (command,) = BUILDERS["ssh"](remote, {})
    assert command.argv[3:6] == ("-p", "2222", "a")
    inner = shlex.split(shlex.split(command.argv[-1])[2].split(" && exec ", 1)[1])
    assert inner == [
        "bash",
        "-c",
        ". /v/bin/activate && exec python -u -m dsx_launch.node --node_rank=0 --watch_stdin t.py",
    ]


def test_pdsh_doubles_percent_signs_and_appends_to_the_users_arguments():
    remote = Remote(**{**vars(REMOTE), "ssh_port": 2222})
    (command,) = BUILDERS["pdsh"](remote, {"PDSH_SSH_ARGS_APPEND": "-v -F cfg"})
    expected = script("--node_rank=%n", "--watch_stdin", tail="--world_info=W -- train.py 'x y' 50%%n")
    assert command.argv == ("pdsh", "-S", "-b", "-f", "2", "-w", "a,b", "--extra", "1", expected)
    assert command.env == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-v -F cfg -p 2222"}
    (without,) = BUILDERS["pdsh"](REMOTE, {"PDSH_RCMD_TYPE": "exec", "PDSH_SSH_ARGS_APPEND": "-v"})
    assert without.env == {}


def test_openmpi_leaves_transports_alone():
    (command,) = BUILDERS["openmpi"](REMOTE, {})
    placing = ("mpirun", "-n", "2", "--host", "a:1,b:1", "--map-by", "ppr:1:node", "--bind-to", "none")
    exports = ("-x", "NCCL_DEBUG", "-x", "UCX_NET")
    assert command.argv == (*placing, *exports, "--extra", "1", *AGENT, "--rank_from=mpi", *TAIL)
    assert "btl" not in " ".join(command.argv) and "UCX_TLS" not in " ".join(command.argv)


def test_hydra_family():
    exports = dict(REMOTE.exports)
    placing = ("mpirun", "-n", "2", "-ppn", "1", "-hosts", "a,b")
    end = ("--extra", "1", *AGENT, "--rank_from=mpi", *TAIL)
    assert BUILDERS["mpich"](REMOTE, {}) == [Command((*placing, "-genvall", *end), env=exports)]
    (pinned,) = BUILDERS["impi"](REMOTE, {})
    assert pinned.argv == (*placing, "-genvlist", "I_MPI_PIN,NCCL_DEBUG,UCX_NET", *end)
    assert pinned.env == {"I_MPI_PIN": "0", **exports}
    assert BUILDERS["impi"](REMOTE, {"I_MPI_PIN": "1"})[0].argv == (*placing, "-genvlist", "NCCL_DEBUG,UCX_NET", *end)
    mvapich = Command((*placing, "-genvall", *end), env={"MV2_ENABLE_AFFINITY": "0", **exports})
    assert BUILDERS["mvapich"](REMOTE, {}) == [mvapich]
    alone = Remote(**{**vars(REMOTE), "exports": {}})
    assert BUILDERS["mpich"](alone, {}) == [Command((*placing, *end))]


SECRETS = {
    "MLFLOW_TRACKING_TOKEN": "hidden-1", "MLFLOW_TRACKING_PASSWORD": "hidden-2", "WANDB_API_KEY": "hidden-3",
    "MLFLOW_TRACKING_URI": "https://me:hidden-4@host", "NCCL_DEBUG": "INFO",
}  # fmt: skip


@pytest.mark.parametrize("launcher", sorted(BUILDERS))
def test_secrets_stand_on_no_command_line_and_are_not_shown(launcher, tmp_path, monkeypatch, capsys):
    remote = Remote(**{**vars(REMOTE), "exports": SECRETS})
    if launcher == "pdsh":
        with pytest.raises(ResourceError, match=r"would show MLFLOW_TRACKING_TOKEN, .*--launcher ssh"):
            BUILDERS[launcher](remote, {})
        return
    for command in BUILDERS[launcher](remote, {}):
        assert "hidden" not in " ".join(command.argv)
        assert {**command.env, **command.exports}.items() >= SECRETS.items()
        text = command.shell_text()
        assert "hidden" not in text and "NCCL_DEBUG=INFO" in text and "MLFLOW_TRACKING_TOKEN='***'" in text


def test_pdsh_is_not_chosen_where_there_are_secrets(tmp_path, monkeypatch):
    (tmp_path / "pdsh").write_text("")
    (tmp_path / "pdsh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    options = parse(["-H", hostfile(tmp_path), "--dry_run", "t.py"])
    assert make_plan(options, {}).launcher == "pdsh"
    assert make_plan(options, {"MLFLOW_TRACKING_TOKEN": "x"}).launcher == "ssh"


def test_a_difference_to_the_file_is_logged_without_secrets(caplog):
    with caplog.at_level("WARNING", "dsx.launcher"):
        exported({"MLFLOW_TRACKING_TOKEN": "hidden-0", "NCCL_DEBUG": "INFO"}, {**SECRETS, "NCCL_DEBUG": "WARN"})
    assert "MLFLOW_TRACKING_TOKEN" in caplog.text and "'INFO'" in caplog.text and "hidden" not in caplog.text


def test_variables_arrive_over_ssh_as_they_are(tmp_path):
    """Through the shell that the remote side runs: quotes, lines, dollars, letters; and the agent gets what follows."""
    awkward = {"A": 'it\'s "$HOME" `x` \\ *', "B": "two\nlines\n", "C": "grüße ☂", "D": "", "E": "x" * 100_000}
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/tell.py\n")
    (tmp_path / "tell.py").write_text(
        "import json, os, sys\nprint(json.dumps([{name: os.environ[name] for name in 'ABCDE'}, sys.stdin.read()]))"
    )
    python.chmod(0o755)
    remote = Remote(hosts=("a",), python=str(python), agent_args=(), cwd=str(tmp_path), exports=awkward)
    (command,) = BUILDERS["ssh"](remote, {})
    told = Command(("sh", "-c", command.argv[-1]), lifeline=True, exports=command.exports)
    reading, writing = os.pipe()
    client = start_client(told, os.environ, stdout=writing)
    os.close(writing)
    client.stdin.write(b"more")
    client.stdin.close()
    with open(reading) as said:
        arrived, rest = json.loads(said.read())
    assert client.wait() == 0 and arrived == awkward and rest == "more"


def test_slurm_carries_variables_in_the_environment():
    (command,) = BUILDERS["slurm"](REMOTE, {"SLURM_CPUS_ON_NODE": "16"})
    tasks = ("--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1", "--nodelist", "a,b", "--cpus-per-task", "16")
    options = ("--kill-on-bad-exit=1", "--export=ALL", "--chdir=/my dir", "--extra", "1")
    assert command.argv == ("srun", *tasks, *options, *AGENT, "--rank_from=slurm", *TAIL)
    assert command.env == dict(REMOTE.exports)


def hostfile(folder: Path, text: str = "node-a slots=4\nnode-b slots=2\n") -> str:
    path = folder / "hosts"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("launcher", sorted(BUILDERS))
def test_dry_run_prints_every_command_and_starts_nothing(launcher, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))  # nothing could be started
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    argv = [
        "-H",
        hostfile(tmp_path),
        "--launcher",
        launcher,
        "--master_port",
        "31000",
        "--dry_run",
        "train.py",
        "--lr",
        "1e-3",
    ]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (2 if launcher == "ssh" else 1)
    for line in lines:
        assert PROGRAMS[launcher] in line and "--master_port=31000" in line and "NCCL_DEBUG" in line
        assert "train.py --lr 1e-3" in line


def test_world_info_and_addresses_of_a_plan(tmp_path):
    options = parse(
        ["-H", hostfile(tmp_path), "--include", "node-a:1,3@node-b", "--launcher", "ssh", "--dry_run", "t.py"]
    )
    plan = make_plan(options, {})
    assert isinstance(plan, HostsPlan)
    assert plan.master_addr == "node-a" and 20000 <= plan.master_port < 32768
    (world,) = (arg.partition("=")[2] for arg in plan.remote.agent_args if arg.startswith("--world_info="))
    assert decode_world(world) == {"node-a": ("1", "3"), "node-b": ("0", "1")}


def test_mistakes_in_a_plan(tmp_path, monkeypatch, capsys):
    path = hostfile(tmp_path)
    assert main(["-H", str(tmp_path / "gone"), "t.py"]) == 2
    assert main(["--num_nodes", "2", "t.py"]) == 2
    assert main(["-H", path, "--launcher", "slurm", "--ssh_port", "22", "t.py"]) == 2
    assert main(["-H", path, "--num_gpus", "3", "t.py"]) == 2
    assert main(["-H", hostfile(tmp_path, "localhost slots=1\nnode-b slots=1\n"), "t.py"]) == 2
    said = capsys.readouterr().err.splitlines()
    for line, words in zip(said, ("gone", "--hostfile", "--ssh_port", "node-b", "--master_addr"), strict=True):
        assert line.startswith("dsx launch: ") and words in line
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourceError, match="'mpirun' on the PATH"):
        make_plan(parse(["-H", path, "--launcher", "openmpi", "t.py"]), {})


def test_slurm_allocation_needs_no_hostfile():
    environ = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}
    plan = make_plan(parse(["--launcher", "slurm", "--dry_run", "t.py"]), environ)
    assert isinstance(plan, HostsPlan) and plan.remote.hosts == ("n1", "n2")


def test_a_hostfile_with_this_machine_alone_needs_no_launcher(tmp_path):
    plan = make_plan(parse(["-H", hostfile(tmp_path, "localhost slots=3\n"), "t.py"]), {"CUDA_VISIBLE_DEVICES": ""})
    assert not isinstance(plan, HostsPlan) and plan.procs == 3


def test_no_ssh_takes_the_hosts_part_from_the_options(tmp_path):
    argv = ["-H", hostfile(tmp_path), "--no_ssh", "--master_addr", "node-a", "--num_procs", "2", "t.py"]
    plan = make_plan(parse([*argv[:2], "--node_rank", "1", *argv[2:]]), {})
    assert not isinstance(plan, HostsPlan)
    assert (plan.host, plan.host_rank, plan.procs, plan.master_port) == ("node-b", 1, 2, 29500)
    assert make_plan(parse(argv), {"SLURMD_NODENAME": "node-b"}).host_rank == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("launcher", ["ssh", "pdsh", "openmpi", "slurm"])
def test_programs_receive_what_was_planned(launcher, tmp_path, monkeypatch):
    """A stand-in on the PATH writes down its arguments and environment."""
    program = tmp_path / PROGRAMS[launcher]
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nline = json.dumps([sys.argv[1:],"
        f" dict(os.environ)])\nos.write(os.open({str(tmp_path / 'seen')!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND),"
        " (line + '\\n').encode())\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "UCX_NET": "a,b c",
        "PDSH_SSH_ARGS_APPEND": "-v",
    }
    monkeypatch.setenv("PATH", environ["PATH"])
    argv = ["-H", hostfile(tmp_path), "--launcher", launcher, "--master_addr", "h", "t.py", "a b", "it's $HOME"]
    argv = [sys.executable, "-m", "dsx_launch", "--no_ssh_check", *argv]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert len(seen) == (2 if launcher == "ssh" else 1)
    for words, env in seen:
        text = words[-1] if launcher in ("ssh", "pdsh") else shlex.join(words)
        while "t.py" not in shlex.split(text):  # each remote shell takes one layer of quotes off
            text = next(word for word in shlex.split(text) if "t.py" in word)
        assert shlex.split(text)[-3:] == ["t.py", "a b", "it's $HOME"]
        assert env["PDSH_SSH_ARGS_APPEND"] == "-v"
        if launcher == "slurm":
            assert env["UCX_NET"] == "a,b c"


def test_a_failing_host_ends_the_others(monkeypatch):
    """Two clients, one fails: its code is the job's, and the other, which would sleep for a minute, is ended."""
    monkeypatch.setattr("dsx_launch.hosts.OWN_END_S", 0.3)
    sleeper = Command((sys.executable, "-c", "import sys; sys.stdin.read()"), host="b", lifeline=True)
    plan = HostsPlan("ssh", REMOTE, (Command(("sh", "-c", "exit 7"), host="a"), sleeper), "h", 1, "id")
    code = subprocess_run_hosts(plan)
    assert code == 7


def subprocess_run_hosts(plan: HostsPlan) -> int:
    import signal

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return run_hosts(plan, dict(os.environ))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
