"""The messages between the driver and the agent of a host. All but the hello are pickles in authenticated frames."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from signal import SIGTERM

from collectives import VERSION
from executors.agents.local.supervisor import Event
from executors.agents.local.work import WorkerPayload

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SAME_VERSIONS = "install the same versions"
"""The advice about agents that differ from the driver."""


@dataclass(frozen=True)
class AgentHello:
    """The first message of an agent: that of ``host``, with the versions of its library and of its Python."""

    host: str
    version: str = VERSION
    python: str = PYTHON

    @property
    def mismatch(self) -> str:
        """How the versions of the agent differ from those of this process; empty where they do not."""
        if (self.version, self.python) == (VERSION, PYTHON):
            return ""
        return f"it has hvd-cluster {self.version} on Python {self.python}, the driver {VERSION} on Python {PYTHON}"

    def encode(self) -> bytes:
        """The content of its frame, in a form that all versions can read."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> AgentHello:
        """The reverse of :meth:`encode`. Raises ValueError or TypeError for anything else."""
        return cls(**json.loads(content))


# From the driver.


@dataclass(frozen=True)
class Begin:
    """The first message of the driver: the work, and the number of ranks that share the host.

    ``grace`` is the time between the request to end and the kill, in seconds.
    """

    work: WorkerPayload
    ranks: int
    grace: float


@dataclass(frozen=True)
class AgentLaunch:
    """Start worker ``number`` with ``environment``, which has its place in the job, but not the secret."""

    number: int
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class AgentStop:
    """Ask worker ``number`` to end."""

    number: int


@dataclass(frozen=True)
class Kill:
    """Kill worker ``number``."""

    number: int


@dataclass(frozen=True)
class EndAll:
    """Ask all workers to end by ``signal``, SIGTERM or SIGINT, ``spare`` last."""

    spare: int | None
    signal: int = SIGTERM


@dataclass(frozen=True)
class PassOn:
    """Send all workers ``signal``."""

    signal: int


@dataclass(frozen=True)
class AgentLeave:
    """End yourself, when all workers have ended."""


FromDriver = Begin | AgentLaunch | AgentStop | Kill | EndAll | PassOn | AgentLeave


# From the agent, which also sends the events of its supervisor.


@dataclass(frozen=True)
class Wrote:
    """Worker ``number`` wrote ``data`` to ``stream``, or has closed it if there are none."""

    number: int
    stream: str
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class AgentFailed:
    """Worker ``number`` could not be started, for the reason ``text``."""

    number: int
    text: str


FromAgent = Event | Wrote | AgentFailed
