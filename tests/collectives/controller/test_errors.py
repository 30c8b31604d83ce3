"""Errors of the engine as data: what they carry, and that it arrives on the other ranks."""

import pickle

import pytest

from collectives import api
from collectives.api import (
    CollectiveTimeoutError,
    EngineError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    NoDescriptorError,
    NotInitializedError,
    PeerLostError,
    RefusedCallError,
    SettingsError,
    ShutDownError,
)
from collectives.controller.errors import ErrorData, for_other_ranks, pack, unpack
from collectives.controller.messages import Abort, decode, encode
from collectives.engine.work import fresh

ERRORS = [
    HorovodInternalError("text"),
    MismatchError("text", "gradient", "shape", {0: "(2,)", 3: "(3,)"}),
    RefusedCallError("text", "gradient", "arguments", {1: "splits"}),
    PeerLostError("text", [2, 3], ["a", "b"]),
    CollectiveTimeoutError("text", [1]),
    NotInitializedError(),
]
ids = [type(error).__name__ for error in ERRORS]


def content(error):
    return type(error), error.args, error.__dict__


@pytest.mark.parametrize("error", ERRORS, ids=ids)
def test_an_error_arrives_with_its_class_and_its_data(error):
    assert content(unpack(decode(encode(Abort(pack(error)))).error)) == content(error)


@pytest.mark.parametrize("error", [*ERRORS, HostsUpdatedInterrupt(False), HostsUpdatedInterrupt(True)])
def test_a_copy_to_raise_has_the_data_and_the_cause(error):
    cause = OSError("why")
    error.__cause__ = cause
    for copy in (fresh(error), fresh(fresh(error))):
        assert copy is not error
        assert content(copy) == content(error)
        assert copy.__cause__ is cause
    assert content(pickle.loads(pickle.dumps(error))) == content(error)


def test_a_copy_needs_no_constructor():
    class Picky(Exception):
        def __init__(self, first, second):
            super().__init__(f"{first} and {second}")

    assert str(fresh(Picky(1, 2))) == "1 and 2"


def test_every_class_of_the_tree_has_a_codec():
    kinds = [each for each in vars(api).values() if isinstance(each, type) and issubclass(each, HorovodInternalError)]
    for kind in set(kinds) - {NoDescriptorError}:
        assert pack(kind("text")).kind == kind.__name__
    about_this_process = unpack(pack(NoDescriptorError("text")))  # the other ranks have descriptors
    assert content(about_this_process) == content(HorovodInternalError("text"))


def test_a_class_without_a_codec_travels_as_its_base_and_an_unknown_one_as_the_root():
    class Special(PeerLostError):
        pass

    assert content(unpack(pack(Special("text", [1], ["a"])))) == content(PeerLostError("text", [1], ["a"]))
    assert content(unpack(ErrorData("Store", "text", (1, 2)))) == content(HorovodInternalError("text"))


def test_what_ends_one_rank_is_an_error_of_the_engine_for_the_others():
    foreign, lost = OSError("no route"), PeerLostError("text", [2])
    assert for_other_ranks(lost) is lost
    assert content(for_other_ranks(foreign, "rank 1")) == content(EngineError("rank 1: unexpected OSError: no route"))
    assert for_other_ranks(foreign).__cause__ is foreign
    assert content(for_other_ranks(SettingsError("no MPI"), "rank 1")) == content(EngineError("rank 1: no MPI"))
    assert content(for_other_ranks(KeyboardInterrupt())) == content(
        ShutDownError("a rank was interrupted by KeyboardInterrupt")
    )
