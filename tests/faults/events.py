"""Pure: the random events of a campaign."""

from dataclasses import dataclass, replace
from functools import partial
from random import Random

from tests.faults import points

LONG_SECONDS = 10.0
STOP_SECONDS = (1.0, 2.0, 3.0, 4.0, 6.0, LONG_SECONDS, 15.0, 20.0)
# As long as the recovery from a loss takes at most, so that a second event falls into it, or shortly after it.
RECOVERY_SECONDS = 0.3
# Longer than a silent host is waited for, so that the job has gone on when the link is healed.
CUT_SECONDS = 8.0
# A link that is cut for less may cost the ranks of its host, or nothing.
SHORT_CUTS = (0.5, 2.0)
# Seconds for which a slow link, a full disk, or a rank without descriptors or memory, hinders the recovery from a loss.
HINDERED_SECONDS = (0.5, 3.0)
FLAP_SECONDS = 5.0
# Until another node comes for one that was lost; between the notice that a node or an executor will go, and its end.
NODE_SECONDS = 3.0
CLOCK_SECONDS = (-86400.0, -3600.0, -1.0, 1.0, 3600.0, 86400.0)
DRIVERS = {"driver", "JVM"}
# A kind that lasts, and what ends it.
ENDS = {
    "stop": "continue",
    "cut": "heal",
    "slow": "hasten",
    "exhaust": "kill",
    "starve": "kill",
    "fill": "empty",
    "flap": "settle",
    "halt": "resume",
}
# Kinds that take no rank away, even if one has to do with it.
SPARING = {"offer", "newcomer", "slow", "fill", "flap", "halt", "clock", "all", *DRIVERS}
NAMELESS = {"newcomer", "all", *DRIVERS}
# After these a job may end, if it says so.
FATAL = {"memory", "starve", "error", "all"}


@dataclass(frozen=True)
class Blow:
    """One thing that happens to a job, ``at`` so many seconds after the beginning of the event.

    ``kind``: ``kill``, ``guard`` (its parent process is killed), ``task`` or ``executor`` (that of Spark is killed),
    ``stop`` (for ``seconds``) or ``drain`` (a notice to it, or to its node or executor, which ends after ``seconds``;
    another one comes) of the rank ``target``; ``exhaust`` (it gets no new descriptor any more, and is killed after
    ``seconds`` if the job has not replaced it) and ``starve`` (the same with memory); ``slow`` (the link to its host,
    for ``seconds``); ``agent`` (the one of its host is killed), ``cut`` (that link, for ``seconds``) or ``node`` (that
    of Ray is killed; another one comes after ``seconds``), and ``beside`` are the other ranks of this host;
    ``newcomer``: the next worker that comes is killed before it trains; ``offer``: the hosts have ``target`` slots;
    ``flap``: for ``seconds`` the discovery fails, finds nothing, or other slots each time; ``fill``: the disk is full
    for ``seconds``; ``halt``: the driver is stopped for ``seconds``; ``driver`` or ``JVM`` (that of Spark's driver):
    it is killed; ``all``: all ranks are killed at once.
    """

    kind: str
    target: int = 0
    at: float = 0.0
    seconds: float = 0.0
    beside: tuple[int, ...] = ()

    @property
    def is_lasting(self):
        """Whether ranks are without answer for so long that they are lost."""
        return {"stop": LONG_SECONDS, "cut": CUT_SECONDS}.get(self.kind, 0.0) <= self.seconds

    @property
    def removes(self):
        """The ranks that are no members of the next world."""
        return (self.target, *self.beside) if self.is_lasting and self.kind not in SPARING else ()

    @property
    def ends_first(self):
        """Whether its end comes before the job must have gone on."""
        return self.kind in {"exhaust", "starve"} or bool(self.seconds and not self.removes)

    def __str__(self):
        late = f" after {self.at:.2f} s" if self.at else ""
        seconds = f" for {self.seconds:g} s" if self.seconds else ""
        if self.kind == "offer":
            return f"offer {self.target} slots{late}"
        if self.kind in NAMELESS:
            return f"kill the {self.kind}{late}".replace("the all", "all ranks")
        if self.kind in {"fill", "flap", "halt"}:
            return f"{self.kind}{seconds}{late}"
        ranks = ", ".join(map(str, (self.target, *self.beside)))
        return f"{self.kind} rank {ranks}{seconds}{late}"


