"""Rank 0 tells its address over MPI: stand-ins for mpi4py that answer badly, late, or not at all."""

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from collectives.api import CollectiveTimeoutError, PeerLostError
from collectives.backends.mpi import library
from executors.launchers.mpi import Mpi

ROOT = Path(__file__).parents[3]
SECONDS = 30.0


class Request:
    def __init__(self, buffer, answer, tests):
        self.buffer, self.answer, self.tests = buffer, answer, tests

    def Test(self):
        self.tests -= 1
        if not self.tests and self.answer is not None:
            self.buffer[: len(self.answer)] = self.answer
        return self.tests == 0


@pytest.fixture
def mpi(monkeypatch):
    """mpi4py's MPI: the broadcast is over when it was tested for the second time."""
    module = types.ModuleType("mpi4py.MPI")
    module.BYTE, module.Exception, module.answer, module.tests = "byte", OSError, None, 2

    def broadcast(message, root):
        assert (message[1], root) == (module.BYTE, 0)
        if isinstance(module.answer, Exception):
            raise module.answer
        return Request(message[0], module.answer, module.tests)

    module.Is_initialized, module.Is_finalized = lambda: True, lambda: False
    module.COMM_WORLD = types.SimpleNamespace(Ibcast=broadcast, Get_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "mpi4py", types.ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    monkeypatch.setattr(library, "_use", library._Use())
    return module


def opened():
    return Mpi.open(2, SECONDS)


def test_a_value_goes_from_rank_0_to_the_others_by_mpi(mpi):
    assert opened().broadcast(b"where", SECONDS) == b"where"
    mpi.answer = b"where"
    assert opened().broadcast(None, SECONDS) == b"where"


@pytest.mark.parametrize(
    ("value", "ranks", "text"), [(None, (0,), "look at the log of rank 0"), (b"x", (), "of all other ranks")]
)
def test_ranks_that_do_not_come_to_the_broadcast_of_mpi(mpi, value, ranks, text):
    mpi.tests = 0
    with pytest.raises(CollectiveTimeoutError, match=rf"did not end within 0\.05 s: .*{text}.*MASTER_ADDR") as caught:
        opened().broadcast(value, 0.05)
    assert caught.value.ranks == ranks
    assert library._use.hindrance == str(caught.value)


def test_mpi_finalize_may_last_after_a_later_broadcast_that_is_over(mpi):
    mpi.tests = 0
    with pytest.raises(CollectiveTimeoutError):
        opened().broadcast(None, 0.05)
    mpi.tests = 2
    opened().broadcast(None, SECONDS)
    assert not library._use.hindrance


def test_a_broadcast_of_mpi_that_fails(mpi):
    mpi.answer = OSError("MPI_ERR_OTHER")
    with pytest.raises(PeerLostError, match=r"MPI_Ibcast of the address of rank 0 failed: MPI_ERR_OTHER; let mpirun"):
        opened().broadcast(None, SECONDS)


def test_another_mpi_than_that_of_mpirun_is_passed_over(mpi):
    assert Mpi.open(3, SECONDS) is None
    del sys.modules["mpi4py.MPI"]
    assert Mpi.open_if_in_use(2, SECONDS) is None


@pytest.mark.parametrize(("is_initialized", "is_finalized"), [(False, False), (True, True)])
def test_an_mpi_that_has_not_started_or_has_ended_is_passed_over(mpi, is_initialized, is_finalized):
    """Any other call would end the process."""
    mpi.Is_initialized, mpi.Is_finalized = lambda: is_initialized, lambda: is_finalized
    assert Mpi.open(2, SECONDS) is None


OPTIONS = """
class rc:
    initialize, finalize, threads, thread_level = True, None, True, "multiple"
"""
STARTS = """
THREAD_MULTIPLE = 3
def Init_thread(level): pass
"""


def ended(code, folder):
    """The end of a process with an mpi4py from ``folder``, which runs ``code``."""
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "from executors.launchers import broadcast\n" + code]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=SECONDS, check=False
    )


@pytest.fixture
def mpi4py(tmp_path):
    """A function that makes an mpi4py with this code; returns the folder to import it from."""

    def make(code):
        (tmp_path / "mpi4py").mkdir()
        (tmp_path / "mpi4py" / "__init__.py").write_text(OPTIONS)
        (tmp_path / "mpi4py" / "MPI.py").write_text(STARTS + code)
        return tmp_path

    return make


def test_a_process_does_not_wait_for_ever_in_mpi_init(mpi4py):
    folder = mpi4py(
        "import threading\nIs_initialized = lambda: False\ndef Init_thread(level): threading.Event().wait(600)"
    )
    done = ended("broadcast.ByBroadcast(('mpi4py',), 2).follow('job', 0.1)", folder)
    assert (done.returncode, "in _wait_in_mpi_init_for_all_ranks" in done.stderr) == (1, True)


HANGING = """
import ctypes
BYTE, Exception, done = None, OSError, False
Is_initialized, Is_finalized = lambda: True, lambda: False
def Finalize(): ctypes.CDLL(None).pause()
class COMM_WORLD:
    Get_size = staticmethod(lambda: 2)
    Ibcast = staticmethod(lambda *_: COMM_WORLD)
    Test = staticmethod(lambda: done)
"""
BY_MPI4PY = "ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).pause)  # where mpi4py calls MPI_Finalize"
FAILING = """
from collectives.backends.mpi import library
library.FINALIZE_SECONDS = 0.1
broadcast.ByBroadcast(('mpi4py',), 2).follow('job', 0.05)
"""
SAID = "CollectiveTimeoutError: MPI_Ibcast of the address of rank 0 did not end within"


def test_a_process_that_has_started_mpi_leaves_mpi_finalize_out_if_it_could_wait_for_ever(mpi4py):
    done = ended(FAILING, mpi4py(HANGING))
    assert done.returncode == 1
    assert SAID in done.stderr
    assert "this process ends without MPI_Finalize, which could wait for ever: MPI_Ibcast of the" in done.stderr


def test_mpi_finalize_of_mpi4py_itself_does_not_wait_for_ever(mpi4py):
    """A script that has imported mpi4py before lets it end MPI."""
    done = ended("import mpi4py.MPI\n" + FAILING, mpi4py(HANGING + BY_MPI4PY))
    assert done.returncode == -signal.SIGALRM
    assert SAID in done.stderr


ENDING = """
import os
Is_initialized, Is_finalized = lambda: True, lambda: False
def Finalize(): os.write(1, b"finalized\\n")
"""
STARTING = "from collectives.backends.mpi import library\nlibrary.import_mpi(9.0)\n"


@pytest.mark.parametrize(
    ("code", "times"),
    [(STARTING, 1), ("import mpi4py.MPI\n" + STARTING, 0), (STARTING + "import os\nos.fork() or exit()\nos.wait()", 1)],
    ids=["started here", "started by the script", "forked"],
)
def test_the_process_that_has_started_mpi_ends_it(mpi4py, code, times):
    done = ended(code, mpi4py(ENDING))
    assert (done.returncode, done.stdout) == (0, "finalized\n" * times)
