"""``python -m hvd_cluster.diagnose``."""

import importlib.util
import json
import subprocess
import sys
import types

import numpy as np
import pytest

from collectives.api import PeerLostError, SettingsError, Topology
from collectives.backends.registry import Row, rows
from collectives.settings import Settings
from executors.api import ExecutorError
from hvd_cluster import __version__
from hvd_cluster.diagnose.__main__ import main
from hvd_cluster.diagnose.machine import Machine, installed_versions
from hvd_cluster.diagnose.trial import DEFAULT, _filled, launch, try_row

NAMES = ["auto", *(row.name for row in rows())]


def launched(row):
    """Half a millisecond; gloo does not work."""
    if row.name == "gloo":
        raise ImportError("it is not there; install it")
    return 0.0005


def nothing_works(row):
    raise PeerLostError("lost")


def test_the_command():
    """A backend that works, and one that does not exist here, by real processes."""
    done = subprocess.run(
        [sys.executable, "-m", "hvd_cluster.diagnose", "--json"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    backends = {each["name"]: each for each in found["backends"]}
    assert list(backends) == NAMES
    assert backends["auto"]["works"]
    assert backends["shm"]["works"]
    assert all(0 < each["seconds"] < 60 for each in backends.values() if each["works"])
    assert all(each["reason"] for each in backends.values() if not each["works"])
    assert found["versions"]["hvd-cluster"] == __version__
    assert found["machine"]["cores"] >= 1


def test_a_launch_that_is_refused_says_why():
    trial = try_row(Row("cpu", "nothing", "HOROVOD_CPU_OPERATIONS"), launch)
    assert not trial.works
    assert trial.reason.startswith("HOROVOD_CPU_OPERATIONS is 'nothing', but must be one of")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("not here\n  liba.so: no\n"), "not here liba.so: no"),
        (ExecutorError("there is no mpirun"), "there is no mpirun"),
        (OSError("a\nb"), "OSError: a b"),
    ],
)
def test_a_reason_is_one_line_for_the_reader(error, reason):
    def refuse(row):
        raise error

    assert try_row(DEFAULT, refuse).reason == reason


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_the_variable_of_a_row_asks_for_its_backend(row):
    settings = Settings.from_environment({row.variable: row.name}, Topology(0, 1))
    assert {"cpu": settings.cpu_operations, "cuda": settings.gpu_operations}[row.device] == row.name
    with pytest.raises(SettingsError, match="is 'nothing', but must be one of"):
        Settings.from_environment({row.variable: "nothing"}, Topology(0, 1))


@pytest.mark.parametrize(("local_rank", "index"), [(0, 0), (1, 1), (2, 0)])
def test_each_rank_tries_a_gpu_of_its_own(monkeypatch, local_rank, index):
    """In a cupy whose arrays are those of NumPy, on a host with two GPUs."""
    used = []
    cuda = types.SimpleNamespace(
        Device=lambda index: types.SimpleNamespace(use=lambda: used.append(index)),
        runtime=types.SimpleNamespace(getDeviceCount=lambda: 2),
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda, full=np.full))
    assert (_filled("cuda", 3.0, local_rank) == 3.0).all()
    assert used == [index]


def test_as_text(capsys):
    assert main([], launched) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Versions"
    assert "  hvd-cluster    " + __version__ in lines
    assert "  cpu: auto      0.50 ms" in lines
    assert "  cpu: gloo      no: it is not there; install it" in lines
    assert any(line.startswith("  interface lo   127.0.0.1") for line in lines)


def test_as_json(capsys):
    assert main(["--json"], launched) == 0
    backends = json.loads(capsys.readouterr().out)["backends"]
    assert [each["name"] for each in backends] == NAMES
    assert backends[NAMES.index("gloo")] == {
        "device": "cpu",
        "name": "gloo",
        "variable": "HOROVOD_CPU_OPERATIONS",
        "seconds": None,
        "reason": "it is not there; install it",
        "works": False,
    }


def test_the_status_says_whether_the_default_works(capsys):
    assert main([], nothing_works) == 1
    assert f"  {DEFAULT.device}: auto      no: lost" in capsys.readouterr().out


def test_an_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--yaml"], launched)
    assert caught.value.code == 2
    assert "--yaml" in capsys.readouterr().err


def test_versions_and_machine_are_those_of_here():
    versions, machine = installed_versions(), Machine.here()
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["numpy"] is not None
    for name in ("cryptography", "keras", "tensorflow", "torch"):
        assert (versions[name] is None) == (importlib.util.find_spec(name) is None), name
    assert machine.interfaces["lo"] == "127.0.0.1"
    assert 0 < machine.cores <= machine.all_cores
    assert 0 <= machine.shared_memory_free <= machine.shared_memory
