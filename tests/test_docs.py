"""The Python blocks of README and docs run; links lead somewhere; messages on the troubleshooting page exist."""

import ast
import functools
import re
from importlib.util import find_spec

import pytest

import hvd_cluster
from tests import startup
from tests.doc_blocks import PAGES, PLACES, ROOT, blocks, execute

SECTION = re.compile(r'"([^"]+)"\s+in\s+the\s+(\w+)\s+page')
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)]*))?\)")
SOURCES = [path for layer in ("collectives", "executors", "hvd_cluster") for path in (ROOT / layer).rglob("*.py")]


def run_all(place):
    """Every block of a place for ranks, one after the other; what went wrong, by block. Runs in each rank."""
    import traceback

    from hvd_cluster.core import basics

    problems = {}
    for block in blocks(place):
        try:
            execute(block)
        except Exception:  # noqa: BLE001  each block has a test of its own
            problems[block.name] = traceback.format_exc()
        finally:
            basics.shutdown()
    return problems


def run_on_two_ranks(place):
    variables = {"PYTHONPATH": startup.PATH, "HOROVOD_GLOO_TIMEOUT_SECONDS": "20", "KERAS_BACKEND": "tensorflow"}
    return hvd_cluster.run(run_all, (place,), num_proc=2, env=variables)


@pytest.fixture(scope="module")
def problems():
    pytest.importorskip("torch")
    return run_on_two_ranks("ranks")


@pytest.fixture(scope="module")
def problems_with_tensorflow():
    if find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    return run_on_two_ranks("tensorflow")


@pytest.mark.parametrize("block", blocks("ranks"), ids=lambda block: block.name)
def test_a_block_runs_on_two_ranks(problems, block):
    assert not [each[block.name] for each in problems if block.name in each]


@pytest.mark.parametrize("block", blocks("tensorflow"), ids=lambda block: block.name)
def test_a_block_of_tensorflow_runs_on_two_ranks(problems_with_tensorflow, block):
    assert not [each[block.name] for each in problems_with_tensorflow if block.name in each]


@pytest.mark.parametrize("block", blocks("launcher"), ids=lambda block: block.name)
def test_a_block_that_starts_ranks(block):
    pytest.importorskip("torch")
    assert execute(block)["results"] == [(0, 0.01), (1, 0.01)]


def test_every_block_has_a_place_where_it_is_run():
    assert len(blocks(*PLACES)) == sum(page.read_text().count("```python") for page in PAGES) > 12


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_first_sentence_of_a_page_says_for_whom_it_is(page):
    assert re.match(r"# .*\n\nFor [^\n]+", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    links = [(page.parent / file, heading) for file, heading in LINK.findall(page.read_text()) if "://" not in file]
    assert not [file for file, _ in links if not file.exists()]
    assert not [(file, heading) for file, heading in links if heading and heading not in anchors(file.read_text())]


def test_the_files_that_contributors_shall_read_exist():
    paths = re.findall(r"`([a-z_]+/[\w/.]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(paths) > 10
    assert not [path for path in paths if not any((root / path).exists() for root in (ROOT, ROOT / "hvd_cluster"))]


def test_the_glossary_is_short():
    terms = re.findall(r"^\| ", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert 10 < len(terms) - 1 <= 20


def anchors(text):
    """Those that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sections_that_a_page_mentions_exist(page):
    for section, other in SECTION.findall(page.read_text()):
        headings = (ROOT / "docs" / f"{other}.md").read_text()
        assert re.search(rf"^#+ {re.escape(section)}$", headings, re.MULTILINE), section


def test_the_package_promises_no_elastic_jobs_before_they_exist():
    planned = re.search(r"^\|.*\| (.*elastic jobs.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    description = re.search(r'^description = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert not (planned and "elastic" in description)


@functools.cache
def strings_of_sources():
    return tuple(text for path in SOURCES for text in strings(path))


def strings(path):
    """The string constants of a source; what an f-string puts in is left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.replace("%d", "…").replace("%s", "…")


@pytest.mark.parametrize(("page", "least"), [("troubleshooting.md", 30), ("launch/README.md", 3)])
def test_messages_of_a_page_are_in_the_code(page, least):
    said = strings_of_sources()
    rows = re.findall(r"^\| (`.*?) \| ", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    messages = [message for row in rows for message in re.findall("`(.*?)`", row)]
    pieces = {piece.strip() for message in messages for piece in message.split("…")}
    assert len(pieces) >= least
    assert not [piece for piece in pieces if not any(piece in text for text in said)]
