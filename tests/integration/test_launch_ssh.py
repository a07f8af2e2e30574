"""The ssh way for real: a private sshd on a high port of this machine, reached under two names as if it were two
hosts.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from dsx_launch.processes import lives

TIMEOUT = 150
SSHD = shutil.which("sshd") or next((path for path in ("/usr/sbin/sshd", "/sbin/sshd") if os.path.exists(path)), None)

pytestmark = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None,
    reason="no OpenSSH server on this machine",
)


@dataclass(frozen=True)
class TwoHosts:
    folder: Path
    options: tuple[str, ...]


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nAuthorizedKeysFile"
        f" {folder}/authorized_keys\nPidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication"
        " no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nLogLevel ERROR\n"
    )
    (folder / "ssh_config").write_text(
        f"Host host-a host-b\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/user_key\n  IdentitiesOnly"
        " yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    (folder / "hosts").write_text("host-a slots=1\nhost-b slots=2\n")
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # an sshd run by root insists on it
    serve = [str(SSHD), "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")]
    with subprocess.Popen(serve) as server:
        try:
            _wait_until_reachable(folder, server)
            arguments = f"-F {folder}/ssh_config"
            yield TwoHosts(
                folder,
                ("-H", str(folder / "hosts"), "--launcher", "ssh", "--launcher_args", arguments, "--num_procs", "1"),
            )
        finally:
            server.terminate()


def _wait_until_reachable(folder: Path, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and server.poll() is None:
        done = subprocess.run(
            ["ssh", "-F", str(folder / "ssh_config"), "-o", "BatchMode=yes", "host-a", "true"],
            capture_output=True,
            check=False,
        )
        if done.returncode == 0:
            return
        time.sleep(0.1)
    pytest.skip(f"a private sshd cannot be used here: {(folder / 'sshd.log').read_text().strip() or 'no connection'}")


def command(hosts: TwoHosts, *argv: str) -> list[str]:
    return [sys.executable, "-m", "dsx.launcher", *hosts.options, "--master_addr", "127.0.0.1", *argv]


def write(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def launch(hosts: TwoHosts, *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "NCCL_FROM_HERE": "a 'b' $c", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(hosts, *argv), cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if lives(pid)]


def test_two_hosts_train_together(two_hosts: TwoHosts, tmp_path: Path):
    """A sum over a gloo group between the hosts; the environment file and the exported variables have arrived."""
    (tmp_path / ".dsx_env").write_text('FROM_FILE=100% "it\'s"\n')
    script = write(
        tmp_path,
        """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
values = f"{os.environ['FROM_FILE']}|{os.environ['NCCL_FROM_HERE']}|{sys.argv[2:]}"
line = f"rank {dist.get_rank()} host {os.environ['CROSS_RANK']} sum {total.item()} {values}"
# In one piece: print writes the end of the line by itself, and the hosts write to one pipe.
os.write(1, (line + chr(10)).encode())
dist.destroy_process_group()
""",
    )
    done = launch(two_hosts, script, "a b", "it's", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    end = """100% "it's"|a 'b' $c|['a b', "it's"]"""
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        f"rank 0 host 0 sum 3.0 {end}",
        f"rank 1 host 1 sum 3.0 {end}",
    ]


def test_a_failure_on_one_host_ends_both_and_is_shown_once(two_hosts: TwoHosts, tmp_path: Path):
    script = write(
        tmp_path,
        """
import os, time
open(f"pid.{os.getpid()}", "w").close()
while len([name for name in os.listdir() if name.startswith("pid.")]) < 2:
    time.sleep(0.05)
if os.environ["RANK"] == "1":
    raise ValueError("host two is unhappy")
time.sleep(600)
""",
    )
    done = launch(two_hosts, script, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    shown = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
    assert (
        shown[0] == "[rank 1] Traceback (most recent call last):"
        and shown[-1] == "[rank 1] ValueError: host two is unhappy"
    )
    assert "failed on host-b" in done.stderr
    assert not living([int(path.suffix[1:]) for path in tmp_path.glob("pid.*")])


@pytest.mark.parametrize("number", [2, 9])
def test_a_stopped_launcher_leaves_nothing_on_the_hosts(two_hosts: TwoHosts, tmp_path: Path, number: int):
    script = write(tmp_path, 'import os, time\nopen(f"pid.{os.getpid()}", "w").close()\ntime.sleep(600)\n')
    with subprocess.Popen(
        command(two_hosts, "--no_ssh_check", script), cwd=tmp_path, stderr=subprocess.DEVNULL
    ) as launcher:
        deadline = time.monotonic() + TIMEOUT
        while len(list(tmp_path.glob("pid.*"))) < 2:
            assert time.monotonic() < deadline and launcher.poll() is None
            time.sleep(0.05)
        pids = [int(path.suffix[1:]) for path in tmp_path.glob("pid.*")]
        assert len(living(pids)) == 2
        launcher.send_signal(number)
        launcher.wait(TIMEOUT)
    deadline = time.monotonic() + 30
    while living(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not living(pids)


def test_a_host_that_cannot_be_reached_is_named_before_anything_starts(two_hosts: TwoHosts, tmp_path: Path):
    (tmp_path / "hosts").write_text("host-a slots=1\nno-such-host.invalid slots=1\n")
    done = launch(two_hosts, "-H", str(tmp_path / "hosts"), write(tmp_path, "open('started', 'w')"), cwd=tmp_path)
    assert done.returncode == 1
    assert "no-such-host.invalid" in done.stderr and "host host-a" not in done.stderr
    assert not (tmp_path / "started").exists()
