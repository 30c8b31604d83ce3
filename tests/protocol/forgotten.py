"""States without the parts that nothing reads any more: dead variables. So more ways lead to the same state.

It is sound because a dead variable is in no guard, effect or check of any later event: two states that differ in dead
variables only are bisimilar. The phases of the ranks tell which are dead:

* ``low`` is the first world in which a living rank is, or to which one may still come. No collective of an earlier
  world can go on, so its workers, what its ranks have reached there, and what they have agreed on are dead.
* A world has its agreement until its last rank has left the collectives that use it, and a change that is due until
  all have made that step.
* A rank that trains no more has no use for most of what it knew, but the others may still take what it has told them in
  an agreement that is not complete. A rank that has ended, as the driver knows, and that is in no world from ``low``
  on, is dead.
* A report is dead when the driver does nothing with it, whatever it hears before.
* Whoever finishes later does so in a world from ``low`` on, and repairs all losses before it. So an earlier one counts
  only where a rank has finished before that loss.

Worlds are only compared with each other, so that of ``low`` gets the number 1: a symmetry, as that of the names in
``essences``. World 0 keeps its number, as its ranks begin there without news of it. What the ranks and the driver tell
each other has no number, but how many worlds ago something was.
"""

import functools

from tests.protocol.ranks import AGREE, SHARE, Job, Rank

TRAINING = ("runs", "plans", "failed")
GOING = ("imports", "waits", *TRAINING)


def forgetting(job):
    """``job`` without its dead variables."""
    firsts = [_first_world(job, rank) for rank in job.ranks]
    low = min(firsts, default=len(job.worlds))
    worlds, named = _live(job.worlds, low)
    lost, finished, repaired = _losses(job, low)
    ranks = tuple(
        [
            _kept(rank, low, first, rank.phase == "failed" and job.is_replaced(rank, rank.heard), repaired)
            for rank, first in zip(job.ranks, firsts, strict=True)
            if rank.is_alive or rank.name in named or not rank.has_told
        ]
    )
    shift = max(low - 1, 0)
    running = [(rank.round + shift, rank.op) for rank in ranks if rank.phase == "runs"]
    return Job(
        ranks,
        worlds,
        tuple([(each[0] - shift, *each[1:]) for each in job.agreed if _is_in_use(each[0], running)]),
        tuple([_due(*each, shift) for each in job.due if any(place <= each[0] for place in running)]),
        job.floor,
        lost,
        finished,
        job.has_formed,
        job.may_be_lost,
    )


@functools.cache
def _live(worlds, low):
    """The worlds from ``low`` on, of which the first one gets the number 1, and the names there."""
    live = worlds[low:]
    names = frozenset(name for world in live for name in world.names)
    if low == 0:
        return live, names
    return (None, *[world._replace(round=world.round - low + 1) for world in live]), names


def _is_in_use(round, running):
    """Whether a rank may still use what the ranks of a world have agreed on."""
    return (round, AGREE) in running or (round, SHARE) in running


def _due(place, round, shift):
    return (place[0] - shift, place[1]), round - shift


def _losses(job, low):
    """The last loss, the last success, and the first world of which a further loss would not be repaired already.

    Whoever finishes later is in a world from ``low`` on, and repairs all losses before it.
    """
    never = len(job.worlds)
    if job.finished < 0 or job.lost >= job.finished:
        lost = job.lost if job.lost >= low else -1
        return _shifted(lost, low), -1, max(low, lost + 1) if job.may_be_lost else never
    # A rank may still train, and be lost, in a world between that of ``low`` and that of the success.
    finished = _shifted(job.finished, low) if job.finished >= low else 0
    return -1, finished, job.finished if job.may_be_lost else never


def _part(part, low, repaired):
    """The world in which a rank has trained, as far as its loss would matter."""
    return -1 if part < repaired else _shifted(part, low) if part >= low else 0


def _shifted(round, low):
    """The number of a world, if the one with ``low`` gets the number 1."""
    return round - low + 1 if round >= low > 0 else round


def _first_world(job, rank):
    """The first world in which the rank is, or to which it may still come."""
    if rank.phase in ("imports", "waits"):
        worlds = job.worlds[max(rank.heard - 1, 0) :]
        return next((world.round for world in worlds if world and rank.name in world.names), len(job.worlds))
    return rank.round if rank.phase in GOING else len(job.worlds)


@functools.cache
def _shared(rank):
    """One of those that are equal, to save memory."""
    return rank


@functools.cache
def _kept(rank, low, first, is_replaced, repaired):
    """``rank`` without what is dead."""
    return _shared(_remembering(rank, low, first, is_replaced, repaired))


def _remembering(rank, low, first, is_replaced, repaired):
    reached = tuple([(_shifted(round, low), op) for round, op in rank.reached if round >= low])
    part = _part(rank.part, low, repaired) if rank.phase in (*TRAINING, "finishes") else -1
    if rank.phase in GOING:
        kept = _without_failure(rank._replace(reached=reached, part=part), first, is_replaced)
        return kept._replace(
            round=_shifted(rank.round, low),
            op=_shifted(rank.op, low) if rank.phase == "plans" else kept.op,
            heard=max(kept.heard - max(low - 1, 0), min(kept.heard, 1)),
        )
    kept = Rank(rank.name, rank.phase, has_told=rank.has_told, reached=reached, part=part)
    if any(op == AGREE for _, op in reached):  # the others may still learn of its commit
        return kept._replace(commit=rank.commit, is_exact=rank.is_exact, skips=rank.skips)
    return kept._replace(commit=rank.commit) if rank.phase in ("leaves", "ends", "finishes") else kept


def _without_failure(rank, first, is_replaced):
    """A rank that has heard of a world that is not planned goes there, whatever has failed."""
    if rank.phase == "failed":
        rank = rank._replace(op=0)
    if rank.phase in ("imports", "waits"):
        return rank._replace(heard=max(rank.heard, first))
    return rank._replace(lost=(), has_told=False) if is_replaced else rank


def is_stale(message, unformed):
    """Whether the driver, with so many worlds since the last one that has formed, does nothing with a message."""
    if message[0] != "report":
        return False
    return (message[2] == "lost" and message[3] > 0) or (message[2] == "formed" and message[3] >= unformed)
