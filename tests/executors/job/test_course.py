"""The course of a job, as its workers get it."""

import time

import pytest

from executors.job.environment import COURSE, Course


@pytest.mark.parametrize("course", [Course(1.5, 2.25), Course(None, 2.0)])
def test_a_worker_gets_it(course):
    assert Course.of(course.variable()) == course


def test_a_worker_that_has_its_place_now():
    before = time.time()
    found = Course.of(Course(7.0).variable())
    assert found.requested == 7.0
    assert before - 1.0 <= found.placed <= time.time() + 1.0


@pytest.mark.parametrize("text", [None, "", "soon", "1 2 3x"])
def test_other_processes_have_none(text):
    assert Course.of({} if text is None else {COURSE: text}) == Course()
