"""The rank file of jsrun, and its command."""

import pytest

from executors.agents.mpi.jsrun import command_of, evenly, rank_file
from executors.agents.mpi.mpirun import MpiJob

TRAIN = ["python", "train.py"]


def test_the_rank_file():
    """Two ranks of one host share its cores, with all hardware threads of each."""
    assert rank_file({"h1": 2, "h2": 1}, {"h1": 5, "h2": 4}, 4) == (
        "overlapping_rs: allow\n"
        "cpu_index_using: logical\n"
        "rank: 0: { hostname: h1; cpu: {0-7} ; gpu: * ; mem: * }\n"
        "rank: 1: { hostname: h1; cpu: {8-15} ; gpu: * ; mem: * }\n"
        "rank: 2: { hostname: h2; cpu: {0-15} ; gpu: * ; mem: * }\n"
    )


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ({"h3": 1}, "host 'h3' does not belong to this job of LSF, whose hosts are h1, h2"),
        ({"h1": 1, "h2": 5}, "host 'h2' has 4 cores for 5 ranks; give it at most 4 slots"),
    ],
)
def test_hosts_that_are_not_possible(hosts, problem):
    with pytest.raises(ValueError, match=problem):
        rank_file(hosts, {"h1": 4, "h2": 4}, 1)


@pytest.mark.parametrize(
    ("size", "hosts", "taken"),
    [
        (4, {"a": 42, "b": 42}, {"a": 2, "b": 2}),
        (3, {"a": 42, "b": 42}, {"a": 2, "b": 1}),
        (1, {"a": 42, "b": 42}, {"a": 1}),
        (5, {"a": 1, "b": 4}, {"a": 1, "b": 4}),
    ],
)
def test_ranks_are_spread(size, hosts, taken):
    assert list(evenly(size, hosts).items()) == list(taken.items())


def test_too_many_ranks():
    with pytest.raises(ValueError, match="9 processes need 9 slots, but the job of LSF has 8; ask bsub for more hosts"):
        evenly(9, {"a": 4, "b": 4})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["--erf_input", "file"]),
        ({"binding_args": ["-n", "2"]}, ["-n", "2"]),
        (
            {"output_directory": "/logs"},
            ["--erf_input", "file", "--stdio_stdout", "/logs/stdout", "--stdio_stderr", "/logs/stderr"],
        ),
        ({"mpi_args": ["-gpu", "-v"], "has_tcp_only": True}, ["--erf_input", "file", "--smpiargs", "-tcp -gpu -v"]),
    ],
)
def test_the_command(options, words):
    assert command_of(MpiJob(TRAIN, {"a": 2}, **options), "file") == ["jsrun", *words, *TRAIN]
