"""The documentation site: built strictly, complete, free of network, and browsed in Chromium where there is one."""

from __future__ import annotations

import functools
import http.server
import importlib
import json
import re
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from dsx_testkit import Browser, find_browser

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "site"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "tools" / "site" / "mkdocs.yml"), site_dir=str(folder)))  # strict: warnings abort
    return folder


class Links(HTMLParser):
    """What a page links to, what it loads, and the anchors it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in {"script", "img", "source"} and found.get("src"):
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") in {"stylesheet", "preload", "icon"}:
            self.loads.append(found["href"])


@functools.cache
def parsed(page: Path) -> Links:
    return Links(page)


def target_of(page: Path, link: str, site: Path) -> Path:
    path = unquote(urlsplit(link).path)
    target = (site / path.lstrip("/")) if path.startswith("/") else (page.parent / path) if path else page
    return target / "index.html" if target.is_dir() else target


def test_every_link_has_a_target(site):
    broken = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for link in parsed(page).links:
            parts = urlsplit(link)
            if parts.scheme or link in {"", "#", "."}:
                continue
            target = target_of(page, link, site)
            anchored = parts.fragment and target.suffix == ".html" and target.is_file()
            if not target.is_file() or (anchored and unquote(parts.fragment) not in parsed(target).anchors):
                broken.append((str(page.relative_to(site)), link))
    assert not broken


def test_pages_load_nothing_from_the_network(site):
    loads = {load for page in site.rglob("*.html") for load in parsed(page).loads if urlsplit(load).scheme != "data"}
    assert not [load for load in loads if urlsplit(load).netloc]
    assert not [css for css in site.rglob("*.css") if re.search(r"url\([\"']?https?:", css.read_text())]


def test_every_page_says_its_version(site):
    import dsx

    pages = [page for page in site.rglob("index.html")]
    assert len(pages) > 60
    assert not [page for page in pages if f"for dsx {dsx.__version__}" not in page.read_text()]


def documented_modules() -> list[str]:
    import hooks

    return [module for module, file in hooks.sources().items() if hooks.public_names(file)]


@pytest.mark.parametrize("module", documented_modules())
def test_public_names_and_their_page_agree(site, module):
    """Names that come from elsewhere stand on the page as text; all others have an entry with a description."""
    page = site / "reference" / "api" / module / "index.html"
    found = importlib.import_module(module)
    text = page.read_text()
    folder = Path(found.__file__).parent
    names = [n for n in found.__all__ if n != "__version__" and not isinstance(getattr(found, n), type(sys))]
    names = [n for n in names if not (folder / f"{n}.py").is_file()]
    missing = [n for n in names if f"{module}.{n}" not in parsed(page).anchors and f"<code>{n}</code>" not in text]
    assert not missing


def test_a_page_of_the_reference_begins_with_what_is_looked_for():
    import hooks

    names = re.findall(r"^::: dsx\.(\w+)$", hooks.api_pages()["reference/api/dsx.md"], re.M)
    assert names[:2] == ["initialize", "Engine"]
    errors = [name.endswith("Error") for name in names]
    assert any(errors) and errors == sorted(errors)


@pytest.fixture(scope="module")
def served(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    browser = Browser(program)
    yield browser
    browser.close()


BROWSED = [
    "",
    "start/install/",
    "start/first-run/",
    "guides/zero-stage/",
    "guides/troubleshooting/",
    "config/",
    "figures/",
    "figures/monitoring/",
    "figures/training/",
    "reference/api/dsx_zero/",
    "packages/dsx-zero/",
]


# Text whose contrast with what lies behind it is below 3 (the least that WCAG 2 allows, for large text).
UNREADABLE = """(() => {
    const numbers = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const over = (top, below) => top.slice(0, 3).map((v, i) => v * (top[3] ?? 1) + below[i] * (1 - (top[3] ?? 1)));
    const behind = element => {
        const layers = [];
        for (let e = element; e; e = e.parentElement) layers.push(numbers(getComputedStyle(e).backgroundColor));
        return layers.reverse().filter(layer => layer.length >= 3)
            .reduce((below, layer) => over(layer, below), [255, 255, 255]);
    };
    const found = [];
    for (const element of document.querySelectorAll('article *')) {
        const text = [...element.childNodes].filter(n => n.nodeType == 3).map(n => n.data).join('').trim();
        const style = getComputedStyle(element);
        if (!text || !element.offsetParent || style.opacity == 0 || element.closest('.headerlink, svg')) continue;
        const ground = behind(element), [a, b] = [light(over(numbers(style.color), ground)), light(ground)];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < 3) found.push([text.slice(0, 40), contrast.toFixed(2)]);
    }
    return found.slice(0, 3);
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_show_on_a_narrow_screen_without_errors(served, browser, dark):
    browser.open(served)
    browser.evaluate("localStorage.clear()")  # a palette that an earlier test has left
    for page in BROWSED:
        browser.errors.clear()
        browser.open(f"{served}/{page}", width=390, dark=dark)
        assert browser.errors == [], page
        assert browser.evaluate("document.scrollingElement.scrollWidth") <= 390, page
        assert browser.evaluate(UNREADABLE) == [], page
        scheme = browser.evaluate("document.body.getAttribute('data-md-color-scheme')")
        assert scheme == ("slate" if dark else "default"), page


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_shows_on_a_narrow_screen_without_errors(site, served, browser, dark):
    browser.open(served)
    browser.evaluate("localStorage.clear()")
    bad = {}
    for page in sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")):
        browser.errors.clear()
        browser.open(f"{served}/{page}/", width=390, dark=dark)
        wide = browser.evaluate("document.scrollingElement.scrollWidth")
        found = [*browser.errors, *browser.evaluate(UNREADABLE), *([wide] if wide > 390 else [])]
        if found:
            bad[page] = found
    assert bad == {}


def test_code_goes_on_below_and_words_of_a_drawing_stay_readable_on_a_narrow_screen(served, browser):
    browser.open(f"{served}/guides/learning-rates/", width=390)
    code, drawing = "document.querySelector('article pre > code')", "document.querySelector('article p > img')"
    assert browser.evaluate(f"{code}.scrollWidth <= {code}.clientWidth")
    assert browser.evaluate(f"{drawing}.width") >= 600  # 13 px in a drawing of 880 are 9 px or more
    box = f"{drawing}.parentElement"
    assert browser.evaluate(f"{box}.clientWidth <= 390 && {box}.scrollWidth > {box}.clientWidth")
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= 390


def test_pages_ask_nobody_else_for_anything(served, browser):
    """What the scripts of a page ask for counts as well."""
    browser.requests.clear()
    for page in BROWSED:
        browser.open(f"{served}/{page}")
    assert len(browser.requests) > len(BROWSED)
    assert [url for url in browser.requests if not url.startswith((served, "data:", "blob:"))] == []


def test_what_a_page_wants_from_the_network_is_an_error(served, browser):
    """The check above can fail: a page that asks for a script elsewhere is seen."""
    browser.open(served)
    browser.errors.clear()
    browser.requests.clear()
    browser.evaluate("fetch('http://example.com/x.js').catch(() => null)")
    assert "http://example.com/x.js" in browser.requests
    assert any("ERR_NAME_NOT_RESOLVED" in error for error in browser.errors)


def test_the_search_finds_a_page(served, browser):
    browser.open(served)
    browser.evaluate(
        """(async () => {
            document.querySelector('[data-md-toggle=search]').click();
            const field = document.querySelector('.md-search__input');
            field.focus(); field.value = 'offload_optimizer'; field.dispatchEvent(new Event('keyup'));
            for (let i = 0; i < 200 && !document.querySelector('.md-search-result__item'); i++)
                await new Promise(done => setTimeout(done, 50));
        })()"""
    )
    assert "offload" in browser.evaluate("document.querySelector('.md-search-result__list').textContent").lower()
    first = browser.evaluate("document.querySelector('.md-search-result__link').href")
    browser.open(first)
    assert first.startswith(served)
    assert "offload" in browser.evaluate("document.querySelector('article').textContent").lower()


def test_the_palette_can_be_changed(served, browser):
    """The button of the header turns the page dark, and the next page stays so."""
    browser.open(f"{served}/start/install/")
    browser.evaluate("localStorage.clear()")
    browser.open(f"{served}/start/install/")
    for button in ("Light", "Dark"):
        browser.evaluate(f"document.querySelector('label[title={button}]').click()")
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    assert browser.evaluate(scheme) == "slate"
    browser.open(f"{served}/start/first-run/")
    assert browser.evaluate(scheme) == "slate"
    browser.evaluate("localStorage.clear()")


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("sixteen", "states"), [(True, 2), (False, 2), (True, 1), (False, 0)])
def test_the_calculator_counts_as_the_engine_does(served, browser, stage, sixteen, states):
    """On one process the state of a real optimizer is as large as the page says; on eight the page divides it."""
    browser.open(f"{served}/guides/zero-stage/")
    count = 10**6

    def bytes_of(ranks: int, away: str) -> dict[str, float]:
        return browser.evaluate(
            f"dsxBytes({{parameters: {count}, ranks: {ranks}, stage: {stage}, sixteenBit: {str(sixteen).lower()},"
            f" states: {states}, optimizerHome: '{away}', parameterHome: 'device'}})"
        )

    low, master = (2, 4) if sixteen else (4, 0)
    divided = [(low, 3), (low, 2), (master + 4 * states, 1)]  # bytes per parameter, and the stage that divides them
    expected = sum(size * count / (8 if stage >= since else 1) for size, since in divided)
    assert bytes_of(8, "device") == {"device": expected, "host": 0, "disk": 0}
    away = bytes_of(8, "host")
    assert away["device"] + away["host"] == expected
    assert (away["host"] > 0) == (stage >= 1 and (master + states > 0 or stage >= 2))


