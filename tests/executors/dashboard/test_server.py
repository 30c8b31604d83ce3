"""The server of the live page, and the dashboard behind it."""

import errno
import http.client
import itertools
import json
import logging
import socket
import sys
from contextlib import closing, suppress
from io import StringIO
from urllib.parse import urlsplit

import pytest

from collectives.net import strangers
from collectives.observe.live.snapshot import LAST_RECORDING, Recording, Snapshot, recording_key, snapshot_key
from executors.dashboard import server as connection_module
from executors.dashboard import server as pictures_module
from executors.dashboard import server as server_module
from executors.dashboard.dashboard import Dashboard
from executors.dashboard.picture import Address
from executors.dashboard.server import DashboardServer
from executors.job.job import Job
from executors.job.output import Output
from executors.job.worlds import Published, change_key, world_key
from tests.collectives.engine.job import until


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pictures_module, "TICK_SECONDS", 0.02)


@pytest.fixture
def served():
    server = DashboardServer(Address(), lambda: {"job": "a"}, lambda: "asked")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def job():
    with Job(2) as job:
        yield job


def ask(link, path, method="GET", token=None):
    parts = urlsplit(link)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    query = parts.query if token is None else f"token={token}" if token else ""
    connection.request(method, f"{path}?{query}")
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def events(link):
    """Pictures, until the stream ends."""
    parts = urlsplit(link)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    connection.request("GET", f"/events?{parts.query}")
    answer = connection.getresponse()
    with closing(connection), answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            elif line.startswith(b"event: end"):
                return


@pytest.mark.parametrize(
    ("path", "method"), [("/", "GET"), ("/events", "GET"), ("/picture", "GET"), ("/record", "POST")]
)
@pytest.mark.parametrize("token", ["", "wrong", "%ff", "x" * 5000])
def test_nothing_without_the_token(served, path, method, token):
    answer, text = ask(served.link, path, method, token)
    assert answer.status == 403
    assert "use the link that the launcher has printed" in text


def test_each_server_has_a_token_of_its_own(served):
    other = DashboardServer(Address(), dict, str)
    assert urlsplit(other.link).query != urlsplit(served.link).query
    assert len(urlsplit(served.link).query) > 32


def test_the_page_needs_nothing_from_elsewhere(served):
    answer, text = ask(served.link, "/")
    assert answer.status == 200
    policy = answer.headers["Content-Security-Policy"]
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert policy.startswith("default-src 'none'")
    assert text.count(f'nonce="{nonce}"') == 2
    assert "NONCE" not in text
    assert "http:" not in text
    assert "https:" not in text
    assert answer.headers["Referrer-Policy"] == "no-referrer", "the link is a secret"


def test_the_page_has_a_first_picture_which_cannot_end_its_script():
    server = DashboardServer(Address(), lambda: {"line": "</script><script>alert(1)"}, str)
    server.start()
    try:
        text = ask(server.link, "/")[1]
    finally:
        server.stop()
    assert text.count("</script>") == 2
    assert r"\u003c/script>\u003cscript>alert(1)" in text


def test_only_the_button_changes_something(served):
    assert ask(served.link, "/record")[0].status == 405
    assert ask(served.link, "/", "POST")[0].status == 405
    assert ask(served.link, "/record", "POST")[1] == "asked"


def test_news_come_until_the_end(served):
    stream = events(served.link)
    assert next(stream) == next(stream) == {"job": "a"}
    served.stop()
    assert list(stream)[-1] == {"job": "a"}


def test_a_reader_stays_when_the_time_of_strangers_is_over(served, monkeypatch):
    monkeypatch.setattr(strangers, "DEADLINE", 0.2)
    parts = urlsplit(served.link)
    with closing(events(served.link)) as stream:
        assert next(stream) == {"job": "a"}
        stranger = socket.create_connection((parts.hostname, parts.port), timeout=10)
        with stranger, suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        assert [next(stream) for _ in range(30)] == [{"job": "a"}] * 30


