"""The functions that Horovod's bindings share, under Horovod's names."""

import importlib.util
import os
import pickle

import pytest

hvd = pytest.importorskip("hvd_cluster.torch")


@pytest.fixture
def util(horovod_alias):
    return importlib.import_module("horovod.common.util")


def test_which_bindings_there_are(util, monkeypatch):
    installed = [name for name in ("tensorflow", "torch") if importlib.util.find_spec(name)]
    assert [name for name in util.EXTENSIONS if util.extension_available(name)] == installed
    assert hvd.check_extension is util.check_extension
    assert util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", hvd.__file__, "mpi_lib_v2") is None
    with pytest.raises(ImportError, match=r"horovod\.mxnet needs a binding of hvd-cluster for mxnet"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", hvd.__file__, "mpi_lib")
    assert util.check_installed_version("torch", "0.1") is None


def test_whether_there_is_a_gpu(util, monkeypatch):
    for there in (True, False):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert hvd._check_has_gpu() is there
        assert util.gpu_available("torch") is there
    assert not util.gpu_available("mxnet", verbose=True)


@pytest.mark.parametrize("name", ["ccl_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built"])
def test_what_is_built(util, name, monkeypatch):
    assert getattr(util, name)(verbose=True) == getattr(hvd, name)()
    monkeypatch.setattr(f"hvd_cluster.core.features.{name}", lambda: 7)
    assert getattr(util, name)() == 7


def test_variables_for_a_while(util, monkeypatch):
    monkeypatch.setenv("HOROVOD_TEST_KEPT", "before")
    monkeypatch.delenv("HOROVOD_TEST_NEW", raising=False)
    path = os.environ["PATH"]
    given = {"HOROVOD_TEST_KEPT": "now", "HOROVOD_TEST_NEW": "new", "PATH": None}
    with pytest.raises(ZeroDivisionError), util.env(**given):
        raise ZeroDivisionError
    with util.env(**given):
        assert [os.environ[name] for name in given] == ["now", "new", path]
    assert os.environ["HOROVOD_TEST_KEPT"] == "before"
    assert "HOROVOD_TEST_NEW" not in os.environ


def test_average_or_op(util):
    choose = util.get_average_backwards_compatibility_fun(hvd)
    assert [choose(op, None) for op in (None, hvd.Sum, hvd.Adasum)] == [hvd.Average, hvd.Sum, hvd.Adasum]
    for average, op in ((True, hvd.Average), (False, hvd.Sum)):
        with pytest.warns(DeprecationWarning, match="average="):
            assert choose(None, average) is op
    with pytest.raises(ValueError, match="not both"):
        choose(hvd.Sum, True)


def test_powers_of_two(util):
    assert [number for number in range(-2, 17) if util.num_rank_is_power_2(number)] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("length", range(8))
@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
def test_lists_are_split(util, length, pieces):
    split = util.split_list(list(range(length)), pieces)
    assert [number for piece in split for number in piece] == list(range(length))
    assert [len(piece) for piece in split] == [(length + pieces - 1 - place) // pieces for place in range(pieces)]


def test_what_can_be_iterated(util):
    assert [util.is_iterable(value) for value in ([], "", {}, iter(()), 3, None)] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("version", "target", "is_enough"),
    [
        ("2.4.0", "2.4.0", True),
        ("2.13.0+cpu", "2.4.0", True),
        ("2.4", "2.4.0", True),
        ("2.3.9", "2.4.0", False),
        ("2.4.0rc1", "2.4.0", False),
        ("2.4.0.dev20240601", "2.4.0", False),
        ("2.4.1a0", "2.4.0", True),
        ("2.4.0.post1", "2.4.0", True),
    ],
)
def test_versions(util, version, target, is_enough):
    assert util.is_version_greater_equal_than(version, target) is is_enough


@pytest.mark.parametrize(
    ("version", "target", "said"),
    [
        ("2.4.0", "2.4", "form major.minor.patch"),
        ("2.4.0", 2.4, "form"),
        ("new", "2.4.0", "'new' is not"),
        (2, "1.0.0", "2 is"),
    ],
)
def test_what_is_no_version(util, version, target, said):
    with pytest.raises(ValueError, match=said):
        util.is_version_greater_equal_than(version, target)


def test_the_error_for_versions_that_differ(horovod_alias):
    exceptions = importlib.import_module("horovod.common.exceptions")
    error = exceptions.HorovodVersionMismatchError("torch", "2.5", "2.4")
    assert isinstance(error, ImportError)
    for same in (error, pickle.loads(pickle.dumps(error))):
        assert (same.name, same.version, same.installed_version) == ("torch", "2.5", "2.4")
        assert str(same) == exceptions.get_version_mismatch_message("torch", "2.5", "2.4")
        assert str(same) == "torch 2.5 was found where torch 2.4 is needed; install torch==2.4"