# - A reader: what somebody types into the search leads to the answer, within the first three pages

QUESTIONS = {
    "Can I resume on half the GPUs?": ("resume number of processes", r"another number of (ranks|processes)"),
    "Does it run on my AMD card?": ("AMD", r"(AMD|ROCm)"),
    "How do I clip gradients?": ("clip gradients", r"gradient_clipping"),
    "How do I install it?": ("install", r"pip install \./packages/dsx"),
    "Is it on PyPI?": ("PyPI", r"belongs to another project"),
    "Which stage do I need?": ("which stage", r"Take the lowest stage that fits"),
    "It is out of memory. What now?": ("out of memory", r"(recomput|offload|micro-batch)"),
    "The loss is NaN. Why?": ("loss NaN", r"(overflow|not finite|non-finite|NaN)"),
    "My job hangs. Who is missing?": ("hang", r"(missing|waits)"),
    "How do I get weights for Hugging Face?": ("export safetensors", r"dsx checkpoint export"),
    "How do I start on Slurm?": ("Slurm", r"srun"),
    "Can I fine-tune with LoRA?": ("LoRA", r"(peft|LoRA)"),
    "I come from DeepSpeed. What changes?": ("coming from DeepSpeed", r"import dsx as deepspeed|dsx-compat"),
    "What does DSX502 mean?": ("DSX502", r"DSX502"),
    "Does a GPU job fit before I pay for it?": ("does it fit", r"dsx plan"),
}

