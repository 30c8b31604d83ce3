"""The arguments for elastic jobs -> limits; what is wrong with them in one sentence."""

import re

import pytest

from executors.job.elastic_arguments import ElasticArguments, resolve_limits
from executors.membership import Cooldown, Limits


def resolve(size=None, **arguments):
    return resolve_limits(size, ElasticArguments(**arguments))


class TestStatic:
    def test_a_number_alone_is_a_static_job(self):
        assert resolve(3) == Limits.static(3)
        assert not resolve(3).is_elastic

    def test_no_number(self):
        with pytest.raises(ValueError, match="num_proc is None, but must be an integer of at least 1"):
            resolve()

    @pytest.mark.parametrize(
        ("arguments", "names"),
        [
            ({"reset_limit": 1}, "reset_limit"),
            ({"timeout": 5.0}, "elastic_timeout"),
            ({"cooldown": (1, 2), "reset_limit": 0}, "reset_limit, cooldown_range"),
        ],
    )
    def test_arguments_for_elastic_jobs_need_one(self, arguments, names):
        with pytest.raises(ValueError, match=f"^{names}: this is for elastic jobs; give min_num_proc, max_num_proc or"):
            resolve(2, **arguments)


class TestElastic:
    @pytest.mark.parametrize(
        ("size", "arguments", "numbers"),
        [
            (None, {"least": 2}, (2, 2, 2)),
            (3, {"least": 1}, (3, 1, 3)),
            (3, {"most": 5}, (3, 3, 5)),
            (3, {"least": 1, "most": 5}, (3, 1, 5)),
        ],
    )
    def test_numbers_that_are_not_given(self, size, arguments, numbers):
        limits = resolve(size, **arguments)
        assert (limits.size, limits.least, limits.most) == numbers
        assert not limits.may_find_hosts
        assert limits.is_elastic

    def test_a_discovery_may_find_any_number_of_slots(self):
        limits = resolve(2, has_discovery=True)
        assert (limits.size, limits.least) == (2, 2)
        assert limits.most > 100_000
        assert limits.may_find_hosts

    def test_a_limit_of_resets_and_limits_of_each_kind(self):
        together, each = resolve(2, least=1, reset_limit=4), resolve(2, least=1, reset_limit={"failures": 3})
        assert (together.resets, together.failures, together.resizes) == (4, None, None)
        assert (each.resets, each.failures, each.resizes) == (None, 3, None)

    @pytest.mark.parametrize(
        ("limit", "message"),
        [
            (
                {"losses": 1},
                "reset_limit is {'losses': 1}, but must be an integer of at least 0 for failures",
            ),
            ({}, "reset_limit is {}, but must be an integer of at least 0"),
            ({"resizes": -1}, 'reset_limit["resizes"] is -1, but must be an integer of at least 0'),
            (-1, "reset_limit is -1, but must be an integer of at least 0"),
        ],
    )
    def test_what_is_no_limit_of_resets(self, limit, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            resolve(2, least=1, reset_limit=limit)

    def test_defaults(self, monkeypatch):
        monkeypatch.delenv("HOROVOD_ELASTIC_TIMEOUT", raising=False)
        limits = resolve(2, least=1)
        assert (limits.timeout, limits.resets, limits.cooldown) == (600.0, None, None)

    def test_a_timeout_of_the_environment(self, monkeypatch):
        monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "7")
        assert resolve(2, least=1).timeout == 7.0
        assert resolve(2, least=1, timeout=9).timeout == 9.0

    def test_a_cooldown(self):
        assert resolve(2, least=1, cooldown=[1, 60]).cooldown == Cooldown(1.0, 60.0)


class TestBadArguments:
    @pytest.mark.parametrize(
        ("size", "least", "most"), [(2, 3, None), (2, None, 1), (2, 3, 4), (5, 1, 4), (None, 3, 2), (1, 2, 1)]
    )
    def test_numbers_that_descend(self, size, least, most):
        with pytest.raises(ValueError, match="but they must not descend: give min_num_proc <= num_proc <= max_num_pr"):
            resolve(size, least=least, most=most)

    def test_numbers_that_descend_are_shown(self):
        with pytest.raises(ValueError, match=r"^min_num_proc is 3, num_proc is 2 and max_num_proc is 4, but"):
            resolve(2, least=3, most=4)

    @pytest.mark.parametrize("has_discovery", [False, True])
    def test_a_number_that_was_not_given_is_not_shown(self, has_discovery):
        with pytest.raises(ValueError, match=r"^min_num_proc is 3 and num_proc is 2, but they must not descend"):
            resolve(2, least=3, has_discovery=has_discovery)
        with pytest.raises(ValueError, match=r"^min_num_proc is 3 and max_num_proc is 2, but they must not descend"):
            resolve(least=3, most=2, has_discovery=has_discovery)

    def test_a_bad_number_at_the_start_is_not_blamed_on_the_fewest(self):
        with pytest.raises(ValueError, match=r"^num_proc is 0, but must be an integer of at least 1"):
            resolve(0, most=2)

    def test_neither_the_fewest_nor_the_number_at_the_start(self):
        with pytest.raises(ValueError, match=r"^num_proc is missing; give it, or min_num_proc$"):
            resolve(most=2)

    @pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
    @pytest.mark.parametrize(("name", "argument"), [("least", "min_num_proc"), ("most", "max_num_proc")])
    def test_a_number_that_is_none(self, name, argument, value):
        with pytest.raises(ValueError, match=f"{argument} is {value!r}, but must be an integer of at least 1"):
            resolve(1, **{name: value})

    @pytest.mark.parametrize("value", [-1, 0.5, "1", True])
    def test_a_reset_limit(self, value):
        with pytest.raises(ValueError, match=f"reset_limit is {value!r}, but must be an integer of at least 0"):
            resolve(1, least=1, reset_limit=value)

    @pytest.mark.parametrize("value", [0, -1, "5", float("nan"), float("inf"), True])
    def test_a_timeout(self, value):
        with pytest.raises(ValueError, match=f"elastic_timeout is {value!r}, but must be a positive number of seconds"):
            resolve(1, least=1, timeout=value)

    @pytest.mark.parametrize("value", ["soon", "-1", "nan"])
    def test_a_timeout_of_the_environment(self, monkeypatch, value):
        monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", value)
        with pytest.raises(ValueError, match=f"HOROVOD_ELASTIC_TIMEOUT is {value!r}, but must be a positive number"):
            resolve(1, least=1)

    @pytest.mark.parametrize("value", [5, "12", "ab", (1,), (1, 2, 3), ("1", "2"), (1, None), {1, 2}, (True, 2)])
    def test_a_cooldown_of_another_form(self, value):
        text = re.escape(f"cooldown_range is {value!r}, but must be two numbers of seconds, such as (1, 60)")
        with pytest.raises(ValueError, match=text):
            resolve(1, least=1, cooldown=value)

    @pytest.mark.parametrize(
        ("value", "shown"),
        [((0, 5), "0 to 5"), ((5, 1), "5 to 1"), ((1, 4000), "1 to 4000"), ((1, float("nan")), "1 to nan")],
    )
    def test_a_cooldown_that_is_not_possible(self, value, shown):
        with pytest.raises(ValueError, match=f"a cool-down of {shown} s is not possible; give .* from 1 to 3600 s"):
            resolve(1, least=1, cooldown=value)
