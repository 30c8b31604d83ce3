"""The file of a timeline."""

import errno
import json
import os
import resource
import threading
import time

import pytest

from collectives.observe.timeline import document
from collectives.observe.timeline.document import Document, DocumentError
from collectives.observe.timeline.records import JOB, Moment, Record, rank_row, tensor_row, text


def record(number, row=None):
    return Record(row or tensor_row("x", 0), text("B", 0, Moment.at(number), f',"name":"span {number}"'))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


@pytest.fixture
def opened(path):
    made = Document(str(path))
    yield made
    made.close()


def names(path):
    return [entry["name"] for entry in json.loads(path.read_text()) if entry["ph"] == "B"]


def test_the_file_is_an_array_after_every_write(path, opened):
    assert names(path) == []
    for number in range(5):
        opened.write([record(number)])
        assert names(path) == [f"span {each}" for each in range(number + 1)]
    opened.write([])
    assert len(names(path)) == 5


def test_each_row_has_one_number_and_its_name(path, opened):
    opened.write([record(0), record(1, rank_row(0)), record(2), record(3, tensor_row("x", 4))])
    entries = json.loads(path.read_text())
    pids = [entry["pid"] for entry in entries if entry["ph"] == "B"]
    assert pids[0] == pids[2]
    assert len(set(pids)) == 3
    titles = {entry["pid"]: entry["args"]["name"] for entry in entries[2:] if entry["name"] == "process_name"}
    assert [titles[pid] for pid in pids] == ["x", "rank 0", "x", "x (process set 4)"]


def test_large_writes_go_in_pieces(path, opened, monkeypatch):
    monkeypatch.setattr(document, "LARGEST_WRITE", 200)
    opened.write([record(number) for number in range(100)])
    assert len(names(path)) == 100


def test_an_earlier_file_is_replaced(path):
    path.write_text("x" * 9999)
    Document(str(path)).close()
    assert names(path) == []


def test_a_later_world_continues_the_file(path, opened):
    opened.write([record(0), record(1, rank_row(2)), record(0, JOB)])
    opened.close()
    again = Document(str(path), resumes=True)
    assert again.start == opened.start
    assert names(path) == ["span 0", "span 1", "span 0"]
    again.write([record(2, rank_row(2)), record(3), record(4, tensor_row("y", 0)), record(5, JOB)])
    again.close()
    assert names(path)[3:] == [f"span {number}" for number in range(2, 6)]
    pids = [entry["pid"] for entry in json.loads(path.read_text()) if entry["ph"] == "B"]
    assert (pids[0], pids[1], pids[2]) == (pids[4], pids[3], pids[6])
    assert len(set(pids)) == 4


def test_times_begin_in_the_past_but_never_in_the_future(path):
    now = time.time()
    for begun, start in ((now - 60.0, now - 60.0), (now + 60.0, now)):
        made = Document(str(path), begun=begun)
        made.close()
        assert made.start / 1e6 == pytest.approx(start, abs=20.0)
        assert time.monotonic() - made.origin == pytest.approx(now - start, abs=20.0)


@pytest.mark.parametrize("step", [-1200.0, 1200.0])
def test_a_file_goes_on_in_time_although_the_clock_was_set(path, monkeypatch, step):
    made = Document(str(path))
    made.close()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + step)
    again = Document(str(path), resumes=True)
    again.close()
    assert again.origin == made.origin


def test_a_file_that_another_host_began_goes_on_by_the_time_of_day(path, monkeypatch):
    begun = time.time() - 60.0
    Document(str(path), begun=begun).close()
    monkeypatch.setattr(document, "BOOT_ID", path.with_name("other"))
    again = Document(str(path), resumes=True)
    again.close()
    assert time.monotonic() - again.origin == pytest.approx(time.time() - begun, abs=20.0)


@pytest.mark.parametrize("size", [1, 7, 100, 1 << 20])
def test_a_file_is_read_in_pieces_of_any_size(path, opened, monkeypatch, size):
    opened.write([record(0), record(1, rank_row(2)), record(0, JOB), record(4, tensor_row("y", 0))])
    opened.close()
    monkeypatch.setattr(document, "READ_BYTES", size)
    again = Document(str(path), resumes=True)
    again.write([record(5, tensor_row("y", 0)), record(6, rank_row(2))])
    again.close()
    pids = [entry["pid"] for entry in json.loads(path.read_text()) if entry["ph"] == "B"]
    assert (pids[3], pids[1]) == (pids[4], pids[5])
    assert len(set(pids)) == 4


