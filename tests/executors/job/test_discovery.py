"""Finding hosts: by a script, and again and again while a job runs."""

import itertools
import logging
import os
import re
import threading
from types import SimpleNamespace

import psutil
import pytest

from executors.job import discovery as discovery_module
from executors.job.discovery import DiscoveryError, FixedHosts, HostDiscoveryScript, HostWatch, parse_hosts

SECONDS = 30.0  # the longest wait of these tests for anything


def script(tmp_path, text, mode=0o755, name="discover"):
    path = tmp_path / name
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def hosts(source, slots=None, **options):
    return HostDiscoveryScript(source, slots, **options).find_available_hosts_and_slots()


class TestScript:
    def test_a_program_prints_hosts(self, tmp_path):
        assert hosts(script(tmp_path, "#!/bin/sh\necho a:2\necho\necho '  b:3 '\n")) == {"a": 2, "b": 3}

    def test_a_file_without_a_first_line_for_its_interpreter(self, tmp_path):
        assert hosts(script(tmp_path, "echo a:2\n")) == {"a": 2}

    def test_a_file_of_the_working_directory_with_a_space_in_its_name(self, tmp_path, monkeypatch):
        script(tmp_path, "#!/bin/sh\necho a:2\n", name="my discover.sh")
        monkeypatch.chdir(tmp_path)
        assert hosts("my discover.sh") == {"a": 2}

    def test_a_line_for_the_shell(self):
        assert hosts("echo a:1; echo b", 4) == {"a": 1, "b": 4}

    def test_no_host(self):
        assert hosts("true") == {}

    @pytest.mark.parametrize(
        ("source", "problem"),
        [
            ("echo bad cluster >&2; exit 3", "ended with exit code 3: bad cluster"),
            ("exit 3", "ended with exit code 3"),
            ("kill -9 $$", "was killed by signal 9"),
            ("/no/such/program", r"ended with exit code 127: .*not found.*"),
            ("/tmp", r"ended with exit code 126: .*"),
        ],
    )
    def test_a_script_that_fails_is_named_with_what_it_said(self, source, problem):
        text = rf"the host discovery script '{re.escape(source)}' {problem}; run it by hand to see why"
        with pytest.raises(DiscoveryError, match=f"^{text}$"):
            hosts(source)

    def test_a_file_that_is_not_executable(self, tmp_path):
        path = script(tmp_path, "#!/bin/sh\necho a:2\n", mode=0o644)
        with pytest.raises(DiscoveryError, match=rf"'{path}' ended with exit code 126: .*denied; run it by hand"):
            hosts(path)

    def test_a_script_that_hangs_is_killed_with_its_children(self, tmp_path):
        (tmp_path / "sleep").symlink_to("/bin/sleep")
        with pytest.raises(DiscoveryError, match=r"did not end within 0\.3 s, and was killed; run it by hand"):
            hosts(f"{tmp_path}/sleep 600; true", seconds=0.3)
        found = [
            each for each in psutil.process_iter(["cmdline"]) if f"{tmp_path}/sleep" in (each.info["cmdline"] or ())
        ]
        assert not psutil.wait_procs(found, SECONDS)[1]

    def test_a_script_that_was_closed_is_killed(self):
        discovery = HostDiscoveryScript("sleep 600", None, 600.0)
        discovery.close()
        with pytest.raises(DiscoveryError, match="was killed by signal 9"):
            discovery.find_available_hosts_and_slots()

    def test_a_script_that_prints_without_end_is_killed_before_it_fills_the_memory(self, monkeypatch):
        monkeypatch.setattr(discovery_module, "MOST_BYTES", 1 << 20)
        with pytest.raises(DiscoveryError, match=r"'yes' printed more than 1 MiB, and was killed; it shall print host"):
            hosts("yes", seconds=600.0)

    def test_errors_without_end_leave_their_last_lines(self):
        with pytest.raises(DiscoveryError, match=r"ended with exit code 3: (y\n)+the last line; run it by hand"):
            hosts("yes | head -n 1000000 >&2; echo the last line >&2; exit 3")

    def test_a_script_that_closes_its_output_and_hangs_is_killed(self):
        with pytest.raises(DiscoveryError, match=r"did not end within 0\.3 s, and was killed"):
            hosts("exec >&- 2>&-; sleep 600", seconds=0.3)

    @pytest.mark.parametrize("output", [b"\xff\xfe", b"\x00\x01"])
    def test_rubbish(self, tmp_path, output):
        (tmp_path / "rubbish").write_bytes(output)
        with pytest.raises(DiscoveryError, match=r"without slots|gave the line"):
            hosts(f"cat {tmp_path}/rubbish")


