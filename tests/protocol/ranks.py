"""The ranks of an elastic job beside the real driver: how worlds form, train, fail and change. Each state is a tuple.

A collective needs all ranks of its world. A rank may have its result when all have come to it, and may fail in it when
one of them is lost, or has left the world: so some may have the result of a step, and others not.
"""

from dataclasses import dataclass
from typing import NamedTuple

from executors.job.worlds import Report
from hvd_cluster.elastic.recovery import StateReport, decide

AGREE, SHARE, MEET, STEP = range(4)
"""The collectives of a world, in their order: ranks connect and agree on a state, give it to each other, meet, step."""


class Rank(NamedTuple):
    """A worker. ``phase`` is one of

    * imports, waits: a newcomer until it has its first world
    * runs: in the collective ``op`` of the world ``round``
    * plans: it has left its world together with the others, and waits for the world ``op``
    * failed: a collective of ``round`` has failed, where the ranks ``lost`` had ended; ``has_told`` the driver so
    * finishes: its work is done
    * leaves, ends: it has heard of a world without it, and has told so
    * done, dead, gone: its process has ended: with its work done, killed, or because it had to go

    ``heard`` counts the worlds that it knows of. ``commit`` is its last one, None for a newcomer; ``is_exact``: whether
    its values are those of that commit. ``skips``: whether it has left the world before by plan, and needs no sync.
    ``reached`` has the last collective to which it has come in each world.
    """

    name: str
    phase: str = "imports"
    round: int = -1
    op: int = 0
    heard: int = 0
    commit: int | None = None
    is_exact: bool = False
    skips: bool = False
    has_told: bool = False
    lost: tuple[str, ...] = ()
    reached: tuple[tuple[int, int], ...] = ()

    @property
    def is_alive(self):
        return self.phase not in ("done", "dead", "gone")

    def reached_in(self, round):
        return dict(self.reached).get(round, -1)

    def at(self, round, op):
        """In the collective ``op`` of ``round``."""
        reached = dict(self.reached) | {round: op}
        return self._replace(phase="runs", round=round, op=op, reached=tuple(sorted(reached.items())))


class Job(NamedTuple):
    """A state of everything. ``messages`` are on their way to the driver, whose state has the number ``driver``.

    ``worlds`` are those that were published. ``agreed`` has for each world the recovery that its ranks have found, or
    None where they need none. ``due`` has the world to which all change after a step, by world and step. ``floor`` is
    the last commit that all ranks of a world had.
    """

    driver: int
    ranks: tuple[Rank, ...] = ()
    messages: tuple = ()
    worlds: tuple = ()
    agreed: tuple = ()
    due: tuple = ()
    floor: int = 0
    end: str | None = ""
    """"" while the job goes on, None for success, or the error."""
    faults: int = 0
    changes: tuple = ()

    def rank(self, name):
        return next(rank for rank in self.ranks if rank.name == name)

    def having(self, rank):
        """With this ``rank`` in the place of the one of its name."""
        return self._replace(ranks=tuple(rank if each.name == rank.name else each for each in self.ranks))

    def sending(self, *messages):
        return self._replace(messages=tuple(sorted((*self.messages, *messages), key=repr)))

    def members(self, round):
        return [self.rank(name) for name, _ in self.worlds[round].workers]


class Violation(AssertionError):
    """A rule of the protocol is broken."""


@dataclass(frozen=True)
class Rules:
    """Rules that the ranks follow; a search finds a fault where one of them is left out.

    ``agree_on_skips``: they tell each other whether they need a sync. ``meet``: rank 0 tells that a world has formed
    when all have the state.
    """

    agree_on_skips: bool = True
    meet: bool = True


