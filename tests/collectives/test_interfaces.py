"""Interfaces by name."""

import pytest

from collectives.api import SettingsError
from collectives.interfaces import address_of, names


def test_loopback():
    assert "lo" in names()
    assert address_of("lo") == "127.0.0.1"


@pytest.mark.parametrize("name", ["nowhere0", "a-name-that-is-longer-than-any-interface"])
def test_an_interface_that_is_not_here(name):
    with pytest.raises(SettingsError, match=rf"HOROVOD_GLOO_IFACE is '{name}'.*interfaces of this host are: .*lo"):
        address_of(name)