class TestLines:
    @pytest.mark.parametrize(
        "line",
        [
            *("a:0", "a:-1", "a:two", "a:1.5", "a:", ":3", "a b:3", "hello world", "a:\u0663", "a:" + "9" * 5000),
            *(
                "<html>503</html>",
                "<html>:4",
                "{",
                "-oProxyCommand=x:1",
                "a;b:1",
                "a/b",
                "-o@a:1",
                "@a:1",
                "b\u00fccher:1",
            ),
            *("fd00::1", "fd00::1:4", "[fd00::1", "[]:1", "[a]:1", "[10.0.0.1]:1", "[fd00::1]x:1", "."),
        ],
    )
    def test_a_line_that_is_no_host_is_shown_with_the_form(self, line):
        shown = re.escape(repr(line[:200]))
        with pytest.raises(DiscoveryError, match=f"^here gave the line {shown}; each line must be host:slots, such as"):
            parse_hosts(line, 4, "here")

    def test_a_host_without_slots(self):
        with pytest.raises(DiscoveryError, match="here gave 'a' without slots; print a:4, or set --slots-per-host"):
            parse_hosts("a\n", None, "here")

    def test_a_host_that_is_named_twice(self):
        with pytest.raises(DiscoveryError, match="here names host 'a' twice; name each host once, with all of its"):
            parse_hosts("a:1\nb:1\na:2\n", None, "here")

    @pytest.mark.parametrize("host", ["10.0.0.1", "node-1.rack_2.example.com", "7", "_gateway", "a.", "user@a"])
    def test_a_name_and_an_address(self, host):
        assert parse_hosts(f"{host}:4\n", None, "here") == {host: 4}
        assert parse_hosts(host, 3, "here") == {host: 3}

    @pytest.mark.parametrize("host", ["fd00::1", "::1", "fe80::1%eth0"])
    def test_an_ipv6_address_is_in_brackets(self, host):
        assert parse_hosts(f"[{host}]:4\n", None, "here") == {host: 4}
        assert parse_hosts(f"[{host}]", 3, "here") == {host: 3}


class Changing:
    """A discovery whose answers the test gives, one for each look; the last one stays."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.looks = threading.Semaphore(0)

    def find_available_hosts_and_slots(self):
        self.looks.release()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, looks):
        for _ in range(looks):
            assert self.looks.acquire(timeout=SECONDS)


class Told:
    """What a watch tells the driver."""

    def __init__(self):
        self.hosts = []
        self.changed = threading.Condition()

    def found(self, hosts):
        with self.changed:
            self.hosts.append(dict(hosts))
            self.changed.notify_all()

    def wait(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.hosts) >= count, SECONDS)


def watch(discovery, told, **options):
    return HostWatch(discovery, told.found, lambda action: action(), interval=0.001, **options)


class Stops:
    """An event that notes how long each wait for it is, and is set in the third one."""

    def __init__(self, waits):
        self.waits = waits

    def wait(self, seconds):
        self.waits.append(seconds)
        return self.is_set()

    def is_set(self):
        return len(self.waits) == 3


class TestWatch:
    def test_the_hosts_are_known_inside_the_block(self):
        told = Told()
        with watch(FixedHosts({"a": 2}), told):
            assert told.hosts == [{"a": 2}]

    def test_changes_are_told_once_each(self):
        told, discovery = Told(), Changing({"a": 1}, {"a": 1}, {"a": 2}, {"a": 2}, {}, {"a": 1})
        with watch(discovery, told):
            discovery.wait(9)
        assert told.hosts == [{"a": 1}, {"a": 2}, {}, {"a": 1}]

    def test_an_error_at_the_start_is_raised_and_no_thread_is_left(self):
        with pytest.raises(DiscoveryError, match="broken"), watch(Changing(DiscoveryError("broken")), Told()):
            pass
        assert not [thread for thread in threading.enumerate() if thread.name == "hvd-discovery"]

    def test_later_errors_are_logged_once_and_the_hosts_stay(self, caplog):
        caplog.set_level(logging.INFO, "executors")
        broken, worse = DiscoveryError("it is broken"), KeyError("worse")
        told = Told()
        discovery = Changing({"a": 1}, broken, broken, worse, worse, {"a": 1}, broken, {"a": 2})
        with watch(discovery, told):
            told.wait(2)
        assert told.hosts == [{"a": 1}, {"a": 2}]
        kept = "; the job keeps the hosts that it has"
        assert caplog.messages == [f"it is broken{kept}", f"'worse'{kept}", f"it is broken{kept}"]

    def test_it_rests_longer_after_a_long_search(self, monkeypatch):
        clock, waits = itertools.count(step=2.0), []
        monkeypatch.setattr("executors.job.discovery.time", SimpleNamespace(monotonic=lambda: next(clock)))
        observed = watch(FixedHosts({"a": 1}), Told(), rest=10.0)
        monkeypatch.setattr(observed, "_stopped", Stops(waits))
        observed._run()
        assert waits == [0.001, 20.0, 20.0]

    def test_nothing_is_told_after_the_block(self):
        told, discovery = Told(), Changing({"a": 1}, {"a": 2}, {"a": 3})
        calls = []
        with HostWatch(discovery, told.found, calls.append, interval=0.001):
            discovery.wait(5)
        count = len(calls)
        assert not [thread for thread in threading.enumerate() if thread.name == "hvd-discovery"]
        assert len(calls) == count == 2

    def test_a_script_that_hangs_does_not_hold_up_the_end(self, tmp_path, caplog):
        fifo, started = tmp_path / "fifo", tmp_path / "started"
        os.mkfifo(fifo)
        line = f"if [ -e {tmp_path}/again ]; then touch {started}; cat {fifo}; fi; touch {tmp_path}/again; echo a:1"
        told = Told()
        with watch(HostDiscoveryScript(line, None, 600.0), told):
            until_exists(started)
        assert not [thread for thread in threading.enumerate() if thread.name == "hvd-discovery"]
        assert caplog.messages == []


def until_exists(path):
    waiting = threading.Event()
    for _ in range(int(SECONDS / 0.01)):
        if path.exists():
            return
        waiting.wait(0.01)
    pytest.fail(f"{path} was not made")