def test_too_many_pages(served, monkeypatch):
    monkeypatch.setattr(server_module, "MOST_STREAMS", 1)
    with closing(events(served.link)) as stream:
        next(stream)
        answer, text = ask(served.link, "/events")
        assert (answer.status, text) == (503, server_module.CROWDED)


def test_a_reader_that_goes_away_makes_room(served, monkeypatch):
    monkeypatch.setattr(server_module, "MOST_STREAMS", 1)
    with closing(events(served.link)) as stream:
        next(stream)
    until(lambda: not served._streams)


def test_a_reader_that_reads_nothing_makes_room(monkeypatch):
    monkeypatch.setattr(server_module, "READER_SECONDS", 0.5)
    server = DashboardServer(Address(), lambda: {"job": "a" * (1 << 22)}, str)
    server.start()
    try:
        with connected(server) as reader:
            reader.sendall(f"GET /events?{urlsplit(server.link).query} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            until(lambda: server._streams)
            until(lambda: not server._streams)
    finally:
        server.stop()


# Pictures.


def test_all_readers_of_a_tick_get_one_picture(monkeypatch):
    monkeypatch.setattr(pictures_module, "TICK_SECONDS", 1000.0)
    numbers = itertools.count()
    server = DashboardServer(Address(), lambda: {"number": next(numbers)}, str)
    server.start()
    streams = [events(server.link) for _ in range(3)]
    try:
        assert [next(stream) for stream in streams] == [{"number": 0}] * 3
        assert ask(server.link, "/picture")[1] == '{"number": 0}'
        assert '{"number": 0}' in ask(server.link, "/")[1]
    finally:
        server.stop()
    assert [list(stream)[-1] for stream in streams] == [{"number": 1}] * 3, "that of the end is new"


def test_a_picture_is_encoded_once(monkeypatch):
    monkeypatch.setattr(pictures_module, "TICK_SECONDS", 1000.0)
    pictures = pictures_module.Pictures(lambda: {"job": "a"})
    assert pictures.now() is pictures.now()


# The connections.


def connected(server):
    parts = urlsplit(server.link)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def said(connection):
    """All that the server says until it closes the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:", b"\r\n\r\n\r\n"])
def test_a_connection_without_a_whole_request_ends(served, monkeypatch, sent):
    monkeypatch.setattr(connection_module, "REQUEST_SECONDS", 0.02)
    with connected(served) as stranger:
        stranger.sendall(sent)
        answer = said(stranger)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert answer.endswith(connection_module.LATE.encode())


def test_a_head_that_never_ends(served):
    with connected(served) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * connection_module.LONGEST_HEAD)
        assert said(stranger).startswith(b"HTTP/1.1 431 ")


def test_too_many_connections(served, monkeypatch):
    monkeypatch.setattr(connection_module, "MOST_CONNECTIONS", 1)
    with connected(served):
        answer, text = ask(served.link, "/")
        assert (answer.status, text) == (503, connection_module.CONNECTIONS_CROWDED)

    def is_served():
        with suppress(OSError, http.client.HTTPException):
            return ask(served.link, "/")[0].status == 200

    until(is_served)


@pytest.mark.parametrize("path", ["/", "/picture", "/nothing"])
def test_a_connection_is_for_one_request(served, path):
    with connected(served) as reader:
        reader.sendall(f"GET {path}?{urlsplit(served.link).query} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        assert b"\r\nConnection: close\r\n" in said(reader)


def test_a_stranger_has_one_request_too(served):
    with connected(served) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert said(stranger).startswith(b"HTTP/1.1 403 ")


def test_a_request_may_come_in_pieces(served):
    request = f"GET /picture?{urlsplit(served.link).query} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
    with connected(served) as reader:
        reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for place in range(0, len(request), 7):
            reader.sendall(request[place : place + 7])
        assert said(reader).endswith(b'{"job": "a"}')


def test_the_end_does_not_wait_for_strangers(served):
    with connected(served) as stranger:
        stranger.sendall(b"GET")
        ask(served.link, "/")  # connections are accepted in turn
        served.stop()
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_link_for_all_interfaces_has_the_name_of_this_host():
    assert DashboardServer(Address("0.0.0.0", 0), dict, str).link.startswith(f"http://{socket.gethostname()}:")


# The dashboard of a job.


def test_what_ranks_send_is_shown(job, capsys):
    with Dashboard(job, Address()) as dashboard:
        assert capsys.readouterr().err == f"hvdrun: live page: {dashboard.link}\n"
        assert dashboard.variables() == {"HVD_DASHBOARD": job.id}
        job.store.set(snapshot_key("worker-1"), Snapshot(0.0, 1, 2, 0, "h", 7).encode())
        job.store.set(snapshot_key("worker-0"), b"nonsense")
        shown = json.loads(ask(dashboard.link, "/picture")[1])
    assert [each["pid"] for each in shown["ranks"]] == [0, 7]
    assert shown["job"] == job.id


def test_worlds_of_the_driver_are_shown(job):
    with Dashboard(job, Address()) as dashboard:
        job.store.set(world_key(0), Published(0, (("worker-0", "a"),)).encode())
        job.store.set(world_key(1), Published(1, (("worker-5", "b"),), text="rank 0 lost").encode())
        job.store.set(change_key(1), b"world 1: 1 rank, rank 0 lost (killed), resumed")
        shown = json.loads(ask(dashboard.link, "/picture")[1])
    assert [each["text"] for each in shown["rounds"]] == ["rank 0 lost (killed), resumed", "the start"]
    assert [each["worker"] for each in shown["ranks"]] == ["worker-5"]


def test_lines_are_shown_and_still_written(job):
    written = StringIO()
    with Dashboard(job, Address()) as dashboard:
        output = dashboard.watched(Output(2, stdout=written, stderr=sys.stderr))
        sink = output.sink(1, "stdout")
        sink.feed(b"<b>one</b>\ntw")
        sink.feed(b"o")
        sink.close()
        shown = json.loads(ask(dashboard.link, "/picture")[1])
    assert shown["ranks"][1]["lines"] == [["stdout", "<b>one</b>"], ["stdout", "two"]]
    assert written.getvalue() == "[1]<stdout>:<b>one</b>\n[1]<stdout>:two\n"


def test_the_button_asks_the_ranks(job):
    with Dashboard(job, Address()) as dashboard:
        text = ask(dashboard.link, "/record", "POST")[1]
        request = Recording.decode(job.store.get(recording_key(1), 0.0))
        assert "press again when it is over" in ask(dashboard.link, "/record", "POST")[1]
        assert job.store.get(LAST_RECORDING, 0.0) == b"1"
    assert (request.number, request.seconds) == (1, 10.0)
    assert request.path in text


def test_the_end_says_why(job):
    dashboard = Dashboard(job, Address())
    with suppress(KeyError), dashboard:
        stream = events(dashboard.link)
        next(stream)
        raise KeyError("rank 1")
    assert list(stream)[-1]["over"] == "'rank 1'"


def test_a_port_in_use_is_one_line_and_the_job_goes_on(job, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING), Dashboard(job, Address("127.0.0.1", port)) as dashboard:
            assert dashboard.variables() == {}
            assert dashboard.link == ""
    (line,) = caplog.messages
    assert line.startswith(f"no live page at 127.0.0.1:{port}: Address already in use; give another address")


def test_a_lack_of_descriptors_is_one_line_and_the_job_goes_on(job, caplog, monkeypatch):
    def fail():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("asyncio.events.new_event_loop", fail)
    with caplog.at_level(logging.WARNING), Dashboard(job, Address()) as dashboard:
        assert dashboard.link == ""
    assert caplog.messages == [
        "no live page at 127.0.0.1:0: the thread hvd-dashboard did not start ([Errno 24] Too many open files). "
        "Training goes on without it"
    ]


def test_a_job_without_a_page_has_nothing_of_it(job):
    output = Output(2)
    with Dashboard(job, None) as dashboard:
        assert dashboard.watched(output) is output
        assert dashboard.variables() == {}
