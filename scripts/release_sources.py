"""The sources of a release: those of HEAD, with the addresses of the project in them.

    python -m scripts.release_sources https://github.com/OWNER/hvd-cluster FOLDER

A checkout names no address, because each fork has one of its own. On a package index the links of the README lead
nowhere without it. So a release gets the address where it is built: in ``[project.urls]``, and in each link of the
README, which leads to the tag of the version.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

RELATIVE = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")
PICTURES = {".svg", ".png"}
VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)
NEXT_TABLE = "\n[project.optional-dependencies]\n"


def checked(address: str) -> str:
    """``address`` without a slash at its end. Raises ValueError unless it is one of a repository on the web."""
    parts = urlsplit(address)
    if parts.scheme != "https" or not parts.netloc or parts.path.count("/") < 2:
        raise ValueError(f"{address!r} is no address of a repository; give one as https://github.com/OWNER/hvd-cluster")
    return address.rstrip("/")


def with_links(readme: str, address: str, version: str) -> str:
    """The ``readme`` with absolute links in place of relative ones."""

    def absolute(found: re.Match[str]) -> str:
        path = found[1]
        kind = "raw" if PurePosixPath(path).suffix in PICTURES else "blob"
        return f"]({address}/{kind}/v{version}/{path})"

    return RELATIVE.sub(absolute, readme)


def with_urls(project: str, address: str) -> str:
    """The text of pyproject.toml with a table of addresses. Raises ValueError where there is no place for it."""
    version = version_of(project)
    if project.count(NEXT_TABLE) != 1 or "[project.urls]" in project:
        raise ValueError(f"pyproject.toml must have one line {NEXT_TABLE.strip()}, and no table [project.urls]")
    urls = {
        "Source": address,
        "Documentation": f"{address}/blob/v{version}/docs/start/README.md",
        "Changelog": f"{address}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return project.replace(NEXT_TABLE, f"\n[project.urls]\n{table}{NEXT_TABLE}")


def version_of(project: str) -> str:
    """The version in the text of pyproject.toml. Raises ValueError without one."""
    found = VERSION.search(project)
    if found is None:
        raise ValueError('pyproject.toml has no line such as version = "1.0.0"')
    return found[1]


def write(address: str, folder: Path) -> None:
    """Write the sources of HEAD into ``folder``. Raises ValueError, OSError, CalledProcessError."""
    address = checked(address)
    archive = subprocess.run(["git", "archive", "HEAD"], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    project, readme = folder / "pyproject.toml", folder / "README.md"
    text = project.read_text("utf-8")
    project.write_text(with_urls(text, address), "utf-8")
    readme.write_text(with_links(readme.read_text("utf-8"), address, version_of(text)), "utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m scripts.release_sources https://github.com/OWNER/hvd-cluster FOLDER")
    try:
        write(sys.argv[1], Path(sys.argv[2]))
    except ValueError as error:
        sys.exit(str(error))
