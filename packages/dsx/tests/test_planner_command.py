"""`dsx plan` on the command line: text, JSON, a page for any screen, a search, a calibration."""

import json
import re
import sys

import dsx_plan.calibrate as calibrating
import pytest
import torch
import torch.distributed as dist
from dsx.cli import main
from dsx.planning import Machine, Plan
from dsx_testkit.browser import Browser, find_browser

MODEL = """
import torch
from torch import nn


def make():
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


def batch():
    return torch.zeros(4, 512)


class Loss(nn.Module):
    def forward(self, x):
        return x.float().square().mean()


def staged():
    return nn.Sequential(make(), make(), Loss())


def pair():
    return torch.zeros(4, 512), None
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    config = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
    }
    (tmp_path / "dsx.json").write_text(json.dumps(config))
    return tmp_path


def words(files, *more):
    return ["plan", f"{files}/model.py:make", "-c", f"{files}/dsx.json", "-b", f"{files}/model.py:batch", *more]


def staged(files, *more):
    """A pipeline of two stages on four ranks."""
    config = {**json.loads((files / "dsx.json").read_text()), "pipeline": {"stages": 2}}
    (files / "staged.json").write_text(json.dumps(config))
    model = f"{files}/model.py"
    return ["plan", f"{model}:staged", "-c", f"{files}/staged.json", "-b", f"{model}:pair", "-n", "4", "-m", "A100-80",
            *more]  # fmt: skip


def test_a_pipeline(files, capsys):
    assert main(staged(files)) == 0
    text = capsys.readouterr().out
    assert "data 2 x pipe 2" in text and "pipeline 1f1b: 4 micro-batches, bubble" in text and "pipeline bubble" in text
    assert main([word.replace("pair", "batch") for word in staged(files)]) == 0, "a loss that needs no labels"
    assert main([word.replace("staged.json", "dsx.json") for word in staged(files)]) == 1, "a pair is not its argument"


def test_text_json_and_page(files, capsys):
    code = main(words(files, "-n", "4", "-m", "A100-80", "--json", f"{files}/p.json", "--html", f"{files}/p.html"))
    text = capsys.readouterr().out
    assert code == 0 and "fits: yes" in text and "reduce_scatter_tensor" in text and "tokens/s" in text
    assert text.count("model state of a rank") == 1
    found = Plan.from_json((files / "p.json").read_text())
    assert found.world_size == 4 and found.layout["accumulation"] == 2 and found.fits
    page = (files / "p.html").read_text()
    assert "<script" not in page and not re.search(r"(src|href)=|url\(|https?://", page)
    assert "prefers-color-scheme:dark" in page and page.count("<svg") >= 2
    assert main(words(files, "-n", "4", "-m", "A100-80", "--json", "-")) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 4


def bytes_by_class(picture):
    """{class: [bytes of each bar]} by the titles in a picture."""
    found = {}
    for name, nbytes in re.findall(r"<title>(\w+): (\d+) bytes</title>", picture):
        found.setdefault(name, []).append(int(nbytes))
    return found


def test_a_picture_has_the_plans_bytes_and_its_lanes(files):
    assert (
        main(words(files, "-n", "4", "-m", "A100-80", "--picture", f"{files}/p.svg", "--json", f"{files}/p.json")) == 0
    )
    picture, found = (files / "p.svg").read_text(), Plan.from_json((files / "p.json").read_text())
    drawn = bytes_by_class(picture)
    assert drawn["gradients"] == [found.state_bytes()["grads"], found.peak_parts["gradients"]]
    assert drawn["states"][0] == found.state_bytes()["optimizer"] and drawn["activations"]
    spans = len(re.findall(r'<rect class="forward"[^>]*><title>(?!\w+: \d+ bytes)', picture))  # bars have colours, too
    assert spans == sum(name == "forward" for _, name, _, _ in found.timeline)
    assert ">all-gather</text>" in picture and "prefers-color-scheme: dark" in picture
    assert main(staged(files, "--picture", f"{files}/staged.svg")) == 0
    staged_picture = (files / "staged.svg").read_text()
    assert staged_picture.count(">rank ") == 2 and "<title>0F0, " in staged_picture


def test_a_file_imports_what_lies_beside_it(files, monkeypatch):
    (files / "beside_the_model.py").write_text("WIDTH = 16\n")
    text = "from beside_the_model import WIDTH\n" + MODEL.replace("nn.Linear(512, 512)", "nn.Linear(WIDTH, WIDTH)")
    (files / "model.py").write_text(text.replace("(4, 512)", "(4, WIDTH)"))
    monkeypatch.chdir("/")
    before = list(sys.path)
    assert main(words(files, "-n", "2", "-m", "A100-80", "--json", f"{files}/p.json")) == 0
    assert Plan.from_json((files / "p.json").read_text()).parameters == 8 * (16 * 16 + 16)
    assert sys.path == before


def test_the_page_on_a_narrow_screen(files):
    program = find_browser()
    if program is None:
        pytest.skip("there is no browser")
    main(words(files, "-n", "4", "-m", "A100-80", "--html", f"{files}/p.html"))
    assert main(staged(files, "--html", f"{files}/staged.html")) == 0
    browser = Browser(program)
    try:
        for page, width, dark in (("p", 390, False), ("p", 390, True), ("p", 1200, False), ("staged", 390, False)):
            browser.open(f"file://{files}/{page}.html", width=width, dark=dark)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (ground == "rgb(18, 22, 28)") == dark
        assert not browser.errors
    finally:
        browser.close()


def test_what_does_not_fit_has_another_exit_code(files, capsys):
    Machine.from_dict({**Machine.named("A100-80").to_dict(), "memory_bytes": 25 << 20, "communicator_bytes": 1}).save(
        files / "small.json"
    )
    assert main(words(files, "-n", "4", "-m", f"{files}/small.json")) == 3
    text = capsys.readouterr().out
    assert "fits: no, the device needs" in text and "what makes it fit" in text and "zero_optimization.stage" in text


def test_search(files, capsys):
    vary = ["--vary", "zero_optimization.stage=[0,3]", "--vary", "train_batch_size=[16,32]"]
    assert main(words(files, "-n", "4", "-m", "A100-80", *vary)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "zero_optimization.stage" in lines[0]
    small = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    (files / "dsx.json").write_text(json.dumps({**json.loads((files / "dsx.json").read_text()), **small}))
    assert main(words(files, "-n", "2", "-m", "A100-80", "--search")) == 0
    text = capsys.readouterr().out
    head = text.splitlines()[0]
    assert all(key in head for key in ("recompute", "pipeline.stages", "tensor_parallel.autotp_size", "offload_param"))
    assert "left out" in text and "it fits with less that saves memory" in text
    assert main(words(files, "-n", "4", "-m", "A100-80", "--vary", "stage")) == 1
    assert "PATH=[value" in capsys.readouterr().err


def test_mistakes(files, capsys):
    assert main(words(files, "-n", "3", "-m", "A100-80")) == 1
    assert "train_batch_size" in capsys.readouterr().err
    assert main(["plan", "nowhere", "-c", f"{files}/dsx.json", "-n", "2", "-m", "A100-80"]) == 1
    assert "file.py:function" in capsys.readouterr().err
    assert main(["plan", f"{files}/model.py:make", "-c", f"{files}/none.json", "-n", "2", "-m", "here"]) == 1
    assert "none.json" in capsys.readouterr().err
    assert main(words(files, "-n", "2", "-m", "abacus")) == 1
    assert "abacus" in capsys.readouterr().err
    assert not dist.is_initialized()


def test_a_processor_is_planned_for_only_when_it_is_asked_for(files, capsys, monkeypatch):
    """Without a GPU and without --machine the times would be those of this processor, hours for a step."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert main(words(files, "-n", "2")) == 1
    said = capsys.readouterr()
    assert "H100-SXM" in said.err and "dsx plan calibrate" in said.err and said.out == ""
    assert main(words(files, "-n", "2", "-m", "here")) == 0
    assert "this processor, not calibrated" in capsys.readouterr().out


