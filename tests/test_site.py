"""The hooks of the site: a link of the repository leads to a page of the site. MkDocs itself checks that it exists.

Besides, the gallery is complete: each example has its place, and what it shows.
"""

import importlib.util

import pytest

from scripts import gallery_pages
from tests.doc_blocks import ROOT

MOST_BYTES = 60_000


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
        assert page.startswith(f"# {gallery_pages.TITLES[path.stem]}\n\nFor you to copy: the file `examples/")
        assert path.read_text() in page
        assert (ROOT / "docs" / "gallery" / f"{path.stem}.txt").read_text() in page


def test_the_gallery_has_a_card_for_each_example_and_is_up_to_date():
    assert set(gallery_pages.TITLES) == {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert gallery_pages.FOLDER.joinpath("README.md").read_text() == gallery_pages.index()  # scripts/gallery --index


def test_the_gallery_keeps_nothing_that_no_example_shows():
    examples = [gallery_pages.Example(name) for name in gallery_pages.TITLES]
    shown = {"README.md", *(each.output.name for each in examples), *(each.picture for each in examples)}
    found = [path for path in gallery_pages.FOLDER.iterdir() if path.name != "README.md"]
    assert {path.name for path in found} == shown - {"README.md", None}
    assert not [path.name for path in found if not 0 < path.stat().st_size < MOST_BYTES]


@pytest.mark.parametrize("name", ["digits", "gan_ring", "search_ray"])
def test_the_command_of_a_page_is_that_of_the_example(name):
    commands = {
        "digits": "hvdrun -np 2 python examples/digits.py",
        "gan_ring": "hvdrun -np 2 python examples/gan_ring.py",
        "search_ray": "python examples/search_ray.py",
    }
    assert gallery_pages.Example(name).command == commands[name]


def test_what_an_example_prints_is_kept_without_noise_and_in_short():
    lines = ["hvdrun: OMP_NUM_THREADS=1 for each", "", *(f"[0]<stdout>:step {number}" for number in range(100))]
    kept = gallery_pages.clean("\n".join(lines)).splitlines()
    assert kept[0] == "[0]<stdout>:step 0"
    assert kept[20] == "..."
    assert kept[-1] == "[0]<stdout>:step 99"
    assert len(kept) == 41


def test_a_picture_becomes_smaller_by_digits_that_nobody_sees(tmp_path):
    path = tmp_path / "a.svg"
    path.write_text('<svg><metadata>today</metadata><g transform="scale(0.015625)"><path d="M 1.23456 7.0"/></g></svg>')
    gallery_pages.shrink(path)
    assert path.read_text() == '<svg><g transform="scale(0.015625)"><path d="M 1.2 7.0"/></g></svg>'


def test_the_front_page_is_the_readme(hooks):
    assert hooks.page_of("README.md").endswith((ROOT / "README.md").read_text())
