import io
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.net.frames import Frames, frame
from executors.job.output import LONGEST_LINE, ConsoleSink, Lines, Output, say

CHUNKS = st.lists(st.text("a\r\n", min_size=1).map(str.encode))


def lines_of(chunks):
    lines = Lines()
    return [line for chunk in chunks for line in lines.feed(chunk)] + list(lines.flush())


def ends_properly(data):
    return data if data.endswith((b"\n", b"\r")) or not data else data + b"\n"


@given(CHUNKS)
def test_lines_do_not_depend_on_how_the_bytes_arrive(chunks):
    data = b"".join(chunks)
    lines = lines_of(chunks)
    assert lines == ends_properly(data).splitlines(keepends=True) == lines_of([data])


def test_a_line_without_end_is_cut_so_that_memory_is_bounded():
    lines = Lines()
    pieces = list(lines.feed(b"x" * (LONGEST_LINE + 1)))
    assert pieces == [b"x" * (LONGEST_LINE + 1) + b"\n"]
    assert list(lines.feed(b"y\n")) == [b"y\n"]


def test_every_line_has_its_prefix():
    stream = io.StringIO()
    sink = ConsoleSink(3, "stdout", stream)
    sink.feed(b"one\ntw")
    assert stream.getvalue() == "[3]<stdout>:one\n"
    sink.feed("o \N{SNOWMAN}".encode()[:-1])
    sink.feed("\N{SNOWMAN}".encode()[-1:] + b"\n\nlast")
    sink.close()
    expected = "[3]<stdout>:one\n[3]<stdout>:two \N{SNOWMAN}\n[3]<stdout>:\n[3]<stdout>:last\n"
    assert stream.getvalue() == expected


def test_the_time_comes_first():
    stream = io.StringIO()
    ConsoleSink(0, "stderr", stream, timestamp=True).feed(b"line\n")
    now, bracket, rest = stream.getvalue().partition("[0]")
    assert time.strptime(now)
    assert bracket + rest == "[0]<stderr>:line\n"


def test_bytes_that_are_no_text_do_not_end_the_job():
    stream = io.StringIO()
    ConsoleSink(0, "stdout", stream).feed(b"\xff\n")
    assert stream.getvalue() == "[0]<stdout>:\N{REPLACEMENT CHARACTER}\n"


def test_a_console_that_lacks_a_character_gets_a_question_mark():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    ConsoleSink(0, "stdout", stream).feed("\N{SNOWMAN}\n".encode())
    assert raw.getvalue() == b"[0]<stdout>:?\n"


@pytest.mark.parametrize(("size", "folder"), [(1, "rank.0"), (10, "rank.9"), (11, "rank.10"), (101, "rank.009")])
def test_files_hold_the_bytes_and_sort_by_rank(tmp_path, capsys, size, folder):
    rank = int(folder.removeprefix("rank."))
    with Output(size, tmp_path / "new" / "folder") as output:
        sinks = {name: output.sink(rank, name) for name in ("stdout", "stderr")}
        for name, sink in sinks.items():
            sink.feed(f"{name} \udcff half".encode("utf-8", "surrogateescape"))
            sink.close()
    for name in sinks:
        assert (tmp_path / "new" / "folder" / folder / name).read_bytes() == name.encode() + b" \xff half"
    captured = capsys.readouterr()
    assert captured.out == f"[{rank}]<stdout>:stdout \N{REPLACEMENT CHARACTER} half\n"
    assert captured.err == f"[{rank}]<stderr>:stderr \N{REPLACEMENT CHARACTER} half\n"


def test_a_file_that_cannot_be_written_any_more_is_told_once_and_the_console_has_the_rest(tmp_path, capsys, caplog):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    with Output(1, tmp_path) as output:
        sink = output.sink(0, "stdout")
        for line in (b"one\n", b"two\n"):
            sink.feed(line)
        sink.close()
    assert capsys.readouterr().out == "[0]<stdout>:one\n[0]<stdout>:two\n"
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}/rank.0/stdout cannot be written any more ([Errno 28] No space left on device); only the console "
        "has the rest"
    ]


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_files_of_workers_are_closed_when_these_have_ended_or_with_the_job(tmp_path, is_closed):
    before = os.listdir("/proc/self/fd")
    with Output(1, tmp_path) as output:
        for rank in range(3):
            sink = output.sink(rank, "stdout")
            if is_closed:
                sink.close()
        assert (os.listdir("/proc/self/fd") == before) == is_closed
    assert os.listdir("/proc/self/fd") == before


def test_the_driver_speaks_on_standard_error(capsys):
    say("text")
    assert capsys.readouterr() == ("", "hvdrun: text\n")


@given(st.lists(st.binary()), st.data())
def test_messages_do_not_depend_on_how_the_bytes_arrive(messages, data):
    stream = b"".join(frame(message) for message in messages)
    frames, received = Frames(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += frames.feed(stream[:size])
        stream = stream[size:]
    assert received == messages
