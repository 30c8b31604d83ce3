"""Groups on the engines of several ranks."""

import pytest

from collectives.api import (
    DType,
    DuplicateNameError,
    InvalidRequestError,
    Operation,
    ReduceOp,
    Request,
)
from collectives.buffers import as_buffer, empty
from collectives.engine.work import Work
from tests.collectives.engine.job import (
    ones,
    outcome,
    run,
    running,
    submit,
    wait,
)

pytestmark = pytest.mark.usefixtures("transport")


# Groups.


def group(engine, names, label="g", **fields):
    """A group of allreduces, in flight; unnamed when ``names`` is a number."""
    unnamed = isinstance(names, int)
    works = []
    for place in range(names) if unnamed else names:
        values = as_buffer(ones(engine, 4) + (place if unnamed else 0))
        request = Request(
            "" if unnamed else place,
            Operation.ALLREDUCE,
            values.dtype,
            values.shape,
            group=label,
            group_size=names if unnamed else len(names),
            **fields,
        )
        works.append(Work(request, values, lambda shape: empty(DType.FLOAT64, shape)))
    engine.submit_group(works, unnamed=unnamed)
    return works


def test_a_group_comes_out_whole():
    def body(engine):
        order = ["a", "b"][:: 1 if engine.topology.rank else -1]
        works = group(engine, order)
        results = {work.request.name: wait(engine, work)[0] for work in works}
        unnamed = [[wait(engine, work)[0] for work in group(engine, 3)] for _ in range(3)]
        return results, unnamed

    with running(2) as job:
        assert job.run(body) == [({"a": 3.0, "b": 3.0}, [[3.0, 5.0, 7.0]] * 3)] * 2


def test_more_unnamed_groups_than_there_are_names():
    def body(engine):
        works = [group(engine, 2) for _ in range(300)]
        return {wait(engine, work)[0] for pair in reversed(works) for work in pair}

    with running(2) as job:
        assert job.run(body) == [{3.0, 5.0}] * 2


@pytest.mark.parametrize("names", [["x", "a"], ["a", "x"], ["a", "a"]])
def test_of_a_group_with_a_name_in_flight_nothing_is_submitted(names):
    with running(2) as job:
        engine, other = job.engines
        flying = submit(engine, ones(engine), "x")
        with pytest.raises(DuplicateNameError):
            group(engine, names)
        works = [group(each, ["a", "b"]) for each in job.engines]
        assert [wait(engine, work)[0] for work in works[0]] == [3.0, 3.0]
        run(other, ones(other), "x")
        wait(engine, flying)


def test_of_a_group_with_a_wrong_tensor_nothing_is_submitted():
    with running(2) as job:
        with pytest.raises(InvalidRequestError):
            group(job.engines[0], ["a", "b"], process_set=9)
        job.run(lambda engine: [wait(engine, work) for work in group(engine, ["a", "b"])])


def test_a_group_fails_on_all_ranks():
    def body(engine):
        works = group(engine, ["a", "b"], op=ReduceOp.MAX if engine.topology.rank else ReduceOp.SUM)
        return [str(outcome(lambda work=work: wait(engine, work))) for work in works]

    with running(2) as job:
        texts = {text for rank in job.run(body) for text in rank}
    assert len(texts) == 1
    assert "the ranks disagree about the op" in texts.pop()
