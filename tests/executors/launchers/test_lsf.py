import pytest

from executors.launchers.lsf import hosts_of


@pytest.mark.parametrize(
    ("variables", "hosts"),
    [
        ({}, []),
        ({"LSB_MCPU_HOSTS": "batch5 1 h1 42 h2 42"}, ["h1", "h2"]),
        ({"LSB_MCPU_HOSTS": "h1 4 h2 4"}, ["h1", "h2"]),
        ({"LSB_MCPU_HOSTS": "h1 1 h2 1"}, ["h1", "h2"]),
        ({"LSB_MCPU_HOSTS": "h1 1"}, ["h1"]),
        ({"LSB_HOSTS": "batch5 h1 h1 h2 h2"}, ["h1", "h2"]),
    ],
)
def test_the_hosts_that_compute(variables, hosts):
    assert hosts_of(variables) == hosts