def test_calibration(files, capsys, monkeypatch):
    monkeypatch.setattr(calibrating, "_SECONDS", 0.02)
    assert main(["plan", "calibrate", "--no-links", "-o", f"{files}/machine.json"]) == 0
    found = Machine.load(files / "machine.json")
    assert found.stranger() == "" and found.calibrated_on in capsys.readouterr().out
    assert 1e8 < found.flops["float32"] < 1e16 and 1e8 < found.memory_bandwidth < 1e14
    assert 0 < found.constants.operator_seconds < 1e-2 and found.constants.attention == 0.0
    assert main(words(files, "-n", "2", "-m", f"{files}/machine.json")) == 0
    assert main(["plan", "calibrate", "--no-links", "-o", f"{files}/no/such/folder.json"]) == 1
    assert main(["plan", "machines"]) == 0
    assert "H100-SXM" in capsys.readouterr().out


def test_two_processes_measure_messages(monkeypatch):
    monkeypatch.setattr(calibrating, "_SECONDS", 0.02)
    rate, latency = calibrating._links(torch.cuda.device_count() > 1)
    assert 1e6 < rate < 1e13 and 0 < latency < 0.5


def test_without_a_machine_it_is_asked_for_and_the_known_ones_are_named(files, capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert main(words(files, "-n", "8")) == 1
    text = capsys.readouterr().err
    assert "--machine: got none" in text and "A100-80" in text and "H100-SXM" in text and "--machine here" in text


def test_measure_is_the_search_by_trials(tmp_path, capsys):
    """`dsx plan --measure` is `dsx launch --autotuning tune`: a dry run of both lists the same experiments."""
    places = {"results_dir": f"{tmp_path}/results", "exps_dir": f"{tmp_path}/exps"}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
              "autotuning": {"enabled": True, **places}}  # fmt: skip
    (tmp_path / "train.py").write_text("")
    (tmp_path / "ds.json").write_text(json.dumps(config))
    script = ["--dry_run", "--num_procs", "2", f"{tmp_path}/train.py", "--deepspeed_config", f"{tmp_path}/ds.json"]
    assert main(["plan", "--measure", *script]) == 0
    measured = capsys.readouterr().out
    assert main(["launch", "--autotuning", "tune", *script]) == 0
    assert measured == capsys.readouterr().out and measured.strip()


