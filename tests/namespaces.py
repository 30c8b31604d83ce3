"""Hosts on one machine: network namespaces, joined by a link of a limited rate. For root, on Linux."""

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

CLONE_NEWNET = 0x40000000  # setns(2)
HOSTS = ("host-0", "host-1")
RATE = "1gbit"
SLOW = "1mbit"
# The bucket holds the largest packet that TCP hands to the link; the queue, 25 ms of it.
BUCKET = "tbf rate {rate} burst 128kb latency 25ms"
WIRE = "wire"
NAMESPACES = Path("/var/run/netns")
ENTER_HOST = Path(__file__).with_name("enter_host")
"""The remote shell of mpirun on these hosts."""

_libc = ctypes.CDLL(None, use_errno=True)
_counter = itertools.count()


class Unavailable(RuntimeError):
    """This machine makes no namespaces; the text says what is missing."""


class Network:
    """A context manager: namespaces whose links have ``rate``, as tc writes it. Raises Unavailable.

    Two hosts, those of HOSTS, are joined by a veth pair; more of them, by a bridge in a namespace of its own.
    ``address`` is that of the first host, ``names`` are those of the hosts' namespaces. Processes inside must have
    ended before the end of the block.
    """

    address = "10.77.0.1"

    def __init__(self, rate=RATE, hosts=2):
        self._rate = rate
        prefix = f"hvd-{os.getpid()}-{next(_counter)}"
        self.names = {f"host-{number}": f"{prefix}-host-{number}" for number in range(hosts)}
        self._switch = f"{prefix}-switch"

    def __enter__(self):
        _check()
        _remove(_abandoned())
        try:
            self._build(list(self.names.values()))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        _remove([*self.names.values(), self._switch])

    @contextlib.contextmanager
    def inside(self, host):
        """In the block this thread opens its sockets, and starts its processes and threads, on ``host``."""
        with open("/proc/thread-self/ns/net") as home, open(self.path(host)) as namespace:
            _enter(namespace)
            try:
                yield
            finally:
                _enter(home)

    def path(self, host):
        """The file of the namespace, for :func:`stay_inside`."""
        return NAMESPACES / self.names[host]

    def sent(self):
        """The bytes that the first host has sent over the link, with their headers."""
        with self.inside(HOSTS[0]):
            devices = Path("/proc/thread-self/net/dev").read_text()
        return int(re.search(rf"{WIRE}:(?:\s+(\d+)){{9}}", devices)[1])

    def cut(self):
        """Take the link down: packets vanish, and nobody is told."""
        self._set_link("down")

    def heal(self):
        """Take the link up again."""
        self._set_link("up")

    def slow(self):
        """Let the link carry little, so that all but small messages take long."""
        self._limit(SLOW)

    def hasten(self):
        """Give the link its rate again."""
        self._limit(self._rate)

    def _limit(self, rate):
        for name in self.names.values():
            _run("tc", "-n", name, *f"qdisc change dev {WIRE} root {BUCKET.format(rate=rate)}".split())

    def _set_link(self, state):
        _run("ip", "-n", self.names[HOSTS[0]], "link", "set", WIRE, state)

    def _build(self, names):
        for name in names:
            _run("ip", "netns", "add", name)
        if len(names) == len(HOSTS):
            _run("ip", "link", "add", WIRE, "netns", names[0], "type", "veth", "peer", "name", WIRE, "netns", names[1])
        else:
            self._join(names)
        for number, name in enumerate(names, 1):
            _run("ip", "-n", name, "address", "add", f"10.77.0.{number}/24", "dev", WIRE)
            _run("tc", "-n", name, *f"qdisc add dev {WIRE} root {BUCKET.format(rate=self._rate)}".split())
            for device in ("lo", WIRE):
                _run("ip", "-n", name, "link", "set", device, "up")

    def _join(self, names):
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "hub", "up", "type", "bridge")
        for number, name in enumerate(names):
            port = f"port-{number}"
            link = f"link add {port} netns {self._switch} master hub up type veth peer name {WIRE} netns {name}"
            _run("ip", "-n", self._switch, *link.split())


def _remove(names):
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _abandoned():
    """Namespaces of a process that was killed before it could remove them."""
    found = [re.fullmatch(r"hvd-(\d+)-.*", path.name) for path in NAMESPACES.glob("hvd-*")]
    return [match[0] for match in found if match and not Path(f"/proc/{match[1]}").exists()]


def _check():
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise Unavailable(f"there is no {' and no '.join(missing)}; install iproute2")
    if os.geteuid() != 0:
        raise Unavailable("only root makes network namespaces")


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)!r} failed: {done.stderr.strip()}")


def stay_inside(path):
    """This thread, and all that it starts, is in the namespace from now on."""
    with open(path) as namespace:
        _enter(namespace)


def _enter(namespace):
    if _libc.setns(namespace.fileno(), CLONE_NEWNET):
        raise Unavailable(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")
