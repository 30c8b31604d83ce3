"""The connection to one other member: its scripts, and the sleep of a member."""

from __future__ import annotations

import select

from collectives.backends.tcp.link import Link
from collectives.backends.tcp.poller import Poller
from collectives.backends.tcp.pump import SLICE_SECONDS
from tests.backends.tcp.groups import connected_sockets


def test_the_end_of_a_link_does_not_end_the_sleep_of_a_member_that_has_no_memory_for_its_data():
    """As in a pipeline: another member is behind, and the one that has ended has sent all. It would be a busy loop."""
    near, far = (Link(sock, position) for position, sock in enumerate(connected_sockets()))
    poller = Poller()
    near.receive(iter([None, memoryview(bytearray(1))]))
    far.send([memoryview(b"x")])
    assert far.step()
    assert not near.step()
    far.close()
    assert poller.sleep([near], SLICE_SECONDS) == set()
    assert near.step()
    assert not near.is_receiving
    assert poller.sleep([near], 20.0) == {near.descriptor}
    near.close()
    poller.close()


def test_a_member_with_much_data_does_not_keep_the_others_waiting(monkeypatch):
    monkeypatch.setattr("collectives.backends.tcp.link.MOST_RECEIVED", 4)
    near, far = (Link(sock, position) for position, sock in enumerate(connected_sockets()))
    data, found = bytearray(8), []
    far.send([memoryview(b"01234567")])
    assert far.step()
    assert select.select([near.descriptor], [], [], 20)[0]
    near.receive(iter([memoryview(data)[start : start + 2] for start in range(0, 8, 2)]))
    while near.is_receiving:  # no step without data: it would let the member sleep
        assert near.step()
        found.append(bytes(data).rstrip(b"\0"))
    assert found == [b"0123", b"01234567"]
    near.close()
    far.close()


def test_an_operation_without_data_is_over_at_once():
    """A step that moves nothing would let the member sleep, though it has nothing to wait for."""
    near, far = (Link(sock, position) for position, sock in enumerate(connected_sockets()))
    near.receive(iter([]))
    assert near.step()
    assert not near.is_receiving
    near.close()
    far.close()


def test_a_member_may_owe_any_number_of_scripts():
    """They run in their order; nested iterators of so many would exhaust the stack of the process."""
    near, far = (Link(sock, position) for position, sock in enumerate(connected_sockets()))
    data = bytearray(2)
    near.receive(iter([memoryview(data)[:1]]))
    for _ in range(1_000_000):
        near.receive(iter(()))
    near.receive(iter([memoryview(data)[1:]]))
    far.send([memoryview(b"xy")])
    assert far.step()
    assert select.select([near.descriptor], [], [], 20)[0]
    while near.is_receiving:
        near.step()
    assert data == b"xy"
    near.close()
    far.close()
