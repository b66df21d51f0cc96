"""The documentation's site: every page has its place, every link leads somewhere, nothing comes from a network."""

import html
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

import distaccum
from distaccum import functional
from launch.docs.docstrings import markdown_of
from tests.support.commands import ROOT

CONFIGURATION = (ROOT / ".mkdocs.yml").read_text()
DOCS = ROOT / "docs"


def test_every_page_is_in_the_navigation() -> None:
    nav = CONFIGURATION.split("\nnav:\n")[1].split("\n\n")[0]
    named = re.findall(r"- (?:[^:\n]+: )?([\w/.-]+\.md)$", nav, re.MULTILINE)
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(named) == sorted([*pages, "contributing.md", "changelog.md"]), "give the page a place in .mkdocs.yml"


def test_the_api_page_has_every_public_name_once() -> None:
    named = re.findall(r"^::: (distaccum[\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    public = {name for name in distaccum.__all__ if name != "functional"}
    expected = [*(f"distaccum.{name}" for name in public), *(f"distaccum.functional.{n}" for n in functional.__all__)]
    assert sorted(named) == sorted(expected)


def test_links_out_of_docs_lead_to_pages_of_the_site_or_are_text() -> None:
    from launch.docs.hooks import of_the_site  # noqa: PLC0415  mkdocs

    page = (
        "[a](engines.md#x) [b](../CONTRIBUTING.md#tests) [c](../tests/simulation) [d](https://e.org) ![e](images/f.svg)"
    )
    site = "[a](engines.md#x) [b](contributing.md#tests) c [d](https://e.org) ![e](images/f.svg)"
    assert of_the_site(page, DOCS) == site
    assert (
        of_the_site("[a](docs/engines.md) [b](README.md) [c](README.md#x)", ROOT) == "[a](engines.md) [b](index.md) c"
    )


def test_restructured_text_in_docstrings_becomes_markdown() -> None:
    docstring = """
        Steps once per window::

            acc.step()

        See :meth:`step`, :class:`~distaccum.losses.base.Loss` and ``a::b``.

        ::

            code
        """
    shown = """
        Steps once per window:

            acc.step()

        See `step`, `Loss` and ``a::b``.



            code
        """
    assert markdown_of(dedent(docstring)) == dedent(shown)


def _tables_blocks_and_items(markdown: str) -> tuple[int, int, int]:
    """How many tables, blocks of code and items of lists a page has where Markdown is read as code hosts do."""
    fence = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
    indented = re.compile(r"^\n(?: {4}.*\n)+", re.MULTILINE)
    text, fenced = fence.subn("", markdown)
    tables, items = (
        re.findall(r"^\|[-| :]+\|$", text, re.MULTILINE),
        re.findall(r"^ *(?:[-*]|\d+\.) ", text, re.MULTILINE),
    )
    return len(tables), fenced + (0 if items else len(indented.findall(text))), len(items)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert built.returncode == 0, built.stderr

    for path in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="([^"]+)"', path.read_text())
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preload|preconnect)"[^>]*href="([^"]+)"', path.read_text())
        assert loaded, path
        for source in loaded:
            file = source.split("?")[0]
            assert "//" not in file or source.startswith("data:"), f"{path.name} loads {source} from a network"
            where = tmp_path / file[1:] if file.startswith("/") else path.parent / file
            assert source.startswith("data:") or where.is_file(), f"{path.name}: {source}"

    for page in sorted(DOCS.glob("*.md")):
        if page.name != "api.md":  # which is filled
            article = (tmp_path / f"{page.stem}.html").read_text().split("<article")[1].split("</article>")[0]
            shown = (article.count("<table"), article.count("<pre"), len(re.findall(r"<li\b", article)))
            assert shown == _tables_blocks_and_items(page.read_text()), f"{page.name} is no Markdown for the site"

    api = html.unescape(re.sub(r"<[^>]+>", "", (tmp_path / "api.html").read_text()))
    for said in ("global_batch_size", "samples per optimizer step over all ranks", "ConfigError", "Raises:"):
        assert said in api
    for raw in (":meth:", ":class:", "::\n", "Args:\n"):
        assert raw not in api

    browser = shutil.which("chromium")
    if browser is None:
        assert "DISTACCUM_REQUIRE_TOOLS" not in os.environ, "chromium is missing"
        return
    # From the disk, where no Worker starts: what a search for a key's last part finds.
    opened = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
    url = f"{(tmp_path / 'engines.html').as_uri()}?q=bucket_cap_mb"
    shown = subprocess.run([*opened, url], capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.findall(r'<a href="file:[^"]*/(\w+\.html)[^"]*" class="md-search-result__link"', shown)
    assert {"engines.html", "reference.html", "api.html"} <= set(found)


# ------------------------------------------------------------------------------------------ the page of features

FEATURES = (DOCS / "features.md").read_text()
READ_FROM = {"accelerate": "v{}", "lightning": "{}", "transformers": "v{}", "deepspeed": "v{}"}
SHOWN_BY = yaml.safe_load((ROOT / "tests" / "shown_by.yaml").read_text())["features"]


def test_every_feature_that_distaccum_has_is_shown_by_tests_that_there_are() -> None:
    tables = re.findall(r"^\| \| distaccum \|.*?(?=^## |^\[|\Z)", FEATURES, re.MULTILINE | re.DOTALL)
    assert len(tables) >= 5
    rows = [line[2:].split(" | ")[:2] for table in tables for line in table.strip().splitlines()[2:] if line]
    assert list(SHOWN_BY) == [feature for feature, ours in rows if ours != "no"]
    for test in (test for tests in SHOWN_BY.values() for test in tests):
        file, name = test.split("::")
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), test


def test_what_other_libraries_have_is_where_the_page_says() -> None:
    """In those that are installed: the file of each link has the name that the link shows."""
    links = re.findall(r"\[`([^`]+)`\]\((https://[^)]+)\)", FEATURES)
    looked_up = 0
    for name, place in links:
        found = re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/blob/([\w.]+)/(?:src/)?(?:(\w+)/)?(.+)", place)
        assert found, place
        version, package, file = found.groups()
        if package not in READ_FROM or importlib.util.find_spec(package) is None:
            continue
        installed = importlib.metadata.version(package)
        assert version == READ_FROM[package].format(installed), f"{package} {installed}: look its cells up again"
        (where,) = importlib.util.find_spec(package).submodule_search_locations  # type: ignore[union-attr,misc]
        assert name in (Path(where) / file).read_text(), f"{name} is not in {package}/{file}"
        looked_up += 1
    assert looked_up == 0 or looked_up > 40