SEARCH = """(async words => {
    const toggle = document.querySelector('[data-md-toggle=search]');
    if (!toggle.checked) toggle.click();
    const field = document.querySelector('.md-search__input');
    field.focus(); field.value = words; field.dispatchEvent(new Event('keyup'));
    const links = () => [...document.querySelectorAll('.md-search-result__item')]
        .map(item => item.querySelector('.md-search-result__link').href);
    for (let i = 0; i < 200 && !links().length; i++) await new Promise(done => setTimeout(done, 50));
    return [...new Set(links().map(link => link.split(/[?#]/)[0]))].slice(0, 3);
})"""


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_search_answers(served, browser, question):
    words, answer = QUESTIONS[question]
    browser.open(served)
    found = browser.evaluate(f"{SEARCH}({json.dumps(words)})")
    texts = []
    for page in found:
        browser.open(page)
        texts.append(browser.evaluate("document.querySelector('article').textContent"))
    assert any(re.search(answer, text) for text in texts), f"{words!r} finds {found}"


def test_a_question_without_an_answer_is_seen(served, browser):
    browser.open(served)
    for page in browser.evaluate(f"{SEARCH}({json.dumps('install')})"):
        browser.open(page)
        assert not re.search("xylophone", browser.evaluate("document.querySelector('article').textContent"))
