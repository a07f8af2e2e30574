"""What every command of ``dsx`` has: a version, JSON, the nearest name for a misspelt word, and words for a shell."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
from dsx.cli import main
from dsx.commands import installed_commands
from dsx.completion import words_of

COMMANDS = installed_commands()
RUN_PROGRAMS = {"launch", "ssh", "autotune", "simcuda", "plan --measure"}  # what they print is what the program prints
TEXT_ALONE = {"config schema", "config types", "config reference"}  # JSON already; a module; a page
FOLDERS = {"compress", "config", "data", "pipe", "bench", "checkpoint", "nvme"}  # they only have commands below them


@pytest.fixture(scope="module")
def words():
    return {path: said for name in COMMANDS for path, said in words_of(COMMANDS[name], f"dsx {name}").items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_a_version(name, capsys):
    try:
        code = main([name, "--version"])
    except SystemExit as end:
        code = end.code
    assert code == 0 and capsys.readouterr().out.startswith("dsx")


def test_every_command_prints_json(words):
    without = {path for path, said in words.items() if "--json" not in said}
    assert without - TEXT_ALONE - FOLDERS == RUN_PROGRAMS


def test_the_words_are_those_of_the_parsers(words):
    assert words["pipe"][:2] == ["show", "plan"] and "--micro-batches" in words["pipe show"]
    assert {"calibrate", "machines"} <= set(words["plan"]) and "--no-links" in words["plan calibrate"]
    assert words["nvme"][:3] == ["tune", "bench", "explain"] and "--json" in words["nvme tune"]


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("pipe shwo", "did you mean show?"),
        ("pipe show --micro-batch 4 1f1b", None),  # an abbreviation is taken
        ("pipe show 1f1b --microbatches 4", "--microbatches: use --micro-batches"),
        ("pipe show zbh1", "did you mean zb-h1"),
        ("config chek x.json", "did you mean check?"),
        ("checkpoint inspct ckpt", "did you mean inspect?"),
        ("checkpoint verify ckpt --tagg a", "--tagg: use --tag"),
        ("nvme tun", "did you mean tune?"),
        ("compress reprot x", "did you mean report?"),
        ("plan m -c x.json -n 8 --serach", "--serach: use --search"),
        ("bench com", "did you mean 'dsx bench comm'?"),
    ],
)
def test_a_misspelt_word_gets_the_nearest_one(line, meant, capsys):
    try:
        code = main(line.split())
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert (code, said) == (0, "") if meant is None else (code == 2 and meant in said), said


def test_check_as_json_has_every_key_and_every_problem(tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    bad.write_text('{"train_batch_size": 8, "zero_optimization": {"stge": 2}}')
    assert main(["config", "check", str(good), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] and not said["problems"]
    assert {key["path"]: key["word"] for key in said["keys"]} == {
        "train_batch_size": "used",
        "zero_optimization.stage": "used",
    }
    assert main(["config", "check", str(bad), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    (problem,) = said["problems"]
    assert not said["ok"] and problem["path"] == "zero_optimization.stge" and "stage" in problem["fix"]
    assert main(["config", "check", str(good)]) == 0
    assert "as DeepSpeed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["plan machines --json", "explain DSX101 --json", "pipe show 1f1b --json", "data schedule fixed_linear "
    "--min 8 --max 64 --steps 10 --json", "config explain {config} --json", "completion --json"],
)  # fmt: skip
def test_json_is_json_alone(line, tmp_path, capsys):
    config = tmp_path / "dsx.json"
    config.write_text('{"train_batch_size": 8}')
    assert main(line.format(config=config).split()) == 0
    assert json.loads(capsys.readouterr().out)


def test_bash_completes_commands_and_options(tmp_path, capsys):
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "complete.sh"
    script.write_text(capsys.readouterr().out)

    def completed(*line):
        typed = " ".join(f"'{word}'" for word in line)
        place = f"COMP_WORDS=({typed}); COMP_CWORD={len(line) - 1}"
        asked = f'. {script}; {place}; _dsx; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("dsx", "pi") == ["pipe"]
    assert completed("dsx", "pipe", "") == ["show", "plan"]
    assert completed("dsx", "pipe", "show", "zb-h1", "--mic") == ["--micro-batches"]
    assert completed("dsx", "config", "check", "a.json", "--wo") == ["--world-size"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_given_every_command(shell, tmp_path, capsys):
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS) and "micro-batches" in said
    if shutil.which(shell):
        script = tmp_path / "completion"
        script.write_text(said)
        subprocess.run([shell, "-n", str(script)], check=True)


def test_ctrl_c_ends_a_command_without_a_traceback():
    command = [sys.executable, "-m", "dsx", "elastic", "--rendezvous", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # a suite that runs in the background of a shell ignores Ctrl-C, and so would its children
    with subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **pipes) as process:
        try:
            assert process.stdout.readline().startswith("rendezvous")
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode in (0, 130) and "Traceback" not in said
