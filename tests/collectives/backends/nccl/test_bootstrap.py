"""Whether the members of a group can use NCCL, and what a user hears if not."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import msgpack
import pytest

from collectives.api import HorovodInternalError, ShutDownError, Topology, UnsupportedRequestError
from collectives.backends import registry
from collectives.backends.nccl import bootstrap, presence
from collectives.backends.nccl import through_host as through_host_module
from collectives.backends.nccl.bootstrap import NcclBootstrap, NcclOffer, absence, unavailable
from collectives.backends.nccl.interface import failure, require_version, version_text
from collectives.backends.nccl.presence import GpuPlace
from collectives.net.attempts import ConnectAttempt
from collectives.settings import Settings
from tests.collectives.backends.members import group_of, in_threads


@pytest.fixture(autouse=True)
def asked_anew():
    cached = (unavailable, presence.without_gpu, bootstrap.load)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_a_host_without_a_driver(monkeypatch):
    monkeypatch.setattr(presence, "DRIVERS", ("/nowhere/nvidiactl",))
    reason = unavailable()
    assert reason.startswith("this host has no NVIDIA GPU, or its driver is not visible here (no /nowhere/nvidiactl); ")
    assert reason.endswith("or move the tensors to the CPU on all ranks: each HOROVOD_GPU_OPERATIONS needs a GPU")
    assert "cupy" not in sys.modules


def test_a_host_with_a_driver_and_without_cupy(monkeypatch, tmp_path):
    monkeypatch.setattr(presence, "DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(presence, "find_spec", lambda name: None)
    assert unavailable().startswith("cupy is missing; install it with: pip install 'hvd-cluster[nccl]', or ")


def test_a_cupy_that_is_broken_is_a_reason(monkeypatch, tmp_path):
    """A job on CPUs starts all the same."""

    def count():
        raise ImportError("the nccl backend needs cupy") from OSError("libcudart.so.12: cannot open")

    monkeypatch.setattr(presence, "DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(presence, "find_spec", lambda name: True)
    monkeypatch.setattr(presence, "_count_gpus", count)
    assert unavailable().startswith("cupy does not work here (libcudart.so.12: cannot open); install it again")


def test_a_host_without_the_compiler_of_kernels(monkeypatch, tmp_path):
    """It is no part of cupy."""

    def version():
        raise RuntimeError("No such file: libnvrtc.so.12\n")

    cuda = SimpleNamespace(nvrtc=SimpleNamespace(getVersion=version))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(presence, "DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(presence, "find_spec", lambda name: True)
    monkeypatch.setattr(presence, "_count_gpus", lambda: 1)
    assert unavailable() == (
        "cupy does not find NVRTC (No such file: libnvrtc.so.12); install it with: "
        "pip install --upgrade nvidia-cuda-nvrtc-cu12, or nvidia-cuda-nvrtc for CUDA 13"
    )


@pytest.mark.parametrize(
    "error",
    [
        ImportError("cupy finds no libnccl, or one that is too old for it; install it with: pip"),
        UnsupportedRequestError("NCCL 2.4.8 is too old"),
    ],
)
def test_a_library_that_cannot_be_used(error, monkeypatch, tmp_path):
    def load():
        raise error

    monkeypatch.setattr(presence, "DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(presence, "find_spec", lambda name: True)
    monkeypatch.setattr(presence, "_count_gpus", lambda: 1)
    monkeypatch.setattr(presence, "_require_compiler", lambda: None)
    monkeypatch.setattr(bootstrap, "load", load)
    assert unavailable() == str(error)


@pytest.fixture
def usable(monkeypatch, tmp_path):
    """A host where NCCL works, as far as it is asked before the first operation."""

    class Library:
        version = 22203

        def unique_id(self):
            return b"the id"

    monkeypatch.setattr(presence, "DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(presence, "find_spec", lambda name: True)
    monkeypatch.setattr(bootstrap, "load", Library)
    monkeypatch.setattr(presence, "_count_gpus", lambda: 2)
    monkeypatch.setattr(presence, "_require_compiler", lambda: None)
    return Library


def test_the_first_member_offers_the_id(usable):
    offers = [NcclBootstrap(group_of(2, position), 30.0, position).offer for position in range(2)]
    assert [NcclOffer(*msgpack.unpackb(offer)).id for offer in offers] == [b"the id", b""]
    assert not NcclBootstrap(group_of(2), 30.0, 0).connect(offers, None).absence


def test_no_gpu_is_visible(usable, monkeypatch):
    monkeypatch.setattr(presence, "_count_gpus", lambda: 0)
    assert "no GPU is visible; look at CUDA_VISIBLE_DEVICES" in unavailable()


def test_a_driver_that_is_too_old(usable, monkeypatch):
    def count():
        raise HorovodInternalError("the driver is insufficient")

    monkeypatch.setattr(presence, "_count_gpus", count)
    assert unavailable() == "the driver is insufficient"


def test_an_id_that_cannot_be_made(usable):
    def fail(library):
        raise failure("unique id", 2, "unhandled system error")

    usable.unique_id = fail
    offer = NcclOffer(*msgpack.unpackb(NcclBootstrap(group_of(2), 30.0, 0).offer))
    assert "NCCL's unique id failed with unhandled system error" in offer.reason


def test_one_member_cannot():
    offers = [NcclOffer("", 22203, b"id"), NcclOffer("cupy is missing")]
    group = group_of(2, 0, "ab")
    assert absence(group, offers) == "NCCL cannot be used on rank 1 on host 'b': cupy is missing"
    assert absence(group, [NcclOffer("", 22203, b"id"), NcclOffer("", 22203)]) == ""


def test_different_versions():
    text = absence(group_of(2, 0, "ab"), [NcclOffer("", 22203, b"id"), NcclOffer("", 23007)])
    assert "2.22.3 on rank 0 on host 'a', 2.30.7 on rank 1 on host 'b'" in text


def test_versions():
    assert version_text(22105) == "2.21.5"
    require_version(22105)
    with pytest.raises(UnsupportedRequestError, match=r"NCCL 2\.17\.1 is too old: 2\.18\.0 or newer"):
        require_version(21701)


def test_the_error_for_two_ranks_on_one_gpu_names_the_remedy():
    text = str(failure("init", 5, "invalid usage"))
    assert "torch.cuda.set_device(hvd.local_rank())" in text
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in text
    assert "NCCL_DEBUG=WARN" in str(failure("init", 99, "something new"))


def test_the_gpu_of_a_rank_without_tensors():
    place = GpuPlace()
    assert place.default(5, 4) == 1
    place.index = 3
    assert place.default(5, 4) == 3


# Through the host.


@pytest.fixture
def through_host(monkeypatch):
    """The bootstraps of two ranks for tensors on GPUs, whose reasons are ``reasons``."""

    def prepared(*reasons):
        made = []
        for rank, reason in enumerate(reasons):
            monkeypatch.setattr(through_host_module, "without_gpu", lambda reason=reason: reason)
            topology = Topology(rank, 2, rank, 2, hosts=("a", "b"), cores=1)
            made.append(registry.prepare([0, 1], topology, Settings(gpu_operations="tcp"), "127.0.0.1"))
        return made

    return prepared


@pytest.mark.parametrize("reason", ["", "cupy is missing"])
def test_the_members_connect_through_the_host(reason, through_host):
    made = through_host("", reason)

    def member(rank):
        with ConnectAttempt(20.0) as attempt:
            backend = made[rank][1].connect([bootstraps[1].offer for bootstraps in made], attempt)
        is_connected = backend.name == "tcp"
        backend.close()
        return is_connected, backend.absence

    found = in_threads(2, member)
    for bootstraps in made:
        registry.discard(bootstraps, (), ShutDownError("done"))
    assert found == [(not reason, f"no GPU can be used on rank 1 on host 'b': {reason}" if reason else "")] * 2


@pytest.mark.parametrize("name", ["tcp", "gloo", "pygloo", "mpi"])
def test_a_variable_names_the_library_of_the_host_for_gpus(name, monkeypatch):
    """The library itself may be missing here; that of tensors on the CPU is another one."""
    monkeypatch.setattr(through_host_module, "without_gpu", lambda: "")
    for each in registry._PREPARE:
        monkeypatch.setitem(registry._PREPARE, each, lambda *_, each=each: SimpleNamespace(offer=each.encode()))
    topology = Topology(0, 2, 0, 2, hosts=("a", "b"), cores=1)
    settings = Settings.from_environment({"HOROVOD_GPU_OPERATIONS": name, "HOROVOD_CPU_OPERATIONS": "tcp"})
    on_cpu, on_gpu = registry.prepare([0, 1], topology, settings, "127.0.0.1")
    assert (on_cpu.offer, on_gpu._inner.offer) == (b"tcp", name.encode())


def test_a_job_on_cpus_prepares_no_connections_for_gpus(monkeypatch):
    """Also where the library that a variable names for GPUs is missing."""
    monkeypatch.setattr(through_host_module, "without_gpu", lambda: "this host has no NVIDIA GPU")
    monkeypatch.setitem(registry._PREPARE, "mpi", lambda *_: pytest.fail("the library of the host is not needed"))
    topology = Topology(0, 2, 0, 2, hosts=("a", "b"), cores=1)
    bootstraps = registry.prepare([0, 1], topology, Settings(gpu_operations="mpi"), "127.0.0.1")
    backend = bootstraps[1].connect([bootstraps[1].offer] * 2, None)
    assert backend.absence == "no GPU can be used on rank 0 on host 'a': this host has no NVIDIA GPU"
    backend.abort(ShutDownError("done"))
    backend.close()
    registry.discard(bootstraps, (), ShutDownError("done"))


def test_nccl_is_the_default():
    topology = Topology(0, 2, 0, 2, hosts=("a", "b"), cores=1)
    bootstraps = registry.prepare([0, 1], topology, Settings(), "127.0.0.1")
    assert isinstance(bootstraps[1], NcclBootstrap)
    registry.discard(bootstraps, (), ShutDownError("done"))
