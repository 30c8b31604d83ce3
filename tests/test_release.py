"""The sources of a release: they have the addresses of the project, which those of the checkout do not have."""

import re

import pytest

from scripts import release_sources
from tests.doc_blocks import ROOT

ADDRESS = "https://github.com/acme/hvd-cluster"


def test_links_lead_to_the_tag():
    readme = "[a](docs/a.md#b) ![c](docs/c.svg) [![d](d.png)](d.md) [e](#install) [f](https://example.com/f)"
    assert release_sources.with_links(readme, ADDRESS, "1.2.0") == (
        f"[a]({ADDRESS}/blob/v1.2.0/docs/a.md#b) ![c]({ADDRESS}/raw/v1.2.0/docs/c.svg) "
        f"[![d]({ADDRESS}/raw/v1.2.0/d.png)]({ADDRESS}/blob/v1.2.0/d.md) [e](#install) [f](https://example.com/f)"
    )


@pytest.mark.parametrize(
    "address",
    ["", "hvd-cluster", "http://github.com/acme/hvd-cluster", "https://github.com", "https://github.com/acme"],
)
def test_what_is_no_address(address):
    with pytest.raises(ValueError, match=r"no address of a repository; give one as https://github\.com/OWNER/hvd"):
        release_sources.checked(address)


def test_a_project_without_a_place_for_addresses():
    with pytest.raises(ValueError, match=r'no line such as version = "1\.0\.0"'):
        release_sources.with_urls("[project]\n", ADDRESS)
    with pytest.raises(ValueError, match="must have one line"):
        release_sources.with_urls('version = "1.0.0"\n', ADDRESS)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository: a release is made of HEAD")
def test_the_sources_of_a_release(tmp_path):
    release_sources.write(f"{ADDRESS}/", tmp_path)
    project = (tmp_path / "pyproject.toml").read_text()
    version = release_sources.version_of(project)
    assert f'\n[project.urls]\nSource = "{ADDRESS}"\n' in project
    readme = (tmp_path / "README.md").read_text()
    assert not release_sources.RELATIVE.search(readme)
    linked = set(re.findall(rf"{ADDRESS}/(?:blob|raw)/v{version}/([^)#\s]+)", readme))
    assert len(linked) > 50
    assert not [path for path in linked if not (tmp_path / path).exists()]


def test_the_version_is_the_same_everywhere():
    version = release_sources.version_of((ROOT / "pyproject.toml").read_text())
    assert f'VERSION = "{version}"' in (ROOT / "collectives" / "version.py").read_text()
    command = (ROOT / "hvd_cluster" / "horovod" / "command" / "pyproject.toml").read_text()
    assert release_sources.version_of(command) == version
    assert f'dependencies = ["hvd-cluster>={version}"]' in command