@dataclass(frozen=True)
class Ambush:
    """What happens to the first ``count`` processes that come by ``point``, but never to the rank ``spared``.

    ``kind`` is one of those of :class:`Blow`, or ``memory`` (a MemoryError), ``error`` (an exception of the user), or
    ``clock`` (its time of day changes by ``seconds``). If it is ``late``, the trap is laid when the job has gone on
    after the blows of its event, and before them otherwise.
    """

    kind: str
    point: str
    spared: int = 0
    seconds: float = 0.0
    count: int = 1
    late: bool = False

    @property
    def removes(self):
        """Whether those that it hits are no members of the world after it."""
        return self.kind in {"kill", "guard", "drain", "exhaust", "starve"}

    @property
    def is_of_driver(self):
        """Whether the driver comes by."""
        return points.is_of_driver(self.point)

    def __str__(self):
        seconds = f" for {self.seconds:g} s" if self.seconds else ""
        number = "" if self.count == 1 else f" {self.count} times"
        return f"{self.kind} {self.point}{seconds}{number}"


@dataclass(frozen=True)
class Repertoire:
    """The events that a job may meet: ``hits`` to one rank; ``host``, each with its seconds, to all ranks of a host.

    ``notice``: the seconds of a drain that hits one rank; ``hindrances``: what may make the recovery from a loss hard;
    ``drivers``: what may be killed of the driver; ``ambushes``: what may happen to a rank at a named point;
    ``longest_halt``: the seconds for which the driver may be stopped: an agent that hears nothing of it ends its ranks.
    """

    hits: tuple[str, ...] = ("kill", "kill", "guard", "drain")
    host: tuple[tuple[str, float], ...] = ()
    notice: float = 0.0
    hindrances: tuple[str, ...] = ()
    offers: bool = True
    drivers: tuple[str, ...] = ("driver",)
    ambushes: tuple[str, ...] = ("kill", "kill", "guard", "drain", "stop", "exhaust", "starve", "clock", "memory")
    longest_halt: float = max(STOP_SECONDS)


# Less than a silent connection is kept for.
SHORT_HALT = 2.0
PROCESSES = Repertoire(hindrances=("exhaust", "starve"))
TWO_HOSTS = replace(
    PROCESSES,
    host=(("agent", 0.0), ("cut", CUT_SECONDS), *(("cut", seconds) for seconds in SHORT_CUTS), ("slow", NODE_SECONDS)),
    hindrances=("exhaust", "starve", "slow"),
    longest_halt=SHORT_HALT,
)
WITHOUT_NOTICE = ("kill", "kill", "stop", "exhaust", "starve", "clock", "memory")
# Nodes and executors drain, and never a rank by itself: nothing here changes the slots of a host, so the slot of a rank
# that left would stay empty.
NODES = Repertoire(
    hits=("kill",),
    host=(("node", NODE_SECONDS), ("drain", NODE_SECONDS)),
    offers=False,
    drivers=("driver",) * 3,
    ambushes=WITHOUT_NOTICE,
)
EXECUTORS = Repertoire(
    hits=("kill", "task", "executor", "drain"),
    notice=NODE_SECONDS,
    offers=False,
    drivers=("driver", "JVM") * 2,
    ambushes=WITHOUT_NOTICE,
    longest_halt=SHORT_HALT,
)


def draw(random, size, most, repertoire=PROCESSES, remote=()):
    """A random event for a job of ``size`` ranks, which may have ``most``; ``remote`` are on another host.

    Blows come first, and at most one ambush. At least one rank is left that nothing happens to: it keeps the state of
    the training.
    """
    if size == 1:
        return (Blow("offer", most),)
    kinds = {
        "single": 5,
        "offer": 1.5 * repertoire.offers,
        "flap": 0.5 * repertoire.offers,
        "stop": 2,
        "halt": 0.7,
        "driver": 0.3 * len(repertoire.drivers),
        "end": 0.3 * len(repertoire.drivers),
        "newcomer": 1,
        "step": 3,
    }
    pairs = {"two": 3, "during": 3, "hindered": 2 * bool(repertoire.hindrances), "loss": 6, "growth": 3}
    hosts = {"host": 3} if repertoire.host and 0 < len(remote) < size else {}
    weights = {**kinds, **(pairs if size > 2 else {}), **hosts}
    kind = random.choices([*weights], [*weights.values()])[0]
    return Draw(random, size, most, repertoire, remote).event(kind)


def draw_end(random, size, repertoire):
    """The fault that comes while the training ends, or None."""
    kinds = ("kill", "stop", "clock", "memory")
    if random.random() < 0.4:
        return None
    point = random.choice(points.names(points.OF_RANKS, points.END) + points.names(points.OF_DRIVERS, points.END))
    kind, of_driver = random.choice(kinds), points.is_of_driver(point)
    seconds = _seconds(random, kind)
    if kind == "stop" and of_driver:
        seconds = min(seconds, repertoire.longest_halt)
    return Ambush(kind, point, random.randrange(size), seconds, 1 if of_driver else random.choice([1, 1, 2]))


def _seconds(random, kind):
    chosen = {"stop": (1.0, 2.0, 6.0, LONG_SECONDS), "clock": CLOCK_SECONDS}
    hindered = dict.fromkeys(("exhaust", "starve"), HINDERED_SECONDS)
    return random.choice({**chosen, **hindered}.get(kind, (0.0,)))


