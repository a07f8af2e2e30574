"""The flops page in a real browser: what it shows, how it folds, sorts, searches. Skipped where there is no Chromium.

The browser is driven over its debugging pipe (two descriptors, JSON messages ended by a zero byte): no driver is
needed.
"""

import json
import os
import shutil
import subprocess
import time

import pytest

torch = pytest.importorskip("torch")
from dsx_monitor import FlopsProfiler  # noqa: E402
from torch import nn  # noqa: E402

BROWSER = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


class Browser:
    """One headless page."""

    def __init__(self, folder):
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def descriptors():  # the browser reads from 3 and writes to 4
            os.dup2(to_read, 100)
            os.dup2(to_write, 101)
            os.dup2(100, 3)
            os.dup2(101, 4)

        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command += ["--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            command, preexec_fn=descriptors, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._left, self._number = b"", 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.errors = []
        self.call("Runtime.enable")

    _session = None

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(answer["params"]["exceptionDetails"])

    def _message(self):
        while b"\0" not in self._left:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser ended"
            self._left += part
        text, self._left = self._left.split(b"\0", 1)
        return json.loads(text)

    def open(self, path):
        self.call("Page.enable")
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 60
        while self.run("document.readyState") != "complete" and time.monotonic() < deadline:
            time.sleep(0.05)

    def run(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def names(self):
        return self.run("[...document.querySelectorAll('#modules tbody tr')].map(r => r.cells[0].textContent)")

    def column(self, index):
        return self.run(f"[...document.querySelectorAll('#modules tbody tr')].map(r => r.cells[{index}].textContent)")

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)


@pytest.fixture
def page(tmp_path):
    browser = Browser(tmp_path / "browser")
    yield browser
    browser.close()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8 * n), nn.Linear(8 * n, 8)) for n in (1, 4, 2))
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def write_page(tmp_path):
    model = Model()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.arange(10).view(2, 5)).sum().backward()
    profiler.stop_profile()
    return profiler.write_html(tmp_path / "flops.html", 3), profiler


def test_the_page_needs_nothing_from_outside(tmp_path):
    path, _ = write_page(tmp_path)
    text = path.read_text()
    assert "@" not in text.split("<style>")[0] and "src=" not in text and "href=" not in text and "http" not in text


@needs_browser
def test_the_tree_folds_sorts_and_is_searched(page, tmp_path):
    path, profiler = write_page(tmp_path)
    page.open(path)
    folded = "document.querySelectorAll('#modules tbody tr').length"
    assert page.run("document.title") == "Flops profile of Model, step 3"
    everything = sum(1 for _ in profiler.root.walk())
    page.run("document.getElementById('fold').click()")
    assert [name[1:] for name in page.names()] == ["(model)"]
    page.run("document.getElementById('unfold').click()")
    assert page.run(folded) == everything
    # One module folds its own children only.
    page.run("document.querySelector('[aria-label=\"fold layers.1\"]').click()")
    assert page.run(folded) == everything - 2
    page.run("document.querySelector('[aria-label=\"fold layers.1\"]').click()")

    heads = page.run("[...document.querySelectorAll('#modules thead th')].map(h => h.textContent)")
    assert heads[:6] == ["module", "class", "calls", "parameters", "forward flops", "forward time"]
    assert heads[-2:] == ["backward flops", "backward time"]
    click = "document.querySelectorAll('#modules thead button')[{}].click()"
    page.run(click.format(4))  # by forward flops, the largest first, within each module
    top = [name.lstrip("\u25be\u25b8") for name in page.names() if name[0] in "\u25be\u25b8"]
    assert top == ["(model)", "layers.1", "layers.2", "layers.0"]
    assert page.run("document.querySelectorAll('#modules th')[4].getAttribute('aria-sort')") == "descending"
    page.run(click.format(4))
    assert [n.lstrip("\u25be\u25b8") for n in page.names() if n[0] in "\u25be\u25b8"][1:] == [
        "layers.0",
        "layers.2",
        "layers.1",
    ]
    page.run(click.format(4))
    assert page.names()[1] == "embed"  # the third click gives the order of calls back

    page.run("const find = document.getElementById('find'); find.value = '1.1'; find.dispatchEvent(new Event('input'))")
    assert [name.lstrip("\u25be\u25b8") for name in page.names()] == ["(model)", "layers.1", "1"]
    assert not page.errors


@needs_browser
def test_bars_are_shares_and_figures_are_the_profilers(page, tmp_path):
    path, profiler = write_page(tmp_path)
    page.open(path)
    page.run("document.getElementById('unfold').click()")
    shares = dict(zip(page.names(), page.column(4)))
    flops = {node.name: node.flops for _, node in profiler.root.walk()}
    assert shares["head"].endswith(f"{100 * flops['head'] / flops['']:.1f}%")
    width = page.run("document.querySelectorAll('#modules tbody tr')[0].querySelector('td.bar i.flops').style.width")
    assert width == "100%"
    page.run(
        "const view = document.getElementById('view'); view.value = 'class'; view.dispatchEvent(new Event('change'))"
    )
    classes = dict(zip(page.column(1), page.column(0)))
    assert classes["Linear"] == "7 modules" and classes["Embedding"] == "1 module"
    page.run("view.value = 'flat'; view.dispatchEvent(new Event('change'))")
    assert len(page.names()) == len(flops) and not page.errors
