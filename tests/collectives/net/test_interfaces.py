"""Interfaces by name."""

import pytest

from collectives.api import SettingsError
from collectives.net import interfaces
from collectives.net.interfaces import address_of, names


def test_loopback():
    assert "lo" in names()
    assert address_of("lo") == "127.0.0.1"


ADDRESSES = """\
fe80000000000000000000fffe000001 04 40 20 80       ib0
20010db8000000000000000000000009 04 40 00 48       ib0
20010db8000000000000000000000001 03 40 00 80      eth1
20010db8000000000000000000000002 04 40 00 80       ib0
fe800000000000000000000000000003 05 40 20 80       ib1
"""


def test_an_interface_with_ipv6_only(monkeypatch, tmp_path):
    file = tmp_path / "if_inet6"
    file.write_text(ADDRESSES)
    monkeypatch.setattr(interfaces, "IPV6", file)
    assert address_of("ib0") == "2001:db8::2"
    with pytest.raises(SettingsError, match="'ib1', which has no address here"):
        address_of("ib1")


def test_without_ipv6(monkeypatch, tmp_path):
    monkeypatch.setattr(interfaces, "IPV6", tmp_path / "missing")
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(SettingsError, match="'ib0', which has no address here"):
        address_of("ib0")


@pytest.mark.parametrize("name", ["nowhere0", "a-name-that-is-longer-than-any-interface"])
def test_an_interface_that_is_not_here(name):
    with pytest.raises(SettingsError, match=rf"HOROVOD_GLOO_IFACE is '{name}'.*interfaces of this host are: .*lo"):
        address_of(name)
