"""A checker of the trace-event format, and questions about a trace."""

import json
from collections import defaultdict

KEYS = {
    "B": {"name", "ts", "pid", "tid"},
    "E": {"ts", "pid", "tid"},
    "X": {"name", "ts", "dur", "pid", "tid"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}
ALL_PHASES = set(KEYS)


def load(path):
    """The records of the file, which is a JSON array; checked unless it is still written."""
    return json.loads(path.read_text())


def check(records, complete=True):
    """Fail unless ``records`` are valid; ``complete``: nothing is open at the end."""
    for record in records:
        missing = KEYS[record["ph"]] - set(record)
        assert not missing, (record, missing)
        assert record.get("ts", 0) >= 0, record
    check_spans(records, complete)
    check_lanes(records)
    check_flows(records)
    named = {record["pid"] for record in records if record.get("name") == "process_name"}
    assert {record["pid"] for record in records} <= named
    assert all(record["s"] in "tpg" for record in records if record["ph"] == "i")
    counters = [record["args"] for record in records if record["ph"] == "C"]
    assert all(isinstance(value, int) and value >= 0 for args in counters for value in args.values())


def check_spans(records, complete):
    """On each lane, spans are closed in the reverse order, and time does not go back."""
    lanes = defaultdict(list)
    for record in records:
        if record["ph"] in "BEX":
            lanes[record["pid"], record["tid"]].append(record)
    for lane in lanes.values():
        open_spans, latest = [], 0.0
        for record in lane:
            assert record["ts"] >= latest, record
            latest = record["ts"]
            if record["ph"] == "B":
                open_spans.append(record)
            elif record["ph"] == "E":
                begun = open_spans.pop()
                assert record["ts"] > begun["ts"], record  # Perfetto never ends it otherwise
                assert record.get("name", begun["name"]) == begun["name"]
            else:
                assert record["dur"] >= 0
                latest = round(record["ts"] + record["dur"], 1)
        assert not (complete and open_spans), open_spans


def check_lanes(records):
    """No two lanes of a row are one for Perfetto, which gives lane 0 the number of the row."""
    lanes = {(record["pid"], record["tid"]) for record in records if "tid" in record}
    shown = {(pid, lane or pid) for pid, lane in lanes}
    assert len(shown) == len(lanes), sorted(lanes - shown)


def check_flows(records):
    """Each arrow begins once, before it ends, and behind no tick of a rank, at which it would begin for Perfetto."""
    begun, last = {}, {}
    for record in records:
        lane = record["pid"], record.get("tid")
        if record["ph"] in "BEXi":
            last[lane] = record.get("name", "")
        if record["ph"] == "s":
            assert not last[lane].isdigit(), record
            assert record["id"] not in begun
            assert 0 <= int(record["id"], 16) < 1 << 64
            begun[record["id"]] = record["ts"]
    for record in records:
        if record["ph"] == "f":
            assert begun[record["id"]] <= record["ts"]


def rows(records):
    """The process ids of the rows, by name."""
    return {
        record["args"]["name"]: record["pid"]
        for record in records
        if record.get("name") == "process_name" and "name" in record["args"]
    }


def story(records, row, tid=0, phases="BEXi"):
    """What happens on a lane, as text: ``B name``, ``E name``..."""
    pid = rows(records)[row]
    return [
        f"{record['ph']} {record.get('name', '')}".strip()
        for record in records
        if record["pid"] == pid and record.get("tid") == tid and record["ph"] in phases
    ]
