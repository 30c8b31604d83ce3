"""The metrics as Prometheus reads them."""

import builtins
import logging
import socket
import urllib.request
from contextlib import ExitStack

import numpy as np
import pytest

from collectives.net import strangers
from collectives.observe.metrics import exposition, meter
from collectives.observe.metrics.exposition import Exposition
from hvd_cluster.core import basics
from tests.collectives.engine.job import run, until

parser = pytest.importorskip("prometheus_client.parser")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    meter.process_meter._begin()
    monkeypatch.setattr(exposition, "RETRIES", 1)
    yield
    basics.shutdown()
    meter.process_meter._begin()
    for name in ("collectives", "executors", "hvd_cluster"):
        logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger(name).handlers.clear()


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def scrape(port, address="127.0.0.1"):
    """The samples by name and labels."""
    with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    families = list(parser.text_string_to_metric_families(text))
    return {(sample.name, *sorted(sample.labels.items())): sample.value for each in families for sample in each.samples}


def until_served(port, address="127.0.0.1"):
    def is_served():
        try:
            socket.create_connection((address, port), 1).close()
        except OSError:
            return False
        return True

    until(is_served)


def test_a_scrape_shows_what_the_rank_has_done(port, monkeypatch):
    monkeypatch.setenv("HVD_METRICS_PORT", str(port))
    basics.init()
    until_served(port)
    for _ in range(3):
        run(basics.engine(), np.ones(4), "x")
    found = scrape(port)
    assert found["hvd_operations_total", ("operation", "allreduce"), ("process_set", "0"), ("rank", "0")] == 3
    assert found["hvd_bytes_total", ("process_set", "0"), ("rank", "0")] == 96
    assert found["hvd_rounds_total", ("rank", "0")] == 1
    assert found["hvd_size", ("rank", "0")] == 1


def test_an_address_of_ipv6(monkeypatch):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("HVD_METRICS_PORT", str(port))
    monkeypatch.setenv("HVD_METRICS_ADDRESS", "::1")
    basics.init()
    until_served(port, "::1")
    assert scrape(port, "[::1]")["hvd_size", ("rank", "0")] == 1


def test_the_port_is_free_after_shutdown(port, monkeypatch):
    monkeypatch.setenv("HVD_METRICS_PORT", str(port))
    basics.init()
    until_served(port)
    basics.shutdown()
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_port_in_use_is_one_line_and_training_goes_on(port, monkeypatch, caplog):
    monkeypatch.setenv("HVD_METRICS_PORT", str(port))
    with socket.create_server(("127.0.0.1", port)), caplog.at_level(logging.WARNING, "collectives"):
        basics.init()
        until(lambda: caplog.messages)
        assert run(basics.engine(), np.ones(1), "x")[0] == 1.0
    [line] = caplog.messages
    assert f"no metrics at 127.0.0.1:{port}: Address already in use; set HVD_METRICS_PORT" in line


@pytest.mark.parametrize("address", ["203.0.113.1", "x" * 64, "2001:db8::1"])
def test_an_address_that_this_host_does_not_have_is_one_line(address, port, caplog):
    with caplog.at_level(logging.WARNING, "collectives"):
        shown = Exposition(meter.process_meter, address, port)
        until(lambda: not shown._thread.is_alive())
    [line] = caplog.messages
    assert line.startswith(f"no metrics at {address}:{port}: ")
    assert "HVD_METRICS_ADDRESS" in line


def test_without_the_library_is_one_line(port, monkeypatch, caplog):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with caplog.at_level(logging.WARNING, "collectives"):
        shown = Exposition(meter.process_meter, "127.0.0.1", port)
        until(lambda: caplog.messages)
        shown.close()
    [line] = caplog.messages
    assert 'pip install "hvd-cluster[metrics]"' in line


def test_no_sample_before_init(port):
    shown = Exposition(meter.process_meter, "127.0.0.1", port)
    until_served(port)
    assert scrape(port) == {}
    shown.close()


def test_another_address_or_port_replaces_the_first(port):
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = server.getsockname()[1]
    basics._process.observers._expose("127.0.0.1", port)
    until_served(port)
    first = basics._process.observers._exposition
    basics._process.observers._expose("127.0.0.1", port)
    assert basics._process.observers._exposition is first
    basics._process.observers._expose("127.0.0.1", other)
    until_served(other)
    with socket.create_server(("127.0.0.1", port)):
        pass
    basics._process.observers._expose("", 0)
    assert basics._process.observers._exposition is None


def test_a_client_that_sends_no_whole_request_holds_nobody_up_and_is_closed(port, monkeypatch):
    """Neither one that is silent nor one that sends a byte now and then, and there may be more than two."""
    monkeypatch.setattr(strangers, "DEADLINE", 1.0)
    shown = Exposition(meter.process_meter, "127.0.0.1", port)
    until_served(port)
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in range(3)]
        slow[0].sendall(b"GET /metrics HTTP/1.1\r\nHost")
        assert scrape(port) == {}
        until(lambda: is_closed_after(slow[0], b"x"))
        for sock in slow[1:]:
            assert sock.recv(1) == b""
    shown.close()


def is_closed_after(sock, data):
    """Whether ``sock`` is closed by the other side, at the latest by now that ``data`` are sent."""
    try:
        sock.sendall(data)
        sock.setblocking(False)
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_more_clients_than_it_serves_at_once_wait(port, monkeypatch):
    monkeypatch.setattr(exposition, "MOST_CLIENTS", 2)
    monkeypatch.setattr(strangers, "SILENCE", 0.05)
    shown = Exposition(meter.process_meter, "127.0.0.1", port)
    until_served(port)
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
        assert scrape(port) == {}
    shown.close()


@pytest.mark.parametrize("said", [b"\r\n\r\n", b"\x16\x03 who is there\r\n\r\n", b"GET /\r\n\r\n"])
def test_what_is_no_request(port, said):
    shown = Exposition(meter.process_meter, "127.0.0.1", port)
    until_served(port)
    with socket.create_connection(("127.0.0.1", port), 30) as sock:
        sock.sendall(said)
        answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 405 "))
    shown.close()
