"""The works of one rank in flight."""

from collectives.api import Operation, Request
from collectives.engine.threads import CommandKind, CommandQueue
from collectives.engine.work import Work
from collectives.engine.work_table import WorkTable
from collectives.net.channel import InprocHub


class Compared(str):
    """A name that counts how often names are compared."""

    __slots__ = ()
    times = 0

    def __eq__(self, other):
        Compared.times += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_large_group_is_entered_without_comparing_each_name_to_each():
    names = [Compared(f"tensor.{place}") for place in range(1000)]
    works = [Work(Request(name, Operation.ALLREDUCE, group="g", group_size=1000), None, None) for name in names]
    queue = CommandQueue(InprocHub(1).channel(0))
    WorkTable(0, queue).enter(works, unnamed=False)
    assert [*queue.commands] == [(CommandKind.SUBMIT, works)]
    assert Compared.times < 10 * len(names)


def test_a_call_behind_one_that_failed_here_is_awaited():
    table = WorkTable(0, CommandQueue(InprocHub(1).channel(0)))
    failed, retry = (Work(Request("x", Operation.ALLREDUCE), None, None) for _ in range(2))
    failed.fail(ValueError("wrong"))
    table.reject([failed], unnamed=False)
    assert table.oldest() is None
    table.enter([retry], unnamed=False)
    assert table.oldest() == retry.since
    assert table.describe() == "'x'"
