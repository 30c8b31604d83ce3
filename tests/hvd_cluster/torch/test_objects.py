"""broadcast_object and allgather_object: large objects, odd ones, and those that cannot travel."""

import enum
import threading
import tracemalloc

import numpy as np
import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError

MEBIBYTE = 2**20


def works():
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


class Node:
    """An object that may refer to itself."""

    def __init__(self, value):
        self.value, self.next = value, self


class Color(enum.Enum):
    RED = 1


class TwoArguments(Exception):
    """An exception of the usual kind that pickle cannot make again."""

    def __init__(self, first, second):
        super().__init__(first)


class FailsOn:
    """Something that one rank cannot unpickle: a module or a file is not there."""

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        return _found_everywhere_but_on, (self.rank,)


def _found_everywhere_but_on(rank):
    if hvd.rank() == rank:
        raise ModuleNotFoundError("No module named 'elsewhere'")
    return "found"


class Unprintable(Exception):
    def __str__(self):
        raise TypeError("no text")


class FailsWith:
    """Something whose pickling raises ``error``."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def everywhere(obj, **options):
    """``obj`` of the last rank as every rank gets it, and all of them."""
    root = hvd.size() - 1
    given = obj if hvd.rank() == root else None
    return [hvd.broadcast_object(given, root, **options), *hvd.allgather_object(obj, **options)]


def check_odd_objects():
    for value in (None, b"", "", 0, (), [], {"a": {1, 2}}, float("inf"), 2**100, Color.RED, torch.float32, slice(1, 2)):
        assert everywhere(value) == [value] * (hvd.size() + 1)
    for same in everywhere(torch.nn.Linear(3, 2)):
        assert same(torch.ones(3)).shape == (2,)
    for tensor in everywhere(torch.eye(2).requires_grad_()):
        assert torch.equal(tensor, torch.eye(2))
        assert tensor.requires_grad


def check_code():
    offset = hvd.size()
    for function in everywhere(lambda x: x + offset):
        assert function(1) == 1 + hvd.size()
    script = {"__name__": "__main__"}
    exec("class Local:\n    def __init__(self): self.x = 1\n    def f(self): return self.x", script)
    for made in everywhere(script["Local"]()):
        assert (made.f(), type(made).__name__, type(made).__module__) == (1, "Local", "__main__")
    for kind in everywhere(script["Local"]):
        assert kind().f() == 1


def check_exceptions():
    for error in everywhere(ValueError("text", 3)):
        assert (type(error), error.args) == (ValueError, ("text", 3))
    for error in everywhere(InvalidRequestError("text")):
        assert (type(error), error.args) == (InvalidRequestError, ("text",))


def check_recursive_structures():
    for node in everywhere(Node(3)):
        assert node.next is node
    ring = []
    ring.append(ring)
    for same in everywhere(ring):
        assert same[0] is same


def check_the_root_keeps_its_object():
    value = [1, 2]
    assert (hvd.broadcast_object(value, 0) is value) == (hvd.rank() == 0)
    assert not any(each is value for each in hvd.allgather_object(value))


UNPICKLABLE = {
    "TypeError: cannot pickle": threading.Lock,
    r"RuntimeError: text with \? in it": lambda: FailsWith(RuntimeError("text with \ud800 in it")),
    "Unprintable: ": lambda: FailsWith(Unprintable()),
    "RecursionError|PicklingError": lambda: nested(100_000),
}


def check_objects_that_cannot_be_pickled():
    """All ranks hear of it, and of nothing else."""
    for reason, make in UNPICKLABLE.items():
        value = make() if hvd.rank() == 0 else b"x" * MEBIBYTE
        for call in (hvd.broadcast_object, hvd.allgather_object):
            for options in ({}, {"name": "odd"}):
                with pytest.raises(InvalidRequestError, match=rf"^rank 0: an object of type \w+ .*({reason})"):
                    call(value, **options)
                works()


def check_an_object_that_one_rank_cannot_unpickle():
    unlucky = hvd.size() - 1
    text = rf"rank 0 cannot be unpickled on rank {unlucky} \(ModuleNotFoundError: No module named 'elsewhere'\)"
    for call, found in (
        (lambda: hvd.broadcast_object(FailsOn(unlucky), 0), "found"),
        (lambda: hvd.allgather_object(FailsOn(unlucky)), ["found"] * hvd.size()),
    ):
        if hvd.rank() == 0 and hvd.size() > 1 and found == "found":
            assert isinstance(call(), FailsOn)
        elif hvd.rank() == unlucky and (hvd.size() > 1 or found != "found"):
            with pytest.raises(InvalidRequestError, match=text) as caught:
                call()
            assert isinstance(caught.value.__cause__, ModuleNotFoundError)
        elif hvd.size() > 1:
            assert call() == found
        works()


def check_an_object_that_no_rank_can_unpickle():
    with pytest.raises(InvalidRequestError, match=r"rank 0 cannot be unpickled on rank \d \(TypeError.*'second'"):
        hvd.allgather_object(TwoArguments(1, 2))
    works()


def check_names_and_process_sets():
    first = hvd.broadcast_object({"from": hvd.rank()}, root_rank=0, name="same")
    assert first == hvd.broadcast_object({"from": hvd.rank()}, 0, "same") == {"from": 0}
    assert hvd.allgather_object(hvd.rank(), name="same") == list(range(hvd.size()))
    if hvd.size() < 3:
        return
    some = hvd.add_process_set([0, 2])
    if some.included():
        assert hvd.broadcast_object(hvd.rank(), 2, process_set=some) == 2
        assert hvd.allgather_object(hvd.rank(), process_set=some) == [0, 2]
        with pytest.raises(ValueError, match="root"):
            hvd.broadcast_object(hvd.rank(), 1, process_set=some)
    else:
        for call in (hvd.broadcast_object, hvd.allgather_object):
            with pytest.raises(ValueError, match="not a member"):
                call(hvd.rank(), process_set=some)
    hvd.barrier()
    assert hvd.remove_process_set(some)


def check_bad_roots():
    for root in (hvd.size(), -1, None, "0", 0.5):
        with pytest.raises(InvalidRequestError, match="root"):
            hvd.broadcast_object(1, root)
    works()


def check_sizes_that_differ():
    values = hvd.allgather_object("x" * (hvd.rank() * 100_000))
    assert [len(value) for value in values] == [rank * 100_000 for rank in range(hvd.size())]
    for count in (0, 1, 63, 64, 65, 4095, 4097, 70_000):
        assert everywhere(b"y" * count) == [b"y" * count] * (hvd.size() + 1)


def check_memory():
    """No more than the pickle besides the objects, of which an array is read straight from it."""
    size, count = 8 * MEBIBYTE, hvd.size()
    array = np.ones(size, np.uint8)
    received = 0 if hvd.rank() == 0 else size
    for call, allowed in (
        (lambda: hvd.broadcast_object(array if hvd.rank() == 0 else None, 0), size + received),
        (lambda: hvd.allgather_object(array), size * max(1 + count, 2 * count)),
    ):
        hvd.barrier()
        tracemalloc.start()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < allowed + 2.5 * MEBIBYTE  # the file to pickle to grows by eighths


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)


def send_large():
    rows = np.arange(100 * MEBIBYTE // 8) + hvd.rank()
    received = hvd.broadcast_object({"rows": rows, "rank": hvd.rank()}, 1)
    assert received["rank"] == 1
    assert np.array_equal(received["rows"], np.arange(rows.size) + 1)
    del received
    for rank, each in enumerate(hvd.allgather_object(rows)):
        assert each[0] == rank
        assert each[-1] == rank + rows.size - 1


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_large_objects(ranks):
    ranks.run(send_large)


def test_large_objects_between_hosts(two_hosts):
    two_hosts.run(send_large)
