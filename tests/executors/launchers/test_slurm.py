import pytest

from executors.launchers.slurm import expand


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        ("", []),
        ("a", ["a"]),
        ("n[1-2]", ["n1", "n2"]),
        ("n[1-2,07],m", ["n1", "n2", "n07", "m"]),
        ("n[098-101]-ib", ["n098-ib", "n099-ib", "n100-ib", "n101-ib"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("gpu-a,gpu-b[3]", ["gpu-a", "gpu-b3"]),
    ],
)
def test_a_node_list_names_its_hosts_in_order(names, hosts):
    assert expand(names) == hosts


@pytest.mark.parametrize(
    "names", ["n[0-4000000000]", "n[1-9][0-9999999999999999999]", "n[1-999999]", "[0-9]" * 50, "n[²]"]
)
def test_a_node_list_that_is_too_long_to_be_one_has_no_hosts(names):
    assert expand(names) == []


@pytest.mark.parametrize("names", ["n[", "n[a-b]", "n[1-]x]"])
def test_a_node_list_that_cannot_be_read_has_no_host_that_does_not_exist(names):
    assert all("[" not in name and "]" not in name for name in expand(names))
