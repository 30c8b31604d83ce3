"""Hosts as users name them."""

import pytest

from executors.agents.hosts.arguments import PlaceArguments, Places
from executors.job.discovery import DiscoveryError, parse_host_file, parse_host_list, parse_hosts, slots_for


def test_a_list():
    assert parse_host_list("a:2, node-1.example.org:16") == {"a": 2, "node-1.example.org": 16}
    assert list(parse_host_list("b:1,a:1")) == ["b", "a"]


@pytest.mark.parametrize("entry", ["", "a", "a:", "a:0", "a:-1", "a:x", ":2", "a b:2", "a:1:2", "-x:1:", "a:1000000"])
def test_a_list_with_a_mistake(entry):
    with pytest.raises(ValueError, match="is not host:slots"):
        parse_host_list(f"b:1,{entry}")


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "-x", "--", "user@-x", "-l@node"])
def test_a_name_that_ssh_would_take_for_an_option(name):
    problem = "a host name must not begin with '-': ssh would take it for an option"
    for parse in (
        lambda: parse_host_list(f"b:1,{name}:2"),
        lambda: parse_host_file(f"{name} slots=2"),
        lambda: parse_host_file(f"{name}:2"),
        lambda: parse_hosts(f"{name}:2", None, "the script"),
        lambda: Places.of(PlaceArguments(hosts={"b": 1, name: 2}), 1, False),
    ):
        with pytest.raises((ValueError, DiscoveryError), match=problem):
            parse()


def test_a_name_may_have_a_user():
    """As ssh reads it, and as a discovery script may print it."""
    assert parse_host_list("me@node-1:2") == parse_host_file("me@node-1 slots=2") == {"me@node-1": 2}
    assert parse_hosts("me@node-1:2", None, "the script") == {"me@node-1": 2}


def test_a_host_that_is_named_twice():
    with pytest.raises(ValueError, match="host 'a' is named twice; name each host once, with all of its slots"):
        parse_host_list("a:1,a:2")


FILE = """
# the first rack
a slots=2
b   slots = 4 max_slots=8   # new
c:3
"""


def test_a_file():
    assert parse_host_file(FILE) == {"a": 2, "b": 4, "c": 3}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a", "'a' is not a line such as node1 slots=4"),
        ("a slots=0", "'a slots=0' is not a line such as node1 slots=4"),
        ("a slots=1\na:2", "host 'a' is named twice"),
        ("# nothing", "it names no host; write a line such as node1 slots=4 for each"),
    ],
)
def test_a_file_with_a_mistake(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_host_file(text)


def test_ranks_fill_the_hosts_in_order():
    hosts = {"a": 2, "b": 4, "c": 1}
    assert slots_for(1, hosts) == {"a": 1}
    assert slots_for(3, hosts) == {"a": 2, "b": 1}
    assert slots_for(7, hosts) == hosts
    with pytest.raises(ValueError, match=r"8 processes need 8 slots, but the hosts have 7 \(a:2, b:4, c:1\)"):
        slots_for(8, hosts)