@dataclass(frozen=True)
class Draw:
    """One draw of :func:`draw`."""

    random: Random
    size: int
    most: int
    repertoire: Repertoire
    remote: tuple[int, ...]

    def event(self, kind):
        """An event of ``kind``."""
        return getattr(self, f"_{kind}")()

    def _hit(self):
        """A blow that lacks its target."""
        kind = self.random.choice(self.repertoire.hits)
        return partial(Blow, kind, seconds=self.repertoire.notice * (kind == "drain"))

    def _single(self):
        return (self._hit()(self.random.randrange(self.size)),)

    def _host(self):
        """All ranks of a host at once."""
        first, *beside = self.remote
        kind, seconds = self.random.choice(self.repertoire.host)
        return (Blow(kind, first, seconds=seconds, beside=tuple(beside)),)

    def _stop(self):
        return (Blow("stop", self.random.randrange(self.size), seconds=self.random.choice(STOP_SECONDS)),)

    def _halt(self):
        """The driver is stopped, alone or while the ranks lose one."""
        halt = Blow("halt", seconds=min(self.random.choice(STOP_SECONDS), self.repertoire.longest_halt))
        return (halt, self._hit()(0, 0.1)) if self.random.random() < 0.5 else (halt,)

    def _offer(self):
        return (Blow("offer", self.random.randint(1, self.most)),)

    def _flap(self):
        """The job may have one rank only meanwhile, so that another loss has to come before."""
        flap = Blow("flap", seconds=FLAP_SECONDS)
        return (*self._single(), flap) if self.random.random() < 0.5 else (flap,)

    def _two(self):
        """Two ranks at once; or one and another number of slots."""
        first, second = self.random.sample(range(self.size), 2)
        others = [self._hit()(second), Blow("offer", self.random.randint(2, self.most))]
        other = self.random.choice(others if self.repertoire.offers else others[:1])
        return self._hit()(first), other

    def _during(self):
        """Another rank while the others recover from the loss of the first, or the same one once more."""
        first, second = self.random.sample(range(self.size), 2)
        at = round(self.random.uniform(0.0, RECOVERY_SECONDS), 2)
        again = self.random.choice([self._hit()(second, at), Blow("kill", first, at)])
        return self._hit()(first), again

    def _hindered(self):
        """The loss of a rank, while another one has no descriptor or no memory, the disk is full, or a link is slow."""
        first, second = self.random.sample(range(self.size), 2)
        kind, seconds = self.random.choice(self.repertoire.hindrances), self.random.choice(HINDERED_SECONDS)
        return Blow(kind, second, seconds=seconds), Blow("kill", first)

    def _newcomer(self):
        return Blow("kill", self.random.randrange(self.size)), Blow("newcomer")

    def _driver(self):
        return (Blow(self.random.choice(self.repertoire.drivers)),)

    def _end(self):
        """The faults that no job survives."""
        step = points.names(points.OF_RANKS, points.STEP)
        return self.random.choice([(Blow("all"),), (Ambush("error", self.random.choice(step), -1),)])

    # Ambushes.

    def _step(self):
        """At a point of each step, where nothing has happened before."""
        names = points.names(points.OF_RANKS, points.STEP)
        return (self._ambush(names, self.random.randrange(self.size), self.size - 1),)

    def _loss(self):
        """At a point of the recovery from a loss, or of the departure of a rank."""
        first, spared = self.random.sample(range(self.size), 2)
        if "drain" in self.repertoire.ambushes and self.random.random() < 0.2:
            names = points.names(points.OF_RANKS, points.LEAVE)
            return Blow("drain", first), Ambush("kill", self.random.choice(names), spared)
        return Blow("kill", first), self._ambush(self._names(points.LOSS, points.CHANGE), spared, self.size - 2)

    def _growth(self):
        """At a point on the way to a larger world."""
        first, spared = self.random.sample(range(self.size), 2)
        names = self._names(points.GROW) * 2 + self._names(points.CHANGE)
        return Blow("kill", first), replace(self._ambush(names, spared, self.size - 2), late=True)

    def _names(self, *moments):
        return points.names(points.OF_RANKS, *moments) + points.names(points.OF_DRIVERS, *moments)

    def _ambush(self, names, spared, most):
        point = self.random.choice(names)
        kinds = self.repertoire.ambushes
        if points.is_of_driver(point):
            kinds = ("stop", *({"clock", "memory"} & set(kinds)), *self.repertoire.drivers[:1])
        kind = self.random.choice(sorted(kinds))
        seconds = _seconds(self.random, kind)
        if kind == "stop" and points.is_of_driver(point):
            seconds = min(seconds, self.repertoire.longest_halt)
        count = 2 if most > 1 and kind in {"kill", "stop", "clock"} and self.random.random() < 0.3 else 1
        return Ambush(kind.replace("driver", "kill"), point, spared, seconds, count)
