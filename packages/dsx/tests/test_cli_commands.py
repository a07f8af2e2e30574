"""The ``dsx`` command: every word answers, quickly and without torch; unknown words are refused by name."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from dsx import __version__
from dsx.cli import TASKS, main
from dsx.commands import installed_commands
from dsx_launch.remote_shell import main as remote_shell
from dsx_launch.remote_shell import remote_text


def test_help_and_version(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    listed = [row.split()[0] for row in said.splitlines() if row.startswith("  ")]
    assert sorted(listed) == sorted(installed_commands()), "every command once"
    assert all(len(row.split()) > 2 for row in said.splitlines() if row.startswith("  ")), "with its meaning"
    assert {"plan", "pipe", "data", "compress", "nvme", "sparse", "launch", "explain"} <= set(listed)
    assert "other commands:" not in said and set(listed) <= {name for names in TASKS.values() for name in names}
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dsx {__version__}\n"
    assert main([]) == 2


@pytest.mark.parametrize("name", ["nvme", "pipe", "data", "compress"])
def test_commands_of_the_parts_are_commands_of_dsx(name, capsys, monkeypatch):
    """They say how they were called, and where their package is missing they say what to run."""
    with pytest.raises(SystemExit) as end:
        sys.exit(main([name, "--help"]))
    assert end.value.code == 0 and f"usage: dsx {name} " in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        sys.exit(main([name, "--version"]))
    assert end.value.code == 0 and capsys.readouterr().out == f"dsx-{name} {__version__}\n"
    monkeypatch.setitem(sys.modules, f"dsx_{name}", None)
    for module in [module for module in sys.modules if module.startswith(f"dsx_{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    assert main([name]) == 2
    assert f"pip install --no-deps ./packages/dsx-{name}" in capsys.readouterr().err


def test_autotune_says_that_it_searches(capsys):
    with pytest.raises(SystemExit):
        main(["autotune", "--help"])
    assert "Search for the configuration" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["DSX104", "dsx104", "104", "[DSX104]", "errors#dsx104", "reference/errors.md#dsx104"])
def test_explain_says_what_a_code_means_however_it_was_copied(word, capsys):
    assert main(["explain", word]) == 0
    said = capsys.readouterr().out
    assert said.startswith("DSX104\n") and "Keys contradict each other" in said and "*Do:* keep one" in said
    assert "DSX103" not in said and "DSX105" not in said


@pytest.mark.parametrize("word", ["DSX999", "1040", "zero"])
def test_explain_refuses_what_is_no_code(word, capsys):
    assert main(["explain", "DSX104", word]) == 2
    said = capsys.readouterr()
    assert said.out == "" and f"got '{word}', expected a code of dsx, from DSX1" in said.err


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_the_page_of_codes_travels_with_the_package(target, tmp_path):
    """What is built has the page, and a wheel that is built from the sdist has it too."""
    package = Path(__file__).resolve().parents[1]
    if not (package / "error_page.py").is_file() or not (package.parents[1] / "docs").is_dir():
        pytest.skip("not in a checkout")
    builders = pytest.importorskip("hatchling.builders.wheel"), pytest.importorskip("hatchling.builders.sdist")
    wheel, sdist = builders[0].WheelBuilder, builders[1].SdistBuilder
    root = package
    if target == "sdist":
        (packed,) = sdist(str(package)).build(directory=str(tmp_path), versions=["standard"])
        with tarfile.open(packed) as archive:
            archive.extractall(tmp_path, filter="data")
        (root,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (built,) = wheel(str(root)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        assert archive.read("dsx/error_codes.md") == (package.parents[1] / "docs/reference/errors.md").read_bytes()


def test_the_help_of_config_is_one_line_for_each_command(capsys):
    with pytest.raises(SystemExit):
        main(["config", "--help"])
    rows = capsys.readouterr().out.splitlines()
    for name in ("explain", "check", "schema", "reference"):
        (row,) = (row for row in rows if row.split()[:1] == [name])
        assert len(row.split()) > 2, "name and meaning stand on one line"


@pytest.mark.parametrize(
    "words", ["dsx plan machines", "dsx.config reference", "dsx config schema", "dsx explain DSX101"]
)
def test_a_reader_that_ends_first_gives_no_traceback(words):
    """As `dsx plan machines | head -1`: nothing reads any more, and the command ends as one that SIGPIPE ends."""
    module, *rest = words.split()
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", module, *rest], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_unknown_word_gets_the_nearest_known_one(capsys):
    assert main(["lanuch"]) == 2
    assert "did you mean 'dsx launch'" in capsys.readouterr().err
    assert main(["--num_gpus", "2", "train.py"]) == 2
    assert "did you mean 'dsx launch --num_gpus'" in capsys.readouterr().err
    assert main(["xyz"]) == 2
    assert "see dsx --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--nproc-per-node", "use --num_gpus N, or --num_procs N"),
        ("--nproc_per_node=2", "use --num_gpus N, or --num_procs N"),
        ("--nnodes", "use --num_nodes N"),
        ("--num_gpu", "use --num_gpus"),
        ("--hostfle", "use --hostfile"),
        ("--port", "use --ssh_port or --master_port"),
    ],
)
def test_an_unknown_option_of_the_launcher_gets_the_one_that_was_meant(given, meant, capsys):
    with pytest.raises(SystemExit) as end:
        main(["launch", given, "2", "train.py"])
    assert end.value.code == 2
    assert f"{given}: {meant}" in capsys.readouterr().err


def test_an_option_that_is_like_none_is_only_named(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--zzz", "train.py"])
    assert capsys.readouterr().err.rstrip().endswith("unrecognized arguments: --zzz")


def test_help_loads_neither_torch_nor_pydantic():
    code = """
import sys
from dsx.cli import main
for words in ([], ["launch"], ["autotune"], ["ssh"], ["doctor"], ["report"], ["checkpoint", "verify"]):
    try:
        assert main([*words, "--help"]) == 0
    except SystemExit as end:
        assert end.code == 0, words
assert not {"torch", "pydantic", "rich"} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_words_reach_the_hosts_as_typed(tmp_path, capsys):
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=1\nb slots=1\n")
    assert remote_text(["echo", "two  words", "$HOME", "it's"]) == """echo 'two  words' '$HOME' 'it'"'"'s'"""
    assert remote_text(["echo $HOME | wc"]) == "echo $HOME | wc"
    assert remote_shell(["-f", str(hosts), "-e", "a", "--ssh_port", "2222", "--dry_run", "ls", "-l", "a b"]) == 0
    assert capsys.readouterr().out == "ssh -o BatchMode=yes -p 2222 b 'ls -l '\"'\"'a b'\"'\"''\n"
    assert remote_shell(["-f", str(tmp_path / "gone"), "ls"]) == 2


def test_report_of_a_folder_without_a_run(tmp_path, capsys):
    assert main(["report", str(tmp_path / "gone")]) == 1
    assert "dsx report: " in capsys.readouterr().err
