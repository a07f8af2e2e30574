"""What is shown of the ranks: whose line it is, of which ranks, how many lines, and a copy in files."""

import os
import subprocess
import sys
from collections import Counter

import pytest
from dsx_launch import ResourceError
from dsx_launch.node import _parser, job_from
from dsx_launch.options import parse
from dsx_launch.output import Output, RankOutput
from dsx_launch.plan import HostsPlan, make_plan

QUIET = ["-W", "ignore:Failed to initialize NumPy:UserWarning"]  # of torch, where numpy is not installed
SHELL = "echo out $RANK; echo err $RANK >&2; printf 'last %s' $RANK"


def launch(folder, *options, words=("sh", "-c", SHELL), procs=2):
    command = [sys.executable, *QUIET, "-m", "dsx_launch", "--num_procs", str(procs), *options]
    command += ["--no_python", "--no_local_rank", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done


def lines(text):
    return Counter(text.splitlines())


def test_lines_begin_with_their_rank_and_no_line_is_lost(tmp_path):
    done = launch(tmp_path, "--prefix_output", words=("sh", "-c", f"seq 5000; {SHELL}"))
    expected = [f"[rank {rank}] {n}" for rank in range(2) for n in range(1, 5001)]
    ends = [f"[rank {rank}] {word} {rank}" for rank in range(2) for word in ("out", "last")]
    assert lines(done.stdout) == Counter(expected + ends)
    assert [line for line in done.stdout.splitlines() if line.startswith("[rank 1]")][:5000] == expected[5000:]
    assert lines(done.stderr) == Counter(["[rank 0] err 0", "[rank 1] err 1"])


def test_only_chosen_ranks_are_shown_and_only_so_many_lines_of_each(tmp_path):
    done = launch(tmp_path, "--local-ranks-filter", "1")
    assert lines(done.stdout) == Counter(["out 1", "last 1"]) and lines(done.stderr) == Counter(["err 1"])
    done = launch(tmp_path, "--local_ranks_filter", "0", "--max_output_lines", "3", words=("seq", "1000"))
    shown = done.stdout.splitlines()
    assert shown[:3] == [f"[rank 0] {n}" for n in (1, 2, 3)] and all(line.startswith("[rank 0] ") for line in shown)
    told = [int(line.split()[3]) for line in done.stderr.splitlines() if "left out (--max_output_lines 3)" in line]
    assert len(shown) + sum(told) == 1000 and len(shown) < 500


def test_tee_shows_what_goes_into_the_files(tmp_path):
    done = launch(tmp_path, "--enable_each_rank_log", "logs", "--tee", "2", "--local_ranks_filter", "1")
    assert done.stdout == "" and lines(done.stderr) == Counter(["[rank 1] err 1"])
    for rank in range(2):
        text = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert all(word in text for word in (f"out {rank}\n", f"err {rank}\n", f"last {rank}"))
        assert len(text) == len("out 0\nerr 0\nlast 0")


def test_an_exception_is_shown_as_without_these_options(tmp_path):
    (tmp_path / "t.py").write_text("print('begins')\nraise ValueError('bad sample')\n")
    command = [sys.executable, *QUIET, "-m", "dsx_launch", "--num_procs", "1", "--prefix_output", "t.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and done.stdout == "[rank 0] begins\n"
    assert "[rank 0] ValueError: bad sample" in done.stderr and "[dsx] rank 0 failed" in done.stderr
    assert "[rank 0] [rank 0]" not in done.stderr


@pytest.fixture
def shown(tmp_path):
    """A function that makes a `RankOutput`, and one that reads what it has shown."""
    files = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("out", "err")]
    made = []

    def make(output, log_dir="", **more):
        made.append(RankOutput(output, tmp_path, log_dir, to=tuple(files), **more))
        return made[-1]

    yield make, lambda: tuple((tmp_path / name).read_bytes().decode() for name in ("out", "err"))
    for one in made:
        one.close()
    for descriptor in files:
        os.close(descriptor)


def pipe(folder, local_rank, data, stream="stdout"):
    with open(folder / f"{local_rank}.{stream}", "wb", buffering=0) as file:
        for piece in data:
            file.write(piece)


def test_bytes_are_cut_into_lines_wherever_they_come_apart(tmp_path, shown):
    make, _ = shown
    output = make(Output(prefix=True))
    output.begin({0: 7})
    pieces = [b"a", b"b\r", b"\nc\r\nd", b"\r10%\r20%", b"\n", b"\n\xff\xfe", b"\n", b"x" * 200_000, b"\nend"]
    for piece in pieces:
        pipe(tmp_path, 0, [piece])
    output.close()
    *seen, end = (tmp_path / "out").read_bytes().split(b"\n")
    assert end == b"" and all(line.startswith(b"[rank 7] ") for line in seen)
    *words, last = [line.removeprefix(b"[rank 7] ") for line in seen]
    assert words[:7] == [b"ab", b"c", b"d", b"10%", b"20%", b"", b"\xff\xfe"] and last == b"end"
    assert b"".join(words[7:]) == b"x" * 200_000 and len(words) > 8


def test_a_rank_has_its_lines_of_each_second_and_is_told_what_was_left_out(tmp_path, shown):
    make, said = shown
    now = [100.0]
    output = make(Output(most=2), clock=lambda: now[0])
    output.begin({0: 0, 1: 1})
    pipe(tmp_path, 0, [b"1\n2\n3\n4\n"])
    pipe(tmp_path, 1, [b"one\n"])
    output.close()
    assert said() == (
        "[rank 0] 1\n[rank 0] 2\n[rank 1] one\n",
        "[rank 0] ... 2 lines left out (--max_output_lines 2)\n",
    )


def test_ranks_of_a_later_round_have_new_numbers_and_new_files(tmp_path, shown):
    make, said = shown
    output = make(Output(tee=3), log_dir=str(tmp_path))
    for ranks in ({0: 0, 1: 1}, {0: 5, 1: 6}):
        output.begin(ranks)
        pipe(tmp_path, 1, [f"of {ranks[1]}\nrest".encode()])
    output.close()
    assert said()[0] == "[rank 1] of 1\n[rank 1] rest\n[rank 6] of 6\n[rank 6] rest\n"
    assert (tmp_path / "rank6.log").read_bytes() == b"of 6\nrest"


def test_a_terminal_that_is_gone_does_not_stop_the_ranks(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    output = RankOutput(Output(prefix=True), tmp_path, to=(writer, writer))
    output.begin({0: 0})
    pipe(tmp_path, 0, [b"line\n" * 100_000])  # more than a pipe holds: somebody must read it
    output.close()
    os.close(writer)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tee", "3"], "which is not given"),
        (["--enable_each_rank_log", "d", "--prefix_output"], "--prefix_output is about output that is shown"),
        (["--enable_each_rank_log", "d", "--local_ranks_filter", "0"], "add --tee 3"),
        (["--max_output_lines", "0"], "expected at least 1"),
        (["--local_ranks_filter", "0,-1"], "got '0,-1', expected numbers"),
        (["--local_ranks_filter", "0,,1"], "expected numbers"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, said):
    with pytest.raises(ResourceError) as error:
        parse([*words, "t.py"])
    assert said in str(error.value)


def test_a_rank_that_no_host_has_is_refused_and_hosts_get_what_was_asked(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=4\n")
    words = ["-H", str(hostfile), "--launcher", "ssh", "--dry_run", "--num_procs", "4", "--local_ranks_filter"]
    with pytest.raises(ResourceError, match=r"got local rank 4, expected numbers from 0 to 3"):
        make_plan(parse([*words, "4", "t.py"]), {})
    with pytest.raises(ResourceError, match=r"got local rank 2, expected numbers from 0 to 1"):
        make_plan(parse(["--num_procs", "2", "--local_ranks_filter", "2", __file__]), {})
    plan = make_plan(parse([*words, "3,0", "--max_output_lines", "9", "t.py"]), {})
    assert isinstance(plan, HostsPlan)
    job = job_from(_parser().parse_args(["--node_rank=1", *plan.remote.agent_args]), {})
    assert job.output == Output((0, 3), most=9) and job.output.piped
    for output in (Output(), Output((0,)), Output(None, True, 3, 2)):
        assert Output.from_text(output.to_text()) == output
