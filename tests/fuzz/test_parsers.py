"""Each parser takes what it should, and refuses everything else with an error that it names."""

import random

import pytest

from tests.fuzz.mutations import MOST_BYTES, mutated
from tests.fuzz.parsers import PARSERS, Parser, UnreadableError, check, limits, search

INPUTS = 300


@pytest.mark.parametrize("name", PARSERS)
def test_bad_inputs(name):
    assert search(name, random.Random(name), INPUTS) < INPUTS


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("offer", b'{"addresses": [], "port": 1e999, "key": ""}'),
        ("offer", b"[" * 5000),
        ("configuration", b"[" * 5000),
        ("answer", b"\x91\xc0"),
        ("allocation", b"SLURM_JOB_NODELIST=n[0-4000000000]\nSLURM_JOB_CPUS_PER_NODE=1"),
        ("allocation", b"SLURM_JOB_NODELIST=n\nSLURM_JOB_CPUS_PER_NODE=1(x4000000000)"),
    ],
)
def test_inputs_that_were_faults(name, data):
    with limits():
        assert not check(name, data)


def test_a_fault_is_found_and_shown_in_a_short_form(monkeypatch):
    def fragile(data):
        if b"[" in data:
            raise KeyError("bracket")
        return data

    monkeypatch.setitem(PARSERS, "fragile", Parser(fragile, [b"a good value of some length"], (ValueError,)))
    with pytest.raises(UnreadableError, match=r"fragile: KeyError: 'bracket'; for b'\['$"):
        search("fragile", random.Random(1), 10_000)


def test_an_endless_parser_is_found(monkeypatch):
    def endless(data):
        while data != b"good":
            pass
        return data

    monkeypatch.setattr("tests.fuzz.parsers.MOST_SECONDS", 0.05)
    monkeypatch.setitem(PARSERS, "endless", Parser(endless, [b"good"], (ValueError,)))
    with pytest.raises(UnreadableError, match=r"endless: TimeoutError"):
        search("endless", random.Random(1), 1)


def test_mutations_differ_and_have_a_bound():
    rng = random.Random(1)
    found = {mutated(rng, [b"one value", b"another one" * 5000]) for _ in range(300)}
    assert len(found) > 290
    assert max(map(len, found)) <= MOST_BYTES
