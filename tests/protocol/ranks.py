"""The ranks of an elastic job beside the real driver: how worlds form, train, fail and change. Each state is a tuple.

A collective needs all ranks of its world. A rank may have its result when all have come to it, and may fail in it when
one of them is lost, or has left the world: so some may have the result of a step, and others not.
"""

from dataclasses import dataclass
from typing import NamedTuple

from hvd_cluster.elastic.recovery import StateReport, decide

AGREE, SHARE, MEET, STEP = range(4)
"""The collectives of a world, in their order: ranks connect and agree on a state, give it to each other, meet, step."""

SENT, TOLD, SILENT, UNSENT = range(4)
"""The kinds of entries of an outbox."""


class Rank(NamedTuple):
    """A worker. ``phase`` is one of

    * imports, waits: a newcomer until it has its first world
    * runs: in the collective ``op`` of the world ``round``
    * plans: it has left its world together with the others, and waits for the world ``op``
    * failed: a collective of ``round`` has failed, where the ranks ``lost`` had ended; ``has_told`` the driver so
    * finishes: its work is done
    * leaves, ends: it has heard of a world without it, and has told so
    * done, dead, gone: its process has ended: with its work done, killed, or because it had to go; ``has_told``: the
      driver knows that

    ``heard`` counts the worlds that it knows of. ``commit`` is its last one, None for a newcomer; ``is_exact``: whether
    its values are those of that commit. ``skips``: whether it has left the world before by plan, and needs no sync.
    ``reached`` has the last collective to which it has come in each world, ``part`` is the last world in which it has
    trained.
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
    part: int = -1

    @property
    def is_alive(self):
        return self.phase not in ("done", "dead", "gone")

    def renamed(self, names):
        return self._replace(name=names.get(self.name, self.name), lost=renamed_in(self.lost, names))

    def reached_in(self, round):
        return dict(self.reached).get(round, -1)

    def at(self, round, op):
        """In the collective ``op`` of ``round``."""
        reached = dict(self.reached) | {round: op}
        return self._replace(phase="runs", round=round, op=op, reached=tuple(sorted(reached.items())))


def renamed_in(value, names):
    """A tuple, with new names for the strings in it."""
    if isinstance(value, tuple):
        return tuple(renamed_in(each, names) for each in value)
    return names.get(value, value) if isinstance(value, str) else value


class Members(NamedTuple):
    """Those of the world of ``round``: rank 0, and the others. Whether it is ``planned``."""

    round: int
    leader: str
    others: tuple[str, ...]
    planned: bool

    @property
    def names(self):
        return (self.leader, *self.others)

    def renamed(self, names):
        others = tuple(sorted(renamed_in(self.others, names)))
        return self._replace(leader=names.get(self.leader, self.leader), others=others)


class Job(NamedTuple):
    """The ranks, and what is true for all of them.

    ``worlds`` are those that were published. ``agreed`` has for each world the recovery that its ranks have found, or
    None where they need none. ``due`` has the world to which all change after a step, by world and step. ``floor`` is
    the last commit that all ranks of a world had. ``lost`` is the last world in which a rank had trained that was
    killed, and ``finished`` the last one in which a rank has done all steps: that repairs the losses in earlier ones.
    Whether the driver ``has_formed`` a world, as far as it knows, and whether a rank ``may_be_lost``, still.
    ``outbox`` has what happens at the driver because of the event that led here; see :class:`Protocol`.
    """

    ranks: tuple[Rank, ...] = ()
    worlds: tuple = ()
    agreed: tuple = ()
    due: tuple = ()
    floor: int = 0
    lost: int = -1
    finished: int = -1
    has_formed: bool = False
    may_be_lost: bool = False
    outbox: tuple = ()

    def rank(self, name):
        return next(rank for rank in self.ranks if rank.name == name)

    def having(self, rank):
        """With this ``rank`` in the place of the one of its name."""
        return self._replace(ranks=tuple([rank if each.name == rank.name else each for each in self.ranks]))

    def putting(self, kind, value):
        """With one more entry of the outbox."""
        return self._replace(outbox=(*self.outbox, (kind, value)))

    def sending(self, *message):
        return self.putting(SENT, message)

    def report(self, rank, kind, lost=()):
        """A message about the world of ``rank``, which has the number of worlds since then."""
        return "report", rank.name, kind, len(self.worlds) - 1 - rank.round, lost

    def renamed(self, names):
        """With new names of workers and hosts."""
        return self._replace(
            ranks=tuple(sorted(rank.renamed(names) for rank in self.ranks)),
            worlds=tuple(world and world.renamed(names) for world in self.worlds),
            agreed=tuple((*each[:2], tuple(sorted(renamed_in(each[2], names)))) for each in self.agreed),
            outbox=renamed_in(self.outbox, names),
        )

    def members(self, round):
        ranks = {rank.name: rank for rank in self.ranks}
        return [ranks[name] for name in self.worlds[round].names]

    def is_replaced(self, rank, heard):
        """Whether a rank that has heard of so many worlds knows of one that is not planned, after its own."""
        return any(not world.planned for world in self.worlds[rank.round + 1 : heard])

    def agreement(self, round):
        return next(each[1:] for each in self.agreed if each[0] == round)


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
    """The events that are possible in each state of the ranks, which make ``steps`` steps.

    What an event does at the driver is in the outbox of its job, in this order:

    * SENT: a message is on its way to the driver.
    * TOLD: the driver takes a message at once.
    * SILENT: only if no report of a rank is on its way.
    * UNSENT: the reports of a rank that are on their way are lost; only if there are any.

    If the states are reduced, some events are joined to others (Lipton's transactions). An event may be joined to a
    later one of the same rank if it commutes with all events of others between the two, and if no property sees it:

    * A rank hears of a world when it goes there. Nobody else sees the news that it has heard. Rank 0 hears of
      worlds at any time, as it tells the others when to change.
    * The driver takes the success of a rank, and the reports ``ready`` and ``failed``, when they are sent. Before that
      the rank waits, and nobody can tell whether it has sent them: the first two change nothing but the driver, and
      ``failed`` only sets an alarm, which rings between any two later events. A kill that takes such a report away is a
      kill before it was sent.
    * The driver does not hear that a rank is up: it would only give up on one that is not up for very long.
    * A rank that may fail is not cut off instead: the driver does nothing with the report of the failure then, since a
      later world is published, and the rank goes to that world in both cases.

    No joined event can repeat without another one between, so that none is put off for ever.
    """

    def __init__(self, steps, is_reduced=True, rules=None):
        self.steps = steps
        self.is_reduced = is_reduced
        self._rules = rules or Rules()

    # The driver.

    def _sent(self, job, *message):
        """The state after a rank has sent a ``message``."""
        at_once = self.is_reduced and (message[0] == "done" or message[2] in ("ready", "failed"))
        return job.putting(TOLD if at_once else SENT, message)

    def ordered(self, job, kind, *values):
        """The state after the driver has put out something."""
        return getattr(self, f"_driver_{kind}")(job, *values)

    def _driver_start(self, job, name, _):
        return job._replace(ranks=(*job.ranks, Rank(name, heard=len(job.worlds))))

    def _driver_stop(self, job, name):
        rank = next((rank for rank in job.ranks if rank.name == name and rank.is_alive), None)
        return job.having(rank._replace(phase="dead", has_told=False)).sending("killed", name) if rank else job

    def _driver_world(self, job, planned, leader, *others):
        members = Members(len(job.worlds), leader, tuple(sorted(others)), planned)
        return job._replace(worlds=(*job.worlds, members))

    def _driver_formed(self, job):
        return job._replace(has_formed=True)

    def _driver_knows(self, job, name):
        """Until then the driver may have a rank in a world that has ended."""
        ended = [rank for rank in job.ranks if rank.name == name]
        return job.having(ended[0]._replace(has_told=True)) if ended else job

    def _driver_end(self, job, error):
        """Nothing of the ranks matters any more."""
        if error is None and (job.finished < 0 or job.lost >= job.finished):
            raise Violation("success, though the end of a rank is lost, and nobody has done its work")
        return Job()

    # All that may happen next at the ranks: pairs of a name and the next state.

    def quick(self, job):
        """What may happen at any time."""
        for rank in job.ranks:
            yield from getattr(self, f"_{rank.phase}")(job, rank)

    def slow(self, job):
        """What happens only if nothing else can."""
        for rank in job.ranks:
            yield from self._late(job, rank)

    def kills(self, job, is_last):
        """No more may follow if it ``is_last``."""
        for rank in [rank for rank in job.ranks if rank.is_alive]:
            killed = self._killed(job, rank)._replace(may_be_lost=not is_last)
            yield f"kill {rank.name}", killed.sending("killed", rank.name)
            silent = killed.putting(UNSENT, rank.name)
            yield f"kill {rank.name} before its reports", silent.sending("killed", rank.name)

    def changes(self, job, kind, value):
        """Those of the plan."""
        if kind == "found":
            yield f"hosts {dict(value)}", job.putting(TOLD, ("found", value))
            return
        for rank in job.ranks:
            if rank.is_alive and value in ("", rank.name):
                yield f"notice to {rank.name}", job.putting(TOLD, ("drain", rank.name))

    def _killed(self, job, rank):
        part = -1 if rank.phase in ("leaves", "ends") else rank.part
        return job.having(rank._replace(phase="dead", has_told=False))._replace(lost=max(job.lost, part))

    # A rank.

    def _imports(self, job, rank):
        ready = job.having(rank._replace(phase="waits"))
        ready = ready if self.is_reduced else ready.putting(TOLD, ("up", rank.name))
        initial = job.worlds[0] and rank.name in job.worlds[0].names
        if initial:
            yield f"{rank.name} starts", self._go(ready, rank, job.worlds[0], rank.heard or 1)
        else:
            yield f"{rank.name} is ready", self._sent(ready, "report", rank.name, "ready", None, ())

    def _waits(self, job, rank):
        yield from self._hears(job, rank)
        for heard, world in self._heard(job, rank):
            if rank.name in world.names:
                yield f"{rank.name} comes into world {world.round}", self._go(job, rank, world, heard)

    def _hears(self, job, rank):
        if rank.heard < len(job.worlds) and not self.is_reduced:
            yield f"{rank.name} hears of world {rank.heard}", job.having(rank._replace(heard=rank.heard + 1))

    def _heard(self, job, rank):
        """The newest world of which it has heard; or, of which it may have heard when it goes there."""
        last = len(job.worlds) if self.is_reduced else rank.heard
        for heard in range(rank.heard, last + 1):
            if heard and job.worlds[heard - 1]:
                yield heard, job.worlds[heard - 1]

    def _newest(self, job, rank):
        return job.worlds[rank.heard - 1] if rank.heard else None

    def _go(self, job, rank, world, heard):
        """To ``world``, or away, if it is without the rank."""
        rank = rank._replace(heard=heard, has_told=False, lost=())
        if rank.name not in world.names:
            return job.having(rank._replace(phase="leaves"))
        return self._arrived(job.having(rank.at(world.round, AGREE)), rank.name)

    def _arrived(self, job, name):
        """The rank has come to its collective: what all tell each other there is known when the last one has come."""
        rank = job.rank(name)
        members = job.members(rank.round)
        if rank.op == AGREE and all(each.reached_in(rank.round) >= AGREE for each in members):
            job = job._replace(agreed=(*job.agreed, (rank.round, *self._recovery(job, rank.round))))
        newest = self._newest(job, rank)
        if rank.op >= STEP and members[0].name == name and newest.round > rank.round:
            job = job._replace(due=(*job.due, ((rank.round, rank.op), newest.round)))
        return job

    def _recovery(self, job, round):
        """The commit with which all go on, and who needs it; None where they need no sync."""
        members = job.members(round)
        if all(each.skips for each in members):
            return None, ()
        reports = [
            StateReport(number, each.commit, each.is_exact, each.commit, None, False, True, "", "")
            for number, each in enumerate(members)
        ]
        found = decide(reports)
        is_new = found.present and job.has_formed  # a job that has begun begins again
        has_it = any(
            each.is_alive and each.phase != "finishes" and (each.commit or 0) >= job.floor for each in job.ranks
        )
        if found.commit < job.floor and (is_new or has_it):
            raise Violation(f"world {round} begins with commit {found.commit}, but {job.floor} was there")
        if len({each.skips for each in members}) > 1 and not self._rules.agree_on_skips:
            raise Violation("some ranks skip the sync, and others do not")
        return found.commit, tuple(sorted(members[place].name for place in found.receivers))

    def _runs(self, job, rank):
        members = job.members(rank.round)
        if members[0].name == rank.name and rank.heard < len(job.worlds):
            yield f"{rank.name} hears of world {rank.heard}", job.having(rank._replace(heard=rank.heard + 1))
        elif not self.is_reduced:
            yield from self._hears(job, rank)
        if all(each.reached_in(rank.round) >= rank.op for each in members):
            yield f"{rank.name} has collective {rank.op} of world {rank.round}", self._completed(job, rank)
        yield from self._breakdowns(job, rank, members)

    def _breakdowns(self, job, rank, members):
        """It fails, or is cut off."""
        breaks = any(self._breaks(each, rank.round, rank.op) for each in members)
        heard = self._unplanned(job, rank)
        if breaks:
            lost = tuple(each.name for each in members if each.phase == "dead")
            told = job.having(rank._replace(phase="failed", lost=lost))
            told = told.sending(*job.report(rank, "lost", lost)) if lost else told
            yield f"{rank.name} fails in collective {rank.op} of world {rank.round}", told
        if heard and not (self.is_reduced and breaks):
            failed = rank._replace(phase="failed", lost=(), heard=heard)
            yield f"{rank.name} is cut off in world {rank.round}", job.having(failed)

    def _unplanned(self, job, rank):
        """How many worlds it has heard of when it has heard of one that is not planned; 0 if there is none."""
        if not self.is_reduced:
            return rank.heard if job.is_replaced(rank, rank.heard) else 0
        numbers = range(rank.heard, len(job.worlds) + 1)
        return next((heard for heard in numbers if job.is_replaced(rank, heard)), 0)

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
        if rank.op in (AGREE, SHARE):
            commit, receivers = job.agreement(rank.round)
        if rank.op == AGREE:
            return self._after_agreement(job, rank, commit, receivers)
        if rank.op == SHARE:
            ready = rank._replace(commit=commit, is_exact=True)
            return self._next(job, ready, MEET) if self._rules.meet else self._trains(job, ready)
        return self._trains(job, rank) if rank.op == MEET else self._after_step(job, rank)

    def _next(self, job, rank, op):
        return self._arrived(job.having(rank.at(rank.round, op)), rank.name)

    def _after_agreement(self, job, rank, commit, receivers):
        if commit is None:
            return self._trains(job, rank)
        if receivers:
            return self._next(job, rank._replace(is_exact=rank.is_exact and rank.name not in receivers), SHARE)
        return self._trains(job, rank._replace(commit=commit, is_exact=True))

    def _trains(self, job, rank):
        """All ranks have the state, as far as this one knows."""
        rank = rank._replace(skips=False, part=rank.round)
        job = job.having(rank)
        if job.members(rank.round)[0].name == rank.name:
            job = job.sending(*job.report(rank, "formed"))
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
        job = job._replace(finished=max(job.finished, rank.round))
        return job.having(rank._replace(phase="finishes"))

    def _finishes(self, job, rank):
        yield from self._exit(job, rank, "done")

    def _exit(self, job, rank, phase):
        """A process ends when the driver has taken its reports."""
        ended = job.having(rank._replace(phase=phase, has_told=False)).putting(SILENT, rank.name)
        yield f"{rank.name} ends", self._sent(ended, "done", rank.name)

    def _plans(self, job, rank):
        yield from self._hears(job, rank)
        before = set(job.worlds[rank.round].names)
        for heard, world in self._heard(job, rank):
            if world.round >= rank.op:
                ready = rank._replace(skips=world.planned and before.issuperset(world.names))
                yield f"{rank.name} changes to world {world.round}", self._go(job, ready, world, heard)

    def _failed(self, job, rank):
        yield from self._hears(job, rank)
        rank = rank._replace(skips=False)
        for heard, world in self._heard(job, rank):
            without = world.round > rank.round and not set(world.names) & set(rank.lost)
            if job.is_replaced(rank, heard) or (rank.has_told and without):
                yield f"{rank.name} goes on to world {world.round}", self._go(job, rank, world, heard)
        if not rank.has_told and not job.is_replaced(rank, rank.heard):
            told = job.having(rank._replace(has_told=True))
            sent = self._sent(told, *job.report(rank, "failed", rank.lost))
            yield f"{rank.name} tells of its failure", sent

    def _leaves(self, job, rank):
        left = job.having(rank._replace(phase="ends"))
        yield f"{rank.name} leaves", left.putting(TOLD, ("report", rank.name, "leaving", None, ()))

    def _ends(self, job, rank):
        yield from self._exit(job, rank, "gone")

    def _ended(self, job, rank):
        return ()

    _done = _dead = _gone = _ended

    def _late(self, job, rank):
        """A rank waits for another one that does not come, for longer than its patience."""
        is_patient = rank.commit is None and len(job.worlds) - 1 <= rank.round and rank.round > 0
        if rank.phase == "runs" and rank.op == AGREE and not is_patient:
            yield (
                f"{rank.name} has waited for too long in world {rank.round}",
                job.having(rank._replace(phase="failed")),
            )
