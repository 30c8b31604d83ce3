"""The functions of kernels that TensorFlow calls, on runs that are not TensorFlow's."""

from types import SimpleNamespace

import pytest

from hvd_cluster.graphs.completer import completer
from hvd_cluster.graphs.lanes import Lane
from hvd_cluster.tensorflow.kernels import collective, entry


class FakeContext:
    """A run of a kernel; ``told`` has what TensorFlow hears of it."""

    step = iteration = 0

    def __init__(self):
        self.told = []

    def end(self):
        self.told.append("end")

    def report(self, error):
        self.told.append("fail")


@pytest.fixture
def context(monkeypatch):
    """The run that begins next."""
    context = FakeContext()
    monkeypatch.setattr(entry, "RunContext", lambda pointer: context)
    done = SimpleNamespace(TF_RunAsyncOpKernelDoneCallback=lambda callback: context.told.append("done"))
    monkeypatch.setattr(entry, "long_calls", done)
    return context


class Interrupted:
    """A kernel in which the user presses Ctrl-C."""

    def run(self, context):
        raise KeyboardInterrupt


def test_no_output_is_asked_of_a_run_that_an_interrupt_has_ended(context, monkeypatch):
    """Its operation may go on, and its memory is TensorFlow's no more."""
    monkeypatch.setitem(entry._kernels, 0, Interrupted())
    with entry.calling():
        entry._compute(0, 0, 0)
    assert context.told == ["end", "fail", "done"]
    assert not completer.has_failed(context.step)


@pytest.mark.parametrize(("name", "expected"), [("", [None] * 3), ("x", ["x", "x~2", "x~1f~2"])])
def test_an_operation_without_a_name_has_none_in_any_lane(context, monkeypatch, name, expected):
    monkeypatch.setattr(collective.submission, "submit", lambda operation, source, destination, name, *_, **__: name)
    context.same = lambda index: (None, None)
    texts = {"tensor_name": name, "node_name": name}
    construction = SimpleNamespace(
        name=name, text=lambda attribute: texts.get(attribute, "1.0"), integer=lambda attribute: 1
    )
    kernel = collective.Allreduce(construction, grouped=False)
    assert [kernel.start(context, None, lane)[0] for lane in (Lane(), Lane(0, 2), Lane(31, 2))] == expected
