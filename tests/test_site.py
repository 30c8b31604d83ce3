"""The hooks of the site: a link of the repository leads to a page of the site. MkDocs itself checks that it exists."""

import importlib.util

import pytest

from tests.doc_blocks import ROOT


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts" / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "link", "target"),
    [
        ("index.md", "docs/elastic.md#on-ray", "elastic.md#on-ray"),
        ("index.md", "examples/digits.py", "examples/digits.md"),
        ("index.md", "docs/speed.svg", "speed.svg"),
        ("index.md", "LICENSE", "license.md"),
        ("index.md", "#install", "#install"),
        ("index.md", "https://example.org/docs/a.md", "https://example.org/docs/a.md"),
        ("contributing.md", "SECURITY.md", "security-policy.md"),
        ("elastic.md", "../examples/digits.py", "examples/digits.md"),
        ("elastic.md", "sharded.md#speed", "sharded.md#speed"),
        ("guides/data.md", "../../examples/digits.py", "../examples/digits.md"),
        ("guides/data.md", "../../README.md#install", "../index.md#install"),
        ("guides/data.md", "../spark.md", "../spark.md"),
        ("launch/slurm.md", "files/slurm/one_node.sbatch", "files/slurm/one_node.sbatch"),
    ],
)
def test_a_link_leads_to_the_page_of_the_site(hooks, page, link, target):
    assert hooks.rewrite_links(f"see [it]({link}), too", page) == f"see [it]({target}), too"


def test_a_link_out_of_the_site_stays_wrong_so_that_the_build_fails(hooks):
    assert hooks.rewrite_links("[it](../setup.cfg)", "elastic.md") == "[it](../setup.cfg)"


def test_each_example_is_a_page_with_its_code(hooks):
    for path in (ROOT / "examples").glob("*.py"):
        page = hooks.page_of(f"examples/{path.name}")
        assert page.startswith(f"# {path.name}\n")
        assert path.read_text() in page


def test_the_front_page_is_the_readme(hooks):
    assert hooks.page_of("README.md").endswith((ROOT / "README.md").read_text())
