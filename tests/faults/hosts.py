"""An elastic job on two hosts: network namespaces, whose link can be cut."""

import itertools
from collections import defaultdict, deque
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from tests.faults.arena import LocalArena
from tests.faults.events import TWO_HOSTS
from tests.faults.jobs.training import LARGE
from tests.namespaces import HOSTS, NAMESPACES, Network

AGENT = "executors.agents.hosts.agent"
# The driver looks once a second: of two offers in that time it sees the second alone.
UNSEEN_OFFERS = 1


class Slots:
    """The numbers of slots that each host had in the offers before."""

    def __init__(self):
        self._former = defaultdict(lambda: deque(maxlen=UNSEEN_OFFERS + 1))

    def offer(self, host, share, opens):
        """``share``, or the next number that the driver has not seen last, which ``opens`` slots that were left."""
        former = self._former[host]
        former.append(next(count for count in itertools.count(share) if not opens or count not in former))
        return former[-1]


class HostsArena(LocalArena):
    """An hvdrun on the first host of a :class:`Network`; half of its ranks are on the other one."""

    options = ("--remote-shell", "ip netns exec {host}")
    repertoire = TWO_HOSTS

    def __init__(self, folder, ranks, model, samples="sampler", epochs=1 << 20):
        self._slots = Slots()
        with ExitStack() as stack:
            self._network = stack.enter_context(Network())
            with self._network.inside(HOSTS[0]):
                super().__init__(folder, ranks, model, samples, epochs)
            self._stack = stack.pop_all()

    def __exit__(self, *exception):
        with self._stack:
            super().__exit__(*exception)

    def remote(self, workers):
        other = (NAMESPACES / self._network.names[HOSTS[1]]).stat().st_ino
        return tuple(rank for rank, worker in enumerate(workers) if self._namespace(worker) == other)

    def _namespace(self, worker):
        with suppress(FileNotFoundError, psutil.NoSuchProcess):
            return Path(f"/proc/{self._process(worker).pid}/ns/net").stat().st_ino

    def _hosts(self, slots, offers):
        """The first host has a slot always."""
        here = max(1, slots // 2)
        shares = {"localhost": here, self._network.names[HOSTS[1]]: slots - here}
        counts = {host: self._slots.offer(host, share, slots >= self.most) for host, share in shares.items()}
        return "".join(f"{host}:{count}\n" for host, count in counts.items() if shares[host])

    def hit(self, kind, worker):
        network = self._network
        links = {"cut": network.cut, "heal": network.heal, "slow": network.slow, "hasten": network.hasten}
        links.get(kind, lambda: super(HostsArena, self).hit(kind, worker))()

    def _strike(self, kind, process):
        if kind == "agent":
            next(each for each in process.parents() if _is_agent(each)).kill()
        else:
            super()._strike(kind, process)

    def _processes(self):
        yield from super()._processes()
        for process in psutil.process_iter(["cmdline"]):
            with suppress(psutil.Error):
                if _is_agent(process) and process.environ().get("TMPDIR") == self._folders()["TMPDIR"]:
                    yield process


class LargeArena(HostsArena):
    """Its worlds count as large: the lowest rank of the other host leads the others there."""

    def __init__(self, folder, *arguments):
        (folder / LARGE).touch()
        super().__init__(folder, *arguments)


def _is_agent(process):
    return AGENT in process.cmdline()
