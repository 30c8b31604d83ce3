"""The layout of a wheel: its only package is ``hvd_cluster``, which has ``collectives`` and ``executors`` inside.

In a checkout the three stand side by side. There are other distributions with packages of the names ``collectives``
and ``executors``: pip would write the files of one over those of the other, and to uninstall one would break the other.
So a build moves both into ``hvd_cluster``, as ``_collectives`` and ``_executors``, and changes the imports, and the
names of modules in strings. An editable installation stays as the checkout is.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

HOME = "hvd_cluster"
MOVED = ("collectives", "executors")
_NAMES = "|".join(MOVED)
# "import executors.agents.spark" binds another name afterwards, so no code of ours uses the name.
IMPORT = re.compile(rf"\b(from|import) ({_NAMES})\b(?=[. ])")
QUOTED = re.compile(rf"""(["'])({_NAMES})(?=[."'])""")


def relocated(source: str) -> str:
    """The ``source`` of a module as a wheel has it."""
    return QUOTED.sub(rf"\1{HOME}._\2", IMPORT.sub(rf"\1 {HOME}._\2", source))


def relocate(folder: Path) -> None:
    """Change the packages in ``folder``, a copy of the checkout's."""
    for name in MOVED:
        target = folder / HOME / f"_{name}"
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(folder / name, target)
    for path in (folder / HOME).rglob("*.py"):
        source = path.read_text("utf-8")
        if (changed := relocated(source)) != source:
            path.write_text(changed, "utf-8")


class BuildInside(build_py):
    """Copies the packages, and gives the copy the layout of a wheel."""

    def run(self) -> None:
        """Build into an empty folder: files of an earlier build have been moved away."""
        if not self.editable_mode:
            for name in (HOME, *MOVED):
                shutil.rmtree(Path(self.build_lib) / name, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            relocate(Path(self.build_lib))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The files in their places."""
        found = super().get_outputs(include_bytecode)
        if self.editable_mode:
            return found
        return [str(_place(Path(path), Path(self.build_lib))) for path in found]


def _place(path: Path, folder: Path) -> Path:
    parts = path.relative_to(folder).parts
    return folder.joinpath(HOME, f"_{parts[0]}", *parts[1:]) if parts[0] in MOVED else path


class OnePackage(egg_info):
    """Says which package to import, which is what tools that map packages to distributions read."""

    def run(self) -> None:
        """Write the description of the distribution."""
        super().run()
        (Path(self.egg_info) / "top_level.txt").write_text(f"{HOME}\n", "utf-8")
