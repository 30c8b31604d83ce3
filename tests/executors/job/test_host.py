"""The identity of this host, and its names."""

import socket

import pytest

from executors.job import host


@pytest.mark.parametrize("own", ["node1.cluster.org", "node1"])
def test_the_names_of_this_host(monkeypatch, own):
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    monkeypatch.setattr(socket, "getfqdn", lambda: own)
    names = ["localhost", "127.0.0.1", "::1", "node1", "node1.cluster.org"]
    assert all(map(host.is_this_host, names))
    others = ["node", "node2", "node10", "10.0.0.1", "cluster.org", ""]
    assert not any(map(host.is_this_host, others))
    assert host.is_this_host("node1.elsewhere.org") == (own == "node1")


def test_the_containers_of_a_machine_are_told_apart_but_have_one_machine(monkeypatch):
    identity, machine = host.identity(), host.machine()
    monkeypatch.setattr(host, "NAMESPACES", ("uts",))
    assert host.identity() != identity
    assert host.machine() == machine
    named = host.machine("n1")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert host.machine("n1") == named == f"n1-{machine.rpartition('-')[2]}"
    assert host.machine() != machine


@pytest.mark.parametrize(
    ("hosts", "peer"),
    [(["localhost", "b", "c"], "b"), (["localhost"], host.FOREIGN_ADDRESS), ([], host.FOREIGN_ADDRESS)],
)
def test_the_address_for_other_hosts_is_on_the_way_to_the_first(monkeypatch, hosts, peer):
    monkeypatch.setattr(host, "address_towards", lambda name: f"towards {name}")
    assert host.address_for(hosts, {}) == f"towards {peer}"
    assert host.address_for(hosts, {"HOROVOD_GLOO_IFACE": "lo"}) == "127.0.0.1"
