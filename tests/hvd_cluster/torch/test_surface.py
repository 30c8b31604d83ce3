"""Names, order and defaults of the arguments are Horovod's, and so are the answers about what is built."""

import importlib
import inspect
import pickle

import pytest

import hvd_cluster.torch as hvd
from collectives.backends.gloo import library
from collectives.backends.mpi import library as mpi
from hvd_cluster.torch import mpi_ops

REDUCTION = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=ALL"
COMPRESSED = REDUCTION.replace("name=None, ", "name=None, compression=NONE, ")
SCATTER = "name=None, op=Average, process_set=ALL, prescale_factor=1.0, postscale_factor=1.0"
COMPRESSED_SCATTER = SCATTER.replace("name=None, ", "name=None, compression=NONE, ")
MOVEMENT = "name=None, process_set=ALL"

SIGNATURES = {
    "allgather": f"tensor, {MOVEMENT}",
    "allgather_async": f"tensor, {MOVEMENT}",
    "allreduce": f"tensor, {COMPRESSED}",
    "allreduce_": f"tensor, {REDUCTION}",
    "allreduce_async": f"tensor, {REDUCTION}",
    "allreduce_async_": f"tensor, {REDUCTION}",
    "alltoall": f"tensor, splits=None, {MOVEMENT}",
    "alltoall_async": f"tensor, splits=None, {MOVEMENT}",
    "barrier": "process_set=ALL",
    "broadcast": f"tensor, root_rank, {MOVEMENT}",
    "broadcast_": f"tensor, root_rank, {MOVEMENT}",
    "broadcast_async": f"tensor, root_rank, {MOVEMENT}",
    "broadcast_async_": f"tensor, root_rank, {MOVEMENT}",
    "grouped_allgather": f"tensors, {MOVEMENT}",
    "grouped_allgather_async": f"tensors, {MOVEMENT}",
    "grouped_allreduce": f"tensors, {COMPRESSED}",
    "grouped_allreduce_": f"tensors, {REDUCTION}",
    "grouped_allreduce_async": f"tensors, {REDUCTION}",
    "grouped_allreduce_async_": f"tensors, {REDUCTION}",
    "grouped_reducescatter": f"tensors, {COMPRESSED_SCATTER}",
    "grouped_reducescatter_async": f"tensors, {SCATTER}",
    "reducescatter": f"tensor, {COMPRESSED_SCATTER}",
    "reducescatter_async": f"tensor, {SCATTER}",
    "sparse_allreduce_async": "tensor, name, op, process_set=ALL",
    "poll": "handle",
    "synchronize": "handle",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "init": "comm=None, process_sets=None",
    "start_timeline": "file_path, mark_cycles=False",
}
ANSWERS = {
    "ccl_built": False,
    "cuda_built": False,
    "ddl_built": False,
    "gloo_built": True,
    "gloo_enabled": True,
    "mpi_enabled": False,
    "nccl_built": 0,
    "rocm_built": False,
}
WITHOUT_ARGUMENTS = [
    *ANSWERS,
    "mpi_built",
    *("mpi_threads_supported", "is_homogeneous", "is_initialized", "shutdown", "stop_timeline", "metrics"),
    *("size", "local_size", "cross_size", "rank", "local_rank", "cross_rank"),
]


def written(parameter):
    values = {hvd.global_process_set: "ALL", hvd.Compression.none: "NONE"}
    value = parameter.default
    if value is parameter.empty:
        return parameter.name
    return f"{parameter.name}={'Average' if value is hvd.Average else values.get(value, repr(value))}"


def signature(name):
    return ", ".join(map(written, inspect.signature(getattr(hvd, name)).parameters.values()))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert signature(name) == SIGNATURES[name]


def test_functions_without_arguments():
    assert {name: signature(name) for name in WITHOUT_ARGUMENTS} == dict.fromkeys(WITHOUT_ARGUMENTS, "")


def test_join_takes_a_device_first():
    assert signature("join").split(", ")[0] == "device=-1"


def test_every_function_has_a_signature_here():
    functions = {name for name in hvd.__all__ if inspect.isfunction(getattr(hvd, name))}
    elsewhere = {
        "count_samples",
        "DistributedOptimizer",
        "allgather_object",
        "broadcast_object",
        "check_extension",
        "join",
    }
    elsewhere |= {"broadcast_optimizer_state", "broadcast_parameters"}
    elsewhere |= {"clip_grad_norm_", "full_state_dict", "print_once", "set_seed"}  # not Horovod's
    assert functions | {"metrics"} == {*SIGNATURES, *WITHOUT_ARGUMENTS, *elsewhere}


def test_ops_have_their_numbers():
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))


def test_mpi_ops_has_the_same_objects():
    module = importlib.import_module("hvd_cluster.torch.mpi_ops")
    assert all(hasattr(module, name) for name in module.__all__)
    for name in {*SIGNATURES, *WITHOUT_ARGUMENTS, "join", "Sum", "HorovodInternalError"} - {
        "add_process_set",
        "count_samples",
        "metrics",
        "remove_process_set",
    }:
        assert getattr(module, name) is getattr(hvd, name), name
    assert mpi_ops.HorovodAllreduce.__module__.startswith("hvd_cluster.torch.")


@pytest.mark.parametrize("name", ANSWERS)
def test_features_that_are_built_in(name):
    answer = getattr(hvd, name)()
    assert (answer, type(answer)) == (ANSWERS[name], type(ANSWERS[name]))


def test_gloo_needs_a_torch_that_has_it(monkeypatch):
    monkeypatch.setattr(library.import_torch().distributed, "is_gloo_available", lambda: False)
    assert not hvd.gloo_built()
    assert not hvd.gloo_enabled()


def test_mpi_needs_mpi4py(monkeypatch):
    monkeypatch.setattr(mpi, "PROBE", "raise SystemExit(1)")
    mpi.is_available.cache_clear()
    assert hvd.mpi_built() is False
    mpi.is_available.cache_clear()
    monkeypatch.setattr(mpi, "PROBE", "")
    assert hvd.mpi_built() is True
    mpi.is_available.cache_clear()


def test_the_threads_of_mpi_are_unknown_without_mpi():
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.mpi_threads_supported()


@pytest.mark.parametrize("name", sorted({*SIGNATURES, "join"}))
def test_functions_are_pickled_by_their_name(name):
    assert pickle.loads(pickle.dumps(getattr(hvd, name))) is getattr(hvd, name)
