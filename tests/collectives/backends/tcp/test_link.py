"""The connection to one other member: its scripts, and the sleep of a member."""

from __future__ import annotations

import select

import pytest

from collectives.backends.tcp.link import TcpLink
from collectives.backends.tcp.pump import SLICE_SECONDS, Poller, Pump
from tests.collectives.backends.members import group_of
from tests.collectives.backends.tcp.groups import connected_sockets


def test_the_end_of_a_link_does_not_end_the_sleep_of_a_member_that_has_no_memory_for_its_data():
    """As in a pipeline: another member is behind, and the one that has ended has sent all. It would be a busy loop."""
    near, far = (TcpLink(sock, position) for position, sock in enumerate(connected_sockets()))
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
    near, far = (TcpLink(sock, position) for position, sock in enumerate(connected_sockets()))
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
    near, far = (TcpLink(sock, position) for position, sock in enumerate(connected_sockets()))
    near.receive(iter([]))
    assert near.step()
    assert not near.is_receiving
    near.close()
    far.close()


def test_a_member_may_owe_any_number_of_scripts():
    """They run in their order; nested iterators of so many would exhaust the stack of the process."""
    near, far = (TcpLink(sock, position) for position, sock in enumerate(connected_sockets()))
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


def test_a_link_knows_whether_it_still_has_to_send():
    near, far = (TcpLink(sock, position) for position, sock in enumerate(connected_sockets()))
    near.send([])
    assert not near.is_sending
    near.send([memoryview(bytes(1 << 24))])
    assert near.is_sending
    assert near.step()
    assert near.is_sending, "the kernel does not keep as much"
    near.give_up(is_filling=False)
    assert near.is_sending
    far.receive(iter([memoryview(bytearray(1 << 24))]))
    while near.is_sending or far.is_receiving:
        near.step()
        far.step()
    near.send([memoryview(b"x")])
    near.forget()
    assert not near.is_sending
    near.close()
    far.close()


class Watched(TcpLink):
    """Counts the looks at its socket."""

    looks = 0

    def _receive_some(self, target):
        self.looks += 1
        return super()._receive_some(target)


@pytest.mark.parametrize(("crowded", "hides_data", "looks"), [(True, False, 2), (True, True, 3), (False, False, 4)])
def test_members_that_share_cores_sleep_after_what_they_have_sent(monkeypatch, crowded, hides_data, looks):
    """Nothing can have come since then; but a poll does not see what is decrypted already."""

    def sleep(poller, links, seconds):
        assert far.step()
        assert select.select([near.descriptor], [], [], 20)[0]
        return set()

    ours, theirs = connected_sockets()
    near, far = Watched(ours, 1), TcpLink(theirs, 0)
    monkeypatch.setattr(near, "hides_data", hides_data, raising=False)
    monkeypatch.setattr(Poller, "sleep", sleep)
    monkeypatch.setattr("collectives.backends.tcp.pump.SPINS", 1)
    pump = Pump(group_of(2, 0), [near], 20.0, crowded)
    near.send([memoryview(b"x")])
    near.receive(iter([memoryview(bytearray(1))]))
    far.send([memoryview(b"y")])
    pump.run_until(lambda: not near.is_receiving, lambda: None, lambda: None)
    assert near.looks == looks
    pump.close()
    far.close()