class Protocol:
    """The events that are possible in each state of a job of ``drivers``, whose ranks make ``steps`` steps."""

    def __init__(self, drivers, steps, rules=None):
        self.drivers = drivers
        self.steps = steps
        self._rules = rules or Rules()

    def first(self, slots, faults, changes):
        """The state in which the driver has found the hosts with ``slots``."""
        return self._told(Job(0, faults=faults, changes=changes), ("found", tuple(sorted(slots.items()))))

    def training(self, slots, faults, changes):
        """The state in which all ranks of the first world have the state of the training."""
        job = self.first(slots, 0, ())
        while job.messages or not all(rank.op == STEP for rank in job.ranks):
            names = dict(self.followers(job))
            job = next(state for name, state in names.items() if f"collective {STEP}" not in name)
        return job._replace(faults=faults, changes=changes)

    # The driver.

    def _told(self, job, event):
        """The state after the driver has heard of ``event``."""
        number, outputs = self.drivers.after(job.driver, event)
        job = job._replace(driver=number)
        for kind, *values in outputs:
            job = getattr(self, f"_driver_{kind}")(job, *values)
        return job

    def _driver_start(self, job, name, _):
        return job._replace(ranks=(*job.ranks, Rank(name, heard=len(job.worlds))))

    def _driver_stop(self, job, name):
        rank = job.rank(name)
        return job.having(rank._replace(phase="dead")).sending(("killed", name)) if rank.is_alive else job

    def _driver_world(self, job, world):
        assert world.round == len(job.worlds)
        return job._replace(worlds=(*job.worlds, world))

    def _driver_over(self, job):
        return job

    def _driver_end(self, job, error):
        return job._replace(end=error)

    # All that may happen next: pairs of a name and the next state.

    def followers(self, job):
        """Those without a fault of the surroundings, of which slow ones come only where there are no others."""
        found = list(self._quick(job))
        if not found:
            found = list(self._slow(job))
        return found

    def _quick(self, job):
        for message in dict.fromkeys(job.messages):
            rest = list(job.messages)
            rest.remove(message)
            yield f"driver: {message[:2]}", self._told(job._replace(messages=tuple(rest)), message)
        if self.drivers.alarm(job.driver):
            yield "alarm", self._told(job, ("ring",))
        for rank in job.ranks:
            yield from getattr(self, f"_{rank.phase}")(job, rank)

    def _slow(self, job):
        for rank in job.ranks:
            yield from self._late(job, rank)
        if self.drivers.alarm(job.driver) is not None:
            yield "late alarm", self._told(job, ("ring",))

    def faults(self, job):
        """Kills and planned changes, with the state after each."""
        for rank in job.ranks if job.faults else ():
            if rank.is_alive:
                killed = job._replace(faults=job.faults - 1).having(rank._replace(phase="dead"))
                yield f"kill {rank.name}", killed.sending(("killed", rank.name))
                unsent = self._reports_of(job, rank)
                if unsent:
                    kept = tuple(message for message in job.messages if message not in unsent)
                    silent = killed._replace(messages=kept).sending(("killed", rank.name))
                    yield f"kill {rank.name} before its reports", silent
        if job.changes:
            kind, value = job.changes[0]
            rest = job._replace(changes=job.changes[1:])
            if kind == "found":
                yield f"hosts {dict(value)}", self._told(rest, ("found", value))
            elif any(rank.name == value and rank.is_alive for rank in job.ranks):
                yield f"notice to {value}", self._told(rest, ("drain", value))

    # A rank.

    def _imports(self, job, rank):
        ready = self._told(job.having(rank._replace(phase="waits")), ("up", rank.name))
        initial = job.worlds and rank.name in dict(job.worlds[0].workers)
        if initial:
            yield f"{rank.name} starts", self._go(ready, rank, job.worlds[0], rank.heard or 1)
        else:
            yield f"{rank.name} is ready", ready.sending(("report", rank.name, Report("ready")))

    def _waits(self, job, rank):
        yield from self._hears(job, rank)
        world = self._newest(job, rank)
        if world is not None and rank.name in dict(world.workers):
            yield f"{rank.name} comes into world {world.round}", self._go(job, rank, world, rank.heard)

    def _hears(self, job, rank):
        if rank.heard < len(job.worlds):
            yield f"{rank.name} hears of world {rank.heard}", job.having(rank._replace(heard=rank.heard + 1))

    def _newest(self, job, rank):
        return job.worlds[rank.heard - 1] if rank.heard else None

    def _go(self, job, rank, world, heard):
        """To ``world``, or away, if it is without the rank."""
        rank = rank._replace(heard=heard, has_told=False, lost=())
        if rank.name not in dict(world.workers):
            return job.having(rank._replace(phase="leaves"))
        return self._arrived(job.having(rank.at(world.round, AGREE)), rank.name)

    def _arrived(self, job, name):
        """The rank has come to its collective: what all tell each other there is known when the last one has come."""
        rank = job.rank(name)
        members = job.members(rank.round)
        if rank.op == AGREE and all(each.reached_in(rank.round) >= AGREE for each in members):
            job = job._replace(agreed=(*job.agreed, (rank.round, self._recovery(job, members))))
        newest = self._newest(job, rank)
        if rank.op >= STEP and members[0].name == name and newest.round > rank.round:
            job = job._replace(due=(*job.due, ((rank.round, rank.op), newest.round)))
        return job

    def _recovery(self, job, members):
        if all(each.skips for each in members):
            return None
        reports = [
            StateReport(number, each.commit, each.is_exact, each.commit, None, False, True, "", "")
            for number, each in enumerate(members)
        ]
        found = decide(reports)
        is_new = found.present and self.drivers.state(job.driver).has_formed  # a job that has begun begins again
        has_it = any(each.is_alive and (each.commit or 0) >= job.floor for each in job.ranks)
        if found.commit < job.floor and (is_new or has_it):
            raise Violation(f"world {members[0].round} begins with commit {found.commit}, but {job.floor} was there")
        if len({each.skips for each in members}) > 1 and not self._rules.agree_on_skips:
            raise Violation("some ranks skip the sync, and others do not")
        return found

    def _runs(self, job, rank):
        yield from self._hears(job, rank)
        members = job.members(rank.round)
        if all(each.reached_in(rank.round) >= rank.op for each in members):
            yield f"{rank.name} has collective {rank.op} of world {rank.round}", self._completed(job, rank)
        lost = tuple(each.name for each in members if each.phase == "dead")
        if any(self._breaks(each, rank.round, rank.op) for each in members):
            failed = rank._replace(phase="failed", lost=lost)
            told = job.having(failed)
            if lost:
                ranks = tuple(place for place, each in enumerate(members) if each.name in lost)
                told = told.sending(("report", rank.name, Report("lost", rank.round, ranks)))
            yield f"{rank.name} fails in collective {rank.op} of world {rank.round}", told
        if any(not world.planned for world in job.worlds[rank.round + 1 : rank.heard]):
            yield f"{rank.name} is cut off in world {rank.round}", job.having(rank._replace(phase="failed", lost=()))

    def _breaks(self, member, round, op):
        """Whether the end of ``member``, or of its connections, may reach others before the result of ``op``."""
        if member.phase in ("imports", "waits", "finishes", "done"):
            return False
        if member.phase in ("dead", "leaves", "ends", "gone"):
            return member.phase == "dead" or member.reached_in(round) <= op
        if member.round <= round:
            return (member.phase, member.round) == ("failed", round)
        return member.reached_in(round) <= op

    def _completed(self, job, rank):
        if rank.op == AGREE:
            return self._after_agreement(job, rank, dict(job.agreed)[rank.round])
        if rank.op == SHARE:
            found = dict(job.agreed)[rank.round]
            ready = rank._replace(commit=found.commit, is_exact=True)
            return self._next(job, ready, MEET) if self._rules.meet else self._trains(job, ready)
        return self._trains(job, rank) if rank.op == MEET else self._after_step(job, rank)

    def _next(self, job, rank, op):
        return self._arrived(job.having(rank.at(rank.round, op)), rank.name)

    def _after_agreement(self, job, rank, found):
        if found is None:
            return self._trains(job, rank)
        number = job.members(rank.round).index(job.rank(rank.name))
        if found.receivers:
            return self._next(job, rank._replace(is_exact=rank.is_exact and number not in found.receivers), SHARE)
        return self._trains(job, rank._replace(commit=found.commit, is_exact=True))

    def _trains(self, job, rank):
        """All ranks have the state, as far as this one knows."""
        rank = rank._replace(skips=False)
        job = job.having(rank)
        if job.members(rank.round)[0].name == rank.name:
            job = job.sending(("report", rank.name, Report("formed", rank.round)))
        if rank.commit >= self.steps:
            return self._finished(job, rank)
        return self._next(job, rank, STEP)

    def _after_step(self, job, rank):
        round, op = rank.round, rank.op
        rank = rank._replace(commit=rank.commit + 1).at(round, op + 1)
        job = job.having(rank)
        members = job.members(round)
        if all(each.reached_in(round) > op for each in members):
            job = job._replace(floor=max(job.floor, rank.commit))
        due = dict(job.due).get((round, op), 0)
        if len(members) == 1:
            due = self._newest(job, rank).round
        if due > round:
            return job.having(rank._replace(phase="plans", op=due))
        if rank.commit >= self.steps:
            return self._finished(job, rank)
        return self._arrived(job, rank.name)

    def _finished(self, job, rank):
        return job.having(rank._replace(phase="finishes"))

    def _finishes(self, job, rank):
        yield from self._exit(job, rank, "done")

    def _exit(self, job, rank, phase):
        """A process ends when the driver has taken its reports."""
        if not self._reports_of(job, rank):
            yield f"{rank.name} ends", job.having(rank._replace(phase=phase)).sending(("done", rank.name))

    def _reports_of(self, job, rank):
        return [message for message in job.messages if message[:2] == ("report", rank.name)]

    def _plans(self, job, rank):
        yield from self._hears(job, rank)
        world = self._newest(job, rank)
        if world.round >= rank.op:
            before = dict(job.worlds[rank.round].workers)
            together = world.planned and all(name in before for name, _ in world.workers)
            yield (
                f"{rank.name} changes to world {world.round}",
                self._go(job, rank._replace(skips=together), world, rank.heard),
            )

    def _failed(self, job, rank):
        yield from self._hears(job, rank)
        world, rank = self._newest(job, rank), rank._replace(skips=False)
        replaced = any(not each.planned for each in job.worlds[rank.round + 1 : rank.heard])
        without = world.round > rank.round and not set(dict(world.workers)) & set(rank.lost)
        if replaced or (rank.has_told and without):
            yield f"{rank.name} goes on to world {world.round}", self._go(job, rank, world, rank.heard)
        elif not rank.has_told:
            members = job.members(rank.round)
            ranks = tuple(place for place, each in enumerate(members) if each.name in rank.lost)
            told = job.having(rank._replace(has_told=True))
            yield (
                f"{rank.name} tells of its failure",
                told.sending(("report", rank.name, Report("failed", rank.round, ranks))),
            )

    def _leaves(self, job, rank):
        left = job.having(rank._replace(phase="ends"))
        yield f"{rank.name} leaves", self._told(left, ("report", rank.name, Report("leaving")))

    def _ends(self, job, rank):
        yield from self._exit(job, rank, "gone")

    def _ended(self, job, rank):
        return ()

    _done = _dead = _gone = _ended

    def _late(self, job, rank):
        """A rank waits for another one that does not come, for longer than its patience."""
        newest = self._newest(job, rank)
        is_patient = rank.commit is None and newest is not None and newest.round <= rank.round and rank.round > 0
        if rank.phase == "runs" and rank.op == AGREE and not is_patient:
            yield (
                f"{rank.name} has waited for too long in world {rank.round}",
                job.having(rank._replace(phase="failed")),
            )
