"""Pure: jsrun, the launcher of IBM's LSF clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from executors.launchers.known_ports import KnownPorts, Trust, ports_of
from executors.launchers.place import Place, number, text


class Jsrun:
    """The variables of a task of jsrun within a job of LSF."""

    def place(self, environment: Mapping[str, str]) -> Place | None:
        rank, size = number(environment, "JSM_NAMESPACE_RANK"), number(environment, "JSM_NAMESPACE_SIZE")
        if rank is None or size is None:
            return None
        job = " ".join(
            ["jsrun", *(text(environment, name) for name in ("LSB_JOBID", "LSB_JOBINDEX", "PMIX_NAMESPACE"))]
        )
        return Place(
            launcher="jsrun",
            variable="JSM_NAMESPACE_SIZE",
            rank=rank,
            size=size,
            job=job,
            rendezvous=_rendezvous(environment, size, job),
            remedy="set MASTER_ADDR to the host of rank 0",
        )


def _rendezvous(environment: Mapping[str, str], size: int, job: str) -> KnownPorts | None:
    ports, master = ports_of(environment, job), text(environment, "MASTER_ADDR")
    if number(environment, "JSM_NAMESPACE_LOCAL_SIZE") == size:
        return KnownPorts.on_this_host(ports)
    hosts = [master] if master else hosts_of(environment)
    return KnownPorts(tuple(hosts), ports, Trust.USER) if hosts else None


def hosts_of(environment: Mapping[str, str]) -> list[str]:
    """The hosts of a job of LSF that compute, in order."""
    return list(slots_of_hosts(environment))


def slots_of_hosts(environment: Mapping[str, str]) -> dict[str, int]:
    """The hosts of a job of LSF that compute, with their slots; without the host of the batch script, if it is apart.

    LSB_MCPU_HOSTS has each host with its slots ("batch 1 node1 42 node2 42"), LSB_HOSTS each host once a slot. The
    batch host of such a cluster has one slot, and the others have more.
    """
    words = text(environment, "LSB_MCPU_HOSTS").split()
    pairs = zip(words[::2], words[1::2], strict=False)
    slots = {name: int(count) for name, count in pairs if count.isascii() and count.isdigit()}
    if not slots:
        slots = dict(Counter(text(environment, "LSB_HOSTS").split()))
    first = next(iter(slots), "")
    if len(slots) > 1 and slots[first] == 1 and any(count != 1 for count in slots.values()):
        del slots[first]
    return slots
