"""The documents: links lead somewhere, commands exist with their options, settings are settings, the tutorial runs."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import click
import pytest
import yaml

from mmbroker import config
from mmbroker.cli import main
from mmbroker.config import Settings
from tests.kit import BrokerProcess

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "tests" / "README.md"])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def anchors(page: Path) -> set[str]:
    """Of its headings, as forges make them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = unquote(target).partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def commands() -> list[tuple[str, list[str]]]:
    """Every `mmbroker ...` in the documents, at the beginning of a line or in running text."""
    found: list[tuple[str, list[str]]] = []
    for page in PAGES:
        text = page.read_text()
        lines = re.findall(
            r"(?:^(?:\w+=\S+ )*|`|\$\()(?:\S*/)?mmbroker((?: [^`#|)]+?)?)(?:`|\)|$|  )", text, re.MULTILINE
        )
        for line in lines:
            words = shlex.split(line.replace("...", ""))
            if words and not words[0].startswith("-"):
                found.append((str(page.relative_to(ROOT)), words))
    return found


def test_there_are_commands() -> None:
    verbs = {words[0] for _, words in commands()}
    assert {"start", "status", "stop", "top", "drain", "evict", "profile", "bench", "doctor", "ls"} <= verbs


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda value: str(value))
def test_commands_exist_with_their_options(page: str, words: list[str]) -> None:
    command = main.get_command(click.Context(main), words[0])
    assert command is not None, f"{page}: mmbroker {shlex.join(words)}"
    known = {option for parameter in command.params for option in parameter.opts}
    for word in words[1:]:
        assert not word.startswith("-") or word.partition("=")[0] in known, f"{page}: {word} of {words[0]}"


def test_every_command_is_documented() -> None:
    told = {words[0] for page, words in commands() if page != "CHANGELOG.md"}
    assert set(main.commands) <= told | {"demo"}, set(main.commands) - told


def test_the_tutorials_program_runs(broker: BrokerProcess, tmp_path: Path) -> None:
    """As it is printed."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=dict(os.environ),
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1\n"


def test_the_readmes_program_runs(broker: BrokerProcess, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=dict(os.environ),
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "torch.Size([4096, 1176])\n"


def test_settings_that_are_shown_are_ones(tmp_path: Path) -> None:
    """Files as the documents print them; variables that stand in running text."""
    blocks = [
        text for page in PAGES for text in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    assert blocks
    for number, text in enumerate(blocks):
        file = tmp_path / f"{number}.toml"
        file.write_text(text)
        Settings.resolve({}, {}, file)
    known = {f"MMBROKER_{name.upper()}" for name in (*Settings.__struct_fields__, *config._LIMITS)}
    known |= set(re.findall(r"`(MMBROKER_\w+)`", (ROOT / "docs" / "settings.md").read_text()))
    told = {name for page in PAGES for name in re.findall(r"\b(MMBROKER_[A-Z_]+)\b", page.read_text())}
    assert told - known == {"MMBROKER_TORCH", "MMBROKER_TEST_EXAMPLES"} & told, "variables that nothing reads"


def test_configuration_of_others_is_well_formed() -> None:
    for page in PAGES:
        for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            assert isinstance(yaml.safe_load(text), dict)


def test_reasons_of_fallbacks_are_explained() -> None:
    from mmbroker.metrics import FALLBACKS

    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "operating.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(FALLBACKS)


def test_references_are_the_codes() -> None:
    """`python docs/make_reference.py` writes them anew."""
    maker = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))
    for name, page in maker["pages"]().items():
        assert (ROOT / "docs" / name).read_text() == page, name


def test_the_help_of_start_tells_the_defaults_that_hold() -> None:
    told = {
        option.name: int(number[1])
        for option in main.commands["start"].params
        if isinstance(option, click.Option) and (number := re.search(r"default: (\d+)\]", option.help or ""))
    }
    assert {"device_mib", "device_headroom_mib"} <= set(told)
    settings = Settings.resolve({}, {})
    assert told == {name: getattr(settings, str(name)) for name in told}


def words(plot: Path) -> list[str]:
    """What is written in it."""
    return re.findall(r"<text[^>]*>([^<]+)<", plot.read_text())


def test_the_plot_is_of_the_stored_results(tmp_path: Path) -> None:
    """`python docs/plots.py` draws it anew. Its words are compared: no version of matplotlib changes them."""
    runpy.run_path(str(ROOT / "docs" / "plots.py"))["draw"](tmp_path / "gain.svg")
    anew, kept = (words(path) for path in (tmp_path / "gain.svg", ROOT / "docs" / "gain.svg"))
    assert anew == kept and any("mmbroker" in word for word in kept)


def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    """As `make docs` builds it, without the network."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            str(tmp_path / "site"),
        ],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pages = {page.stem for page in (tmp_path / "site").glob("*.html")} - {"404"}
    assert pages == {page.stem for page in (ROOT / "docs").glob("*.md")}
    listed = set(re.findall(r"(\w[\w-]*)\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == pages, "a page that no menu shows is not found"
    first = (tmp_path / "site" / "index.html").read_text()
    loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?://[^\" >]+)", first)
    assert loaded == [], "nothing is loaded from elsewhere"


def test_figures_are_the_stored_results() -> None:
    """`python docs/make_benchmarks.py` writes the tables anew; each stands on a result that is stored."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert page == runpy.run_path(str(ROOT / "docs" / "make_benchmarks.py"))["page"](page)
    assert page.count("<!-- end -->") == len(re.findall(r"<!-- (?!end)", page)) > 5


def test_the_page_of_many_machines_is_of_the_stored_results(tmp_path: Path) -> None:
    """`python docs/make_scale.py` writes its blocks anew, and draws its plots, whose words are compared."""
    maker = runpy.run_path(str(ROOT / "docs" / "make_scale.py"))
    page = (ROOT / "docs" / "scale.md").read_text()
    assert page == maker["page"](page, maker["BLOCKS"])
    assert set(re.findall(r"<!-- (\w+) \w", page)) == set(maker["BLOCKS"]), "a block that no page shows"
    from docs.scale_plots import draw  # the maker knows where it is

    for drawn in draw(maker["results"](), tmp_path):
        anew, kept = (words(path) for path in (drawn, ROOT / "docs" / drawn.name))
        assert anew == kept and any("machines" in word for word in kept)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    """What the shell is told calls this program, in the way that the program then understands."""
    mmbroker = Path(sys.executable).with_name("mmbroker")
    script = subprocess.run(
        [mmbroker, "completion", shell], capture_output=True, text=True, timeout=60, check=True
    )
    assert "mmbroker" in script.stdout and f"_MMBROKER_COMPLETE={shell}_complete" in script.stdout
    words = {"COMP_WORDS": "mmbroker dr", "COMP_CWORD": "dr" if shell == "fish" else "1"}
    done = subprocess.run(
        [mmbroker],
        env={**os.environ, "_MMBROKER_COMPLETE": f"{shell}_complete", **words},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "drain" in done.stdout and "start" not in done.stdout


def test_bash_completes() -> None:
    """In a real one."""
    program = (
        'eval "$(mmbroker completion bash)"; COMP_WORDS=(mmbroker start --host); COMP_CWORD=2; '
        "_mmbroker_completion mmbroker; echo ${COMPREPLY[@]}"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", program], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.split(), done.stderr) == (["--host-mib"], "")
