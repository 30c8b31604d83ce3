"""Pure: the random events of a campaign."""

from dataclasses import dataclass
from functools import partial
from random import Random

LONG_SECONDS = 10.0
# As long as the recovery from a loss takes at most, so that a second event falls into it, or shortly after it.
RECOVERY_SECONDS = 0.3
# Longer than a silent host is waited for, so that the job has gone on when the link is healed.
CUT_SECONDS = 8.0
# Seconds for which a slow link, or a rank without descriptors, hinders the recovery from a loss.
HINDERED_SECONDS = (0.5, 3.0)
# Until another node comes for one that was lost; between the notice that a node or an executor will go, and its end.
NODE_SECONDS = 3.0
DRIVERS = {"driver", "JVM"}
# A kind that lasts, and what ends it.
ENDS = {"stop": "continue", "cut": "heal", "slow": "hasten", "exhaust": "kill"}


@dataclass(frozen=True)
class Blow:
    """One thing that happens to a job, ``at`` so many seconds after the beginning of the event.

    ``kind``: ``kill``, ``guard`` (its parent process is killed), ``task`` or ``executor`` (that of Spark is killed),
    ``stop`` (for ``seconds``) or ``drain`` (a notice to it, or to its node or executor, which ends after ``seconds``;
    another one comes) of the rank ``target``; ``exhaust`` (it gets no new descriptor any more, and is killed after
    ``seconds`` if the job has not replaced it); ``slow`` (the link to its host, for ``seconds``); ``agent`` (the one of
    its host is killed), ``cut`` (that link, for ``seconds``) or ``node`` (that of Ray is killed; another one comes
    after ``seconds``), and ``beside`` are the other ranks of this host; ``newcomer``: the next worker that comes is
    killed before it trains; ``offer``: the hosts have ``target`` slots; ``driver`` or ``JVM`` (that of Spark's driver):
    it is killed.
    """

    kind: str
    target: int = 0
    at: float = 0.0
    seconds: float = 0.0
    beside: tuple[int, ...] = ()

    @property
    def removes(self):
        """The ranks that are no members of the next world."""
        spared = {"offer", "newcomer", "slow", *DRIVERS}
        lost = self.kind != "stop" or self.seconds >= LONG_SECONDS
        return (self.target, *self.beside) if lost and self.kind not in spared else ()

    @property
    def ends_first(self):
        """Whether its end comes before the job must have gone on."""
        return self.kind == "exhaust" or bool(self.seconds and not self.removes)

    def __str__(self):
        late = f" after {self.at:.2f} s" if self.at else ""
        if self.kind == "offer":
            return f"offer {self.target} slots{late}"
        if self.kind in {"newcomer", *DRIVERS}:
            return f"kill the {self.kind}{late}"
        seconds = f" for {self.seconds:g} s" if self.seconds else ""
        ranks = ", ".join(map(str, (self.target, *self.beside)))
        return f"{self.kind} rank {ranks}{seconds}{late}"


@dataclass(frozen=True)
class Repertoire:
    """The events that a job may meet: ``hits`` to one rank; ``host``, each with its seconds, to all ranks of a host.

    ``notice``: the seconds of a drain that hits one rank; ``hindrances``: what may make the recovery from a loss hard;
    ``drivers``: what may be killed of the driver.
    """

    hits: tuple[str, ...] = ("kill", "kill", "guard", "drain")
    host: tuple[tuple[str, float], ...] = ()
    notice: float = 0.0
    hindrances: tuple[str, ...] = ()
    offers: bool = True
    drivers: tuple[str, ...] = ("driver",)


PROCESSES = Repertoire(hindrances=("exhaust",))
TWO_HOSTS = Repertoire(host=(("agent", 0.0), ("cut", CUT_SECONDS)), hindrances=("exhaust", "slow"))
# Nodes and executors drain, and never a rank by itself: nothing here changes the slots of a host, so the slot of a rank
# that left would stay empty.
NODES = Repertoire(
    hits=("kill",),
    host=(("node", NODE_SECONDS), ("drain", NODE_SECONDS)),
    offers=False,
    drivers=("driver",) * 3,
)
EXECUTORS = Repertoire(
    hits=("kill", "task", "executor", "drain"), notice=NODE_SECONDS, offers=False, drivers=("driver", "JVM") * 2
)


def draw(random, size, most, repertoire=PROCESSES, remote=()):
    """The blows of an event against a job of ``size`` ranks, which may have ``most``; ``remote`` are on another host.

    At least one rank is left that nothing happens to: it keeps the state of the training.
    """
    if size == 1:
        return (Blow("offer", most),)
    kinds = {
        "single": 6,
        "offer": 2 * repertoire.offers,
        "stop": 1,
        "driver": 0.3 * len(repertoire.drivers),
        "newcomer": 1,
    }
    pairs = {"two": 3, "during": 3, "hindered": 2 * bool(repertoire.hindrances)} if size > 2 else {}
    hosts = {"host": 3} if repertoire.host and 0 < len(remote) < size else {}
    weights = {**kinds, **pairs, **hosts}
    kind = random.choices([*weights], [*weights.values()])[0]
    return Draw(random, size, most, repertoire, remote).blows(kind)


@dataclass(frozen=True)
class Draw:
    """One draw of :func:`draw`."""

    random: Random
    size: int
    most: int
    repertoire: Repertoire
    remote: tuple[int, ...]

    def blows(self, kind):
        """The blows of an event of ``kind``."""
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
        seconds = self.random.choice([0.3, 1.0, LONG_SECONDS, LONG_SECONDS])
        return (Blow("stop", self.random.randrange(self.size), seconds=seconds),)

    def _offer(self):
        return (Blow("offer", self.random.randint(1, self.most)),)

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
        """The loss of a rank, while another one has no descriptor, or while the link between the hosts is slow."""
        first, second = self.random.sample(range(self.size), 2)
        kind, seconds = self.random.choice(self.repertoire.hindrances), self.random.choice(HINDERED_SECONDS)
        return Blow(kind, second, seconds=seconds), Blow("kill", first)

    def _newcomer(self):
        return Blow("kill", self.random.randrange(self.size)), Blow("newcomer")

    def _driver(self):
        return (Blow(self.random.choice(self.repertoire.drivers)),)