def test_the_page_stacks_all_that_the_device_holds(files, capsys):
    assert main(words(files, "-n", "4", "-m", "A100-80", "--json", f"{files}/p.json", "--html", f"{files}/p.html")) == 0
    text, page = capsys.readouterr().out, (files / "p.html").read_text()
    found = Plan.from_json((files / "p.json").read_text())
    assert set(found.beside) == {"allocator", "communicators", "context"}
    assert found.beside["allocator"] == found.fragmentation_bytes
    assert sum(found.held.values()) == found.peak_bytes + sum(found.beside.values())
    assert "beside the tensors" in text and "NCCL's communicators" in text
    stack = page[page.index('aria-label="memory by class"') :]
    drawn = re.findall(r'<rect[^>]*width="([\d.]+)"[^>]*><title>(\w+),', stack[: stack.index("</svg>")])
    room = max(sum(found.held.values()), found.machine["memory_bytes"])
    assert [name for _, name in drawn] == list(found.held)
    assert [float(w) for w, _ in drawn] == pytest.approx([1000 * n / room for n in found.held.values()], abs=0.01)
    assert main(words(files, "-n", "1", "-m", "here", "--json", f"{files}/here.json")) == 0
    assert Plan.from_json((files / "here.json").read_text()).beside == {}


def test_without_a_configuration_the_usual_one_is_planned_and_shown(files, capsys):
    question = ["plan", f"{files}/model.py:make", "-b", f"{files}/model.py:batch", "-n", "8", "-m", "H100-SXM"]
    stage, least = ["--set", "zero_optimization.stage=2"], ["--set", "train_micro_batch_size_per_gpu=4"]
    assert main([*question, *stage, *least, "--json"]) == 0
    usual = capsys.readouterr()
    assert usual.err.startswith("--config: got none; planned with {") and '"stage": 2' in usual.err
    shown = json.loads(usual.err[usual.err.index("{") : usual.err.rindex("}") + 1])
    (files / "shown.json").write_text(json.dumps(shown))
    assert main([*question, "-c", f"{files}/shown.json", "--json"]) == 0
    given = capsys.readouterr()
    assert given.out == usual.out and "got none" not in given.err
    assert Plan.from_json(given.out).config["zero_optimization"] == {"stage": 2}
