"""A timeline of two processes in Perfetto's own UI."""

from collections import Counter

import pytest

from benchmarks.perfetto import missing, opened
from benchmarks.pictures import spans_of
from hvd_cluster import run
from tests.collectives.observe.timeline import trace

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.leaves("processes"),
    pytest.mark.timeout(300),
]
ERRORS = "select name, value from stats where severity != 'info' and value > 0"
SLICES = """
    create perfetto view placed as
    select slice.id, process.name as row, thread.name as lane, slice.name, slice.ts, slice.dur
    from slice join thread_track on thread_track.id = track_id join thread using (utid) join process using (upid)
"""
ARROWS = """
    select begin.row, begin.lane, begin.name, target.row, target.name
    from flow join placed begin on begin.id = slice_out join placed target on target.id = slice_in
"""
BYTES = """
    select process.name, counter_track.name, max(value) from counter
    join counter_track on counter_track.id = track_id
    join process on upid = extract_arg(dimension_arg_set_id, 'upid')
    group by 1, 2 order by 1
"""
STEPS = 3


def body():
    import numpy as np

    from hvd_cluster.core import basics
    from tests.collectives.engine.job import submit, wait

    basics.init()
    engine = basics.engine()
    for _ in range(STEPS):
        for work in [submit(engine, np.ones(1 << 18), name) for name in ("first", "second")]:
            wait(engine, work)
    engine.barrier()
    basics.shutdown()


def of_file(records):
    """Row, lane, name, begin and duration of each span, in nanoseconds."""
    spans = [(*place, *span) for place, some in spans_of(records).items() for span in some]
    times = [(round(begin * 1e9), round(end * 1e9)) for *_, begin, end in spans]
    return sorted((*span[:3], begin, end - begin) for span, (begin, end) in zip(spans, times, strict=True))


def test_perfetto_has_all_rows_spans_arrows_and_counters_of_the_file(tmp_path):
    path = tmp_path / "trace.json"
    run(body, num_proc=2, env={"HOROVOD_TIMELINE": str(path)})
    records = trace.load(path)
    trace.check(records)
    with opened(path) as perfetto:
        assert perfetto.query(ERRORS) == []
        perfetto.query(SLICES)
        shown = perfetto.query("select row, lane, name, ts, dur from placed")
        arrows, counted, text = perfetto.query(ARROWS), perfetto.query(BYTES), perfetto.text()
    instants = {record["name"] for record in records if record["ph"] == "i"}
    assert sorted(tuple(span) for span in shown if span[2] not in instants) == of_file(records)
    operation = {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE", "SHM_ALLREDUCE"}
    for rank in ("rank 0", "rank 1"):
        assert {name for row, lane, name, *_ in shown if (row, lane) == ("first", rank)} >= operation
        assert {lane for row, lane, *_ in shown if row == rank} >= {"batches", "WAIT_FOR_RANKS", "COMBINE"}
        assert [name for row, lane, name, *_ in shown if (row, lane) == ("job", rank)][-1] == "RENDEZVOUS"
        assert f"{rank} {trace.rows(records)[rank]}" in text
        assert Counter((row, what) for row, lane, _, to, what in arrows if lane == to == rank) == {
            ("first", "SHM_ALLREDUCE"): STEPS,
            ("second", "SHM_ALLREDUCE"): STEPS,
            ("barrier.noname.0", "SHM_BARRIER"): 1,
        }
    assert len(arrows) == sum(record["ph"] == "s" for record in records)
    assert {begin for *_, begin, _, _ in arrows} <= {"NEGOTIATE_ALLREDUCE", "NEGOTIATE_BARRIER", "SUBMITTED"}
    assert [(row, name) for row, name, _ in counted] == [(rank, "in flight bytes") for rank in ("rank 0", "rank 1")]
    assert all(most >= 1 << 21 for *_, most in counted)
    assert "error" not in text
