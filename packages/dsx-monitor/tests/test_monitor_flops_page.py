"""The flops page in a real browser: what it shows, how it folds, sorts, searches. Skipped where Chromium is missing."""

import pytest

torch = pytest.importorskip("torch")
from dsx_monitor import FlopsProfiler  # noqa: E402
from dsx_testkit import Browser, find_browser  # noqa: E402
from torch import nn  # noqa: E402

needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium on this machine")


def names(page):
    return page.evaluate("[...document.querySelectorAll('#modules tbody tr')].map(r => r.cells[0].textContent)")


def column(page, index):
    return page.evaluate(f"[...document.querySelectorAll('#modules tbody tr')].map(r => r.cells[{index}].textContent)")


@pytest.fixture
def page():
    browser = Browser(find_browser())
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


def test_no_name_ends_or_swallows_the_data_of_the_page(tmp_path):
    model = nn.ModuleDict({"<!--<script>": nn.Linear(2, 2)})
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model["<!--<script>"](torch.ones(1, 2)).sum().backward()
    profiler.stop_profile()
    text = profiler.write_html(tmp_path / "flops.html", 1).read_text()
    data = text.split('<script id="data" type="application/json">')[1].split("</script>")[0]
    assert "<" not in data and "\\u003c!--" in data


@needs_browser
def test_the_tree_folds_sorts_and_is_searched(page, tmp_path):
    path, profiler = write_page(tmp_path)
    page.open(path.as_uri())
    folded = "document.querySelectorAll('#modules tbody tr').length"
    assert page.evaluate("document.title") == "Flops profile of Model, step 3"
    everything = sum(1 for _ in profiler.root.walk())
    page.evaluate("document.getElementById('fold').click()")
    assert [name[1:] for name in names(page)] == ["(model)"]
    page.evaluate("document.getElementById('unfold').click()")
    assert page.evaluate(folded) == everything
    # One module folds its own children only.
    page.evaluate("document.querySelector('[aria-label=\"fold layers.1\"]').click()")
    assert page.evaluate(folded) == everything - 2
    page.evaluate("document.querySelector('[aria-label=\"fold layers.1\"]').click()")

    heads = page.evaluate("[...document.querySelectorAll('#modules thead th')].map(h => h.textContent)")
    assert heads[:6] == ["module", "class", "calls", "parameters", "forward flops", "forward time"]
    assert heads[-2:] == ["backward flops", "backward time"]
    click = "document.querySelectorAll('#modules thead button')[{}].click()"
    page.evaluate(click.format(4))  # by forward flops, the largest first, within each module
    top = [name.lstrip("\u25be\u25b8") for name in names(page) if name[0] in "\u25be\u25b8"]
    assert top == ["(model)", "layers.1", "layers.2", "layers.0"]
    assert page.evaluate("document.querySelectorAll('#modules th')[4].getAttribute('aria-sort')") == "descending"
    page.evaluate(click.format(4))
    assert [n.lstrip("\u25be\u25b8") for n in names(page) if n[0] in "\u25be\u25b8"][1:] == [
        "layers.0",
        "layers.2",
        "layers.1",
    ]
    page.evaluate(click.format(4))
    assert names(page)[1] == "embed"  # the third click gives the order of calls back

    page.evaluate(
        "const find = document.getElementById('find'); find.value = '1.1'; find.dispatchEvent(new Event('input'))"
    )
    assert [name.lstrip("\u25be\u25b8") for name in names(page)] == ["(model)", "layers.1", "1"]
    assert not page.errors


@needs_browser
def test_bars_are_shares_and_figures_are_the_profilers(page, tmp_path):
    path, profiler = write_page(tmp_path)
    page.open(path.as_uri())
    page.evaluate("document.getElementById('unfold').click()")
    shares = dict(zip(names(page), column(page, 4)))
    flops = {node.name: node.flops for _, node in profiler.root.walk()}
    assert shares["head"].endswith(f"{100 * flops['head'] / flops['']:.1f}%")
    width = page.evaluate(
        "document.querySelectorAll('#modules tbody tr')[0].querySelector('td.bar i.flops').style.width"
    )
    assert width == "100%"
    page.evaluate(
        "const view = document.getElementById('view'); view.value = 'class'; view.dispatchEvent(new Event('change'))"
    )
    classes = dict(zip(column(page, 1), column(page, 0)))
    assert classes["Linear"] == "7 modules" and classes["Embedding"] == "1 module"
    page.evaluate("view.value = 'flat'; view.dispatchEvent(new Event('change'))")
    assert len(names(page)) == len(flops) and not page.errors