@pytest.mark.parametrize("part", [b'{"pid":1,"ph":"B","na', b'{"pid":3,"ph":"M","na', b""])
def test_a_file_whose_writer_was_killed_within_a_write_goes_on_behind_the_last_whole_record(path, opened, part):
    opened.write([record(0), record(1)])
    opened.close()
    whole = path.read_bytes()
    path.write_bytes(whole.removesuffix(b"\n]\n") + b",\n" + part)
    again = Document(str(path), resumes=True)
    again.write([record(2)])
    again.close()
    assert names(path) == ["span 0", "span 1", "span 2"]


@pytest.mark.parametrize("before", [None, b"", b"text", b"[\n", b"[\n]\n", b"[\nnonsense\n]\n"])
def test_a_file_that_is_no_timeline_is_replaced(path, before):
    if before is not None:
        path.write_bytes(before)
    again = Document(str(path), resumes=True)
    again.write([record(0)])
    again.close()
    assert names(path) == ["span 0"]


def test_a_reader_may_load_the_file_while_it_is_written(path, opened):
    """A reader that meets a write itself reads again, as a person does."""
    done = threading.Event()

    def write():
        for number in range(200):
            opened.write([record(number), record(number, rank_row(0))])
            time.sleep(0.002)  # the timeline rests for longer
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    lengths = []
    while not done.is_set():
        for attempt in range(5):
            try:
                lengths.append(len(names(path)))
                break
            except ValueError:
                assert attempt < 4
    writer.join()
    assert lengths == sorted(lengths)
    assert len(names(path)) == 400


@pytest.mark.parametrize("make", ["missing folder", "folder", "pipe", "full device", "no permission", "zero byte"])
def test_a_path_that_cannot_be_written(path, make):
    given = str(path)
    if make == "missing folder":
        given = str(path / "no" / "t.json")
    elif make == "folder":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path)
    elif make == "full device":
        given = "/dev/full"
    elif make == "no permission":
        given = "/proc/version"
    else:
        given += "\0"
    with pytest.raises(DocumentError, match=r"the timeline cannot be written to '.*': .*; give a file where this user"):
        Document(given)


def test_two_jobs_with_one_file(path, opened):
    opened.write([record(0)])
    with pytest.raises(DocumentError, match=r"another job writes a timeline to '.*'; give each job a file of its own"):
        Document(str(path))
    assert names(path) == ["span 0"]
    opened.close()
    Document(str(path)).close()


@pytest.mark.parametrize("part", [0, 1, 9])
def test_a_disk_that_is_full_leaves_the_records_before(path, opened, monkeypatch, part):
    opened.write([record(0)])
    write = os.pwrite
    calls = []

    def fail(file, data, place):
        calls.append(data)
        if len(calls) == 1 and part:
            return write(file, data[:part], place)
        if len(calls) <= 2 and not data.startswith(b"\n]"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data, place)

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(DocumentError, match="No space left on device"):
        opened.write([record(1)])
    assert names(path) == ["span 0"]


def test_another_program_takes_the_rest_of_a_full_disk(path, opened, monkeypatch):
    """Only the places that the file has already can be written."""
    opened.write([record(0)])
    write = os.pwrite

    def fail(file, data, place):
        room = os.fstat(file).st_size - place
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:room], place)

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(DocumentError, match="No space left on device"):
        opened.write([record(1)])
    assert names(path) == ["span 0"]


def test_a_file_that_may_not_grow(path, opened):
    """As on a file system without space: the kernel itself takes a part of the data, and then refuses."""
    opened.write([record(0)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(DocumentError, match="File too large"):
            opened.write([record(number) for number in range(1, 100)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(path) == ["span 0"]


def test_a_forked_child_closes_its_copy_and_the_lock_stays(path, opened):
    child = os.fork()
    if not child:
        opened.disown()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(DocumentError, match="another job"):
        Document(str(path))


def test_a_closed_file_is_free_although_a_child_has_a_copy(path, opened):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    opened.close()
    Document(str(path)).close()
    os.close(writer)
    os.waitpid(child, 0)
