"""The files in /dev/shm, and those of them that other jobs on this machine use."""

import os

import psutil

FOLDER = "/dev/shm"
# Our processes inherit it, also those that are no longer below this one.
MARK = "PROCESS_OF_TESTS"

os.environ.setdefault(MARK, str(os.getpid()))
_foreign = set()


def names():
    """The files, except for those that only processes of other jobs have opened or mapped."""
    found = set(os.listdir(FOLDER))
    _foreign.intersection_update(found)
    if unknown := {name for name in found - _foreign if not name.startswith("sem.")}:
        _foreign.update(_of_others(unknown))
    return found - _foreign


def _of_others(candidates):
    ours = {process.pid for process in psutil.Process().children(recursive=True)} | {os.getpid()}
    used_by_us, used = set(), set()
    for process in psutil.process_iter():
        if names_of_it := candidates & _used_by(process):
            used |= names_of_it
            if process.pid in ours or _has_mark(process):
                used_by_us |= names_of_it
    return used - used_by_us


def _used_by(process):
    try:
        with open(f"/proc/{process.pid}/maps") as maps:
            paths = [line.split(maxsplit=5)[-1] for line in maps if FOLDER in line]
        paths += [file.path for file in process.open_files()]
    except (OSError, psutil.Error):  # it has ended, or belongs to another user
        return set()
    return {os.path.basename(path.strip()) for path in paths if path.startswith(f"{FOLDER}/")}


def _has_mark(process):
    try:
        return process.environ().get(MARK) == os.environ[MARK]
    except psutil.Error:
        return False
