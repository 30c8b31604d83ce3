"""The hosts of a job, from all arguments in which a user may name them."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from executors.agents.hosts.shell import PLACEHOLDER, RemoteShell
from executors.job.discovery import (
    FixedHosts,
    HostDiscovery,
    HostDiscoveryScript,
    check_names,
    parse_host_file,
    slots_for,
)
from executors.job.host import is_this_host
from executors.launchers.allocation import Allocation

logger = logging.getLogger(__name__)

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "ConnectTimeout=10")
SOURCES = ("hosts", "hostfile", "host_discovery_script")


@dataclass(frozen=True, slots=True)
class PlaceArguments:
    """What a user may say about hosts; None: nothing.

    ``hosts`` and the file ``hostfile`` name them with their slots, ``host_discovery_script`` prints them, and
    ``slots`` is for those that it prints without a number. ``remote_shell`` runs ``sh`` on another host; without it,
    ssh does, with ``ssh_port`` and ``ssh_identity_file``, unless a script prints the hosts.
    """

    hosts: Mapping[str, int] | None = None
    hostfile: str | Path | None = None
    host_discovery_script: str | None = None
    slots: int | None = None
    remote_shell: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | Path | None = None

    @property
    def names_hosts(self) -> bool:
        """Whether there is a source of hosts."""
        return bool(self._sources())

    def within(self, allocation: Allocation | None) -> PlaceArguments:
        """These, with the hosts of ``allocation`` where the user names no source of hosts.

        Without other hosts there is nothing to name: its tasks need not be the ranks that the user wants.
        """
        if allocation is None or allocation.is_here or self._sources():
            return self
        logger.info("the hosts of this job of %s: %s", allocation.system, _listed(allocation.hosts))
        has_ssh = self.ssh_port is not None or self.ssh_identity_file is not None
        shell = self.remote_shell or (None if has_ssh else allocation.shell)
        return replace(self, hosts=allocation.hosts, remote_shell=shell)

    def check(self, written: Mapping[str, str]) -> None:
        """Raise ValueError for arguments that contradict each other; ``written`` is how the user writes each."""
        sources = self._sources()
        if len(sources) > 1:
            given = " and ".join(written[name] for name in sources)
            raise ValueError(f"{given} both say which hosts there are; give one")
        if self.slots is not None and self.host_discovery_script is None:
            script = written["host_discovery_script"]
            raise ValueError(f"{written['slots']} is for the hosts of a {script}, which is missing")
        if self.remote_shell is not None and not sources:
            known = ", ".join(written[name] for name in SOURCES)
            raise ValueError(f"{written['remote_shell']} is for other hosts; give one of {known}")
        for name in ("ssh_port", "ssh_identity_file"):
            if self.remote_shell is not None and getattr(self, name) is not None:
                text = f"{written[name]} is for ssh, but {written['remote_shell']} is another command"
                raise ValueError(f"{text}; leave one of them out")

    def _sources(self) -> list[str]:
        return [name for name in SOURCES if getattr(self, name) is not None]


@dataclass(frozen=True, slots=True)
class Places:
    """The ``hosts`` of a static job, the ``discovery`` of an elastic one, and the ``shell`` for other hosts."""

    hosts: Mapping[str, int] | None = None
    discovery: HostDiscovery | None = None
    shell: RemoteShell | None = None

    @classmethod
    def of(cls, arguments: PlaceArguments, size: int, is_elastic: bool) -> Places:
        """From checked ``arguments`` of a job that starts with ``size`` ranks. Raises ValueError."""
        if arguments.host_discovery_script is not None:
            discovery = HostDiscoveryScript(arguments.host_discovery_script, arguments.slots)
            return cls(discovery=discovery, shell=_shell(arguments, False))
        hosts = arguments.hosts if arguments.hostfile is None else _read(arguments.hostfile)
        if hosts is None:
            return cls()
        check_names(hosts)
        shell = _shell(arguments, not all(map(is_this_host, hosts)))
        used = slots_for(size, hosts)
        return cls(discovery=FixedHosts(hosts), shell=shell) if is_elastic else cls(hosts=used, shell=shell)


def _listed(hosts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}:{slots}" for name, slots in hosts.items())


def _read(path: str | Path) -> dict[str, int]:
    try:
        return parse_host_file(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the host file {str(path)!r} cannot be read ({error})") from None
    except ValueError as error:
        raise ValueError(f"the host file {str(path)!r}: {error}") from None


def _shell(arguments: PlaceArguments, has_others: bool) -> RemoteShell | None:
    if arguments.remote_shell is not None:
        return RemoteShell(arguments.remote_shell)
    given = {"-p": arguments.ssh_port, "-i": arguments.ssh_identity_file}
    options = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    return RemoteShell(f"{shlex.join([*SSH, *options])} {PLACEHOLDER}") if has_others or options else None
