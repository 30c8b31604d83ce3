"""Requests as values."""

from __future__ import annotations

from dataclasses import fields, replace

from collectives.api import DType, Operation, ReduceOp, Request

UNUSUAL = Request(
    "tensor",
    Operation.ALLTOALL,
    DType.BFLOAT16,
    (3, 2),
    ReduceOp.MAX,
    root_rank=4,
    prescale_factor=0.5,
    postscale_factor=0.25,
    process_set=5,
    splits=(1, 2),
    device="cuda",
    group="group",
    group_size=6,
    tag=7,
    offer=b"addresses",
)


def test_a_changed_request_keeps_all_other_fields():
    plain = Request("", Operation.BARRIER)
    same = [each.name for each in fields(Request) if getattr(UNUSUAL, each.name) == getattr(plain, each.name)]
    assert not same, "give the example an unusual value for these"
    assert UNUSUAL.changed(name="other") == replace(UNUSUAL, name="other")
    assert UNUSUAL.changed(splits=(2, 1), group="all") == replace(UNUSUAL, splits=(2, 1), group="all")


def test_a_changed_request_has_the_key_of_its_name():
    assert UNUSUAL.changed(name="other").key == (5, "other")
