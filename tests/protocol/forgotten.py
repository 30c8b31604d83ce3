"""States without the parts that nothing reads any more: dead variables. So more ways lead to the same state.

It is sound because a dead variable is in no guard, effect or check of any later event: two states that differ in dead
variables only are bisimilar. The phases of the ranks tell which are dead:

* ``low`` is the first world in which a living rank is, or to which one may still come. No collective of an earlier
  world can go on, so its workers, what its ranks have reached there, and what they have agreed on are dead.
* A world has its agreement until its last rank has left the collectives that use it, and a change that is due until
  all have made that step.
* A rank that trains no more has no use for most of what it knew, but the others may still take what it has told them in
  an agreement that is not complete. A rank that has ended, and that is in no world from ``low`` on, is dead.
* A report is dead when the driver does nothing with it, whatever it hears before.
"""

import functools

from tests.protocol.ranks import AGREE, SHARE, Job, Rank

TRAINING = ("runs", "plans", "failed")
GOING = ("imports", "waits", *TRAINING)


def forgetting(job, formed):
    """``job`` without its dead variables; the driver has heard that the world of round ``formed`` has formed."""
    firsts = [_first_world(job, rank) for rank in job.ranks]
    low = min(firsts, default=len(job.worlds))
    worlds = tuple([None if each and each.round < low else each for each in job.worlds])
    named = {name for world in worlds[low:] for name in world.names}
    named.update([message[1] for message in job.messages if message[0] in ("killed", "done")])
    may_be_lost = job.faults > 0
    ranks = tuple(
        [
            _kept(rank, low, first, rank.phase == "failed" and job.is_replaced(rank, rank.heard), may_be_lost)
            for rank, first in zip(job.ranks, firsts, strict=True)
            if rank.is_alive or rank.name in named
        ]
    )
    running = [(rank.round, rank.op) for rank in ranks if rank.phase == "runs"]
    lost, finished = _losses(job, ranks)
    return Job(
        job.driver,
        ranks,
        tuple([each for each in job.messages if not _is_stale(each, len(worlds) - 1, formed)]),
        worlds,
        tuple([each for each in job.agreed if (each[0], AGREE) in running or (each[0], SHARE) in running]),
        tuple([each for each in job.due if any(place <= each[0] for place in running)]),
        job.floor,
        lost,
        finished,
        *job[LAST:],
    )


LAST = Job._fields.index("end")


def _losses(job, ranks):
    """A loss that is repaired is none any more. A rank that has finished repairs later losses of ranks before it."""
    if job.finished < 0:
        return job.lost, -1
    if job.lost >= job.finished:
        return job.lost, -1
    parts = [rank.part for rank in ranks if rank.is_alive and rank.part >= 0]
    return -1, max(0, job.finished if any(part < job.finished for part in parts) else 0)


def _first_world(job, rank):
    """The first world in which the rank is, or to which it may still come."""
    if rank.phase in ("imports", "waits"):
        worlds = job.worlds[max(rank.heard - 1, 0) :]
        return next((world.round for world in worlds if world and rank.name in world.names), len(job.worlds))
    return rank.round if rank.phase in GOING else len(job.worlds)


@functools.cache
def _kept(rank, low, first, is_replaced, may_be_lost):
    """``rank`` without what is dead."""
    reached = tuple(each for each in rank.reached if each[0] >= low)
    part = rank.part if may_be_lost and rank.phase in (*TRAINING, "finishes") else -1
    if rank.phase in GOING:
        return _without_failure(rank._replace(reached=reached, part=part), first, is_replaced)
    if any(op == AGREE for _, op in reached):  # the others may still learn of its commit
        return Rank(rank.name, rank.phase, -1, 0, 0, rank.commit, rank.is_exact, rank.skips, False, (), reached, part)
    is_leaving = rank.phase in ("leaves", "ends", "finishes")
    return Rank(rank.name, rank.phase, commit=rank.commit if is_leaving else None, reached=reached, part=part)


def _without_failure(rank, first, is_replaced):
    """A rank that has heard of a world that is not planned goes there, whatever has failed."""
    if rank.phase == "failed":
        rank = rank._replace(op=0)
    if rank.phase == "waits":
        return rank._replace(heard=max(rank.heard, first))
    return rank._replace(lost=(), has_told=False) if is_replaced else rank


def _is_stale(message, newest, formed):
    """Whether the driver does nothing with a message."""
    if message[0] != "report":
        return False
    return (message[2] == "lost" and message[3] < newest) or (message[2] == "formed" and message[3] <= formed)
