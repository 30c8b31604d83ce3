"""A search in a folder: one that was ended goes on from there, with the same code.

The numbers of what a search has found never change, so each save only appends to the files. ``progress.json`` says how
much of them counts, and takes its new place in one step: a search that is killed loses what it did since the last save.
"""

import json
import os
import pickle
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("executors/**/*.py", "hvd_cluster/elastic/recovery.py", "tests/protocol/*.py")
"""The driver and the model: what the numbers in a folder depend on."""

PROGRESS, PARTS = "progress.json", "parts"


class OtherSearchError(RuntimeError):
    """The folder has another search, or that of other code."""


def code():
    """A digest of each source."""
    found = {path for pattern in SOURCES for path in ROOT.glob(pattern)}
    paths = sorted(path for path in found if not path.name.startswith(("test_", "__main__")))
    return {path.relative_to(ROOT).as_posix(): sha256(path.read_bytes()).hexdigest() for path in paths}


class SavedSearch:
    """The ``columns`` and ``parts`` of a search for ``job`` in ``folder``. Parts are lists, which pickle stores."""

    def __init__(self, folder, job, columns, parts):
        self._folder = Path(folder)
        self._job = job
        self._columns = columns
        self._parts = parts
        self._sizes = dict.fromkeys([*columns, *parts, PARTS], 0)
        self._code = code()

    def load(self):
        """Fill the columns. Returns the progress and the values of the parts; None if the folder has no search."""
        if not (self._folder / PROGRESS).exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            return None
        saved = json.loads((self._folder / PROGRESS).read_text())
        self._require_same(saved)
        self._sizes = saved["sizes"]
        for name, column in self._columns.items():
            with self._file(name) as file:
                column.read(file, self._sizes[name])
        return saved["progress"], self._read_parts()

    def _require_same(self, saved):
        if saved["job"] != self._job:
            raise OtherSearchError(f"{self._folder} has the search of another job: {saved['job']}; give another folder")
        now, then = self._code, saved["code"]
        changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
        if changed:
            raise OtherSearchError(
                f"{self._folder} has the search of other code: {', '.join(changed)} differ; go back to the code that "
                "began it, or give another folder"
            )

    def _read_parts(self):
        values = {name: [] for name in self._parts}
        with self._file(PARTS) as file:
            while file.tell() < self._sizes[PARTS]:
                for name, more in pickle.load(file).items():
                    values[name] += more
        return values

    def _file(self, name):
        (self._folder / name).touch()
        return (self._folder / name).open("r+b")

    def save(self, progress):
        """All that is new; ``progress`` is what else a search has to know to go on."""
        sizes = self._sizes
        for name, column in self._columns.items():
            with self._file(name) as file:
                file.truncate(sizes[name] * column.width)
                file.seek(0, os.SEEK_END)
                column.write(file, sizes[name])
        more = {name: part[sizes[name] :] for name, part in self._parts.items()}
        with self._file(PARTS) as file:
            file.truncate(sizes[PARTS])
            file.seek(sizes[PARTS])
            pickle.dump(more, file)
            end = file.tell()
        lengths = {name: len(each) for name, each in (self._columns | self._parts).items()}
        self._sizes = {**lengths, PARTS: end}
        self._write({"job": self._job, "code": self._code, "sizes": self._sizes, "progress": progress})

    def _write(self, saved):
        draft = self._folder / f"{PROGRESS}.new"
        draft.write_text(json.dumps(saved, indent=1))
        draft.replace(self._folder / PROGRESS)
