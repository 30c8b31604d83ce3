"""The pictures of a timeline."""

import pytest

from benchmarks.pictures import Span, draw, elastic_bars, spans_of, training_bars
from collectives.observe.timeline.document import Document
from collectives.observe.timeline.spans import Arrived, Spans, Step
from tests.collectives.observe.timeline import trace
from tests.collectives.observe.timeline.test_spans import whole

pytest.importorskip("matplotlib")


@pytest.fixture
def found(tmp_path):
    document = Document(str(tmp_path / "trace.json"))
    for rank in range(2):
        made = Spans(rank)
        made.add(Arrived((Step("START", 0.25, 0.5),), 0.25, 0.5))
        for event in whole("grad", 0, 1.0):
            made.add(event)
        document.write(made.take())
    document.close()
    return spans_of(trace.load(tmp_path / "trace.json"))


def test_the_spans_of_a_file(found):
    assert found["job", "rank 1"] == [Span("START", 0.25, 0.5)]
    assert found["grad", "rank 0"][-1] == Span("ALLREDUCE", 4.0, 6.0)
    assert found["rank 0", "batches"] == [Span("GLOO_ALLREDUCE", 5.0, 6.0)]


@pytest.mark.leaves("descriptors")  # matplotlib keeps its fonts open
def test_the_rows_of_a_picture(found, tmp_path):
    labels = [label for label, _ in training_bars(found)]
    assert labels[:2] == ["rank 0: grad", "rank 0: batches"]
    assert "rank 1: memcpy in fusion buffer" in labels
    assert [[span.name for span in some] for _, some in elastic_bars(found)] == [["START", "GLOO_ALLREDUCE"]] * 2
    path = tmp_path / "picture.svg"
    draw(training_bars(found), 0.0, 10.0, "title", path)
    assert "GLOO_ALLREDUCE" in path.read_text()
