"""The part of a driver on which its future depends, with names that are equal in drivers that differ in names only.

A search needs only one of several drivers with the same essence: they answer all later events alike, up to texts.
Three things make an essence:

* Attributes that no later answer reads are left out: texts, logs, counts that no case limits, and how workers ended
  about whom nothing can be reported any more.
* Workers and hosts are renamed. A driver never looks into a name, and makes new ones from a number, so a permutation of
  the names of its workers and hosts turns each of its ways into another one: it is an automorphism of the states, if
  the ranks, messages and worlds beside the driver are renamed, too. The names here follow the order in which the driver
  has the workers, so that this order, which decides who leads and which host gets a worker, stays what it was.
* Worlds are only compared with each other, too: an essence has how many of them were published since.

Alarms are more general than in the driver: those that come soon do so in any order, so that their times are no part of
an essence. That adds ways, and takes none away.
"""

import functools
import math
from types import FunctionType

from executors.api import number_of
from executors.driver.driver import Driver
from executors.job.worlds import Report
from executors.membership import Membership
from executors.membership.deaths import ENDED, Deaths
from executors.membership.hosts import Hosts, _Host
from tests.protocol.snapshots import key_of

UNREAD = {
    # Constants; logs; the page; agents that are lost, or late, which no case has.
    Driver: "_limits _job _patience _clock _machine _withdraws _agents _environment _start_timeout _timeout _notes "
    "_unsubscribe _worlds _untold _stage _places _coming_up _hosts _report_formed _slots",
    # Counts, which no case limits; texts; an exception of a worker that has ended, which no case has; what saves time.
    Membership: "limits counts deadline formed published _unformed _last_failure _now _actions _jitter _failed _losses "
    "_all_stay",
    _Host: "failures",
    Deaths: "failures lost done order unexplained former _limits _workers",
}


def parts_but(unread, value):
    """The attributes of ``value`` but the ``unread`` ones."""
    return [
        getattr(value, name) for name in getattr(type(value), "__slots__", None) or vars(value) if name not in unread
    ]


def _driver(value):
    return (
        *parts_but(UNREAD[Driver].split(), value),
        *_alarms(value),
        *_worlds(value),
        value._report_formed is not None,
        frozenset(value._slots.items()),
        frozenset(_former(value)),
        frozenset(_failed(value)),
    )


def _alarms(driver):
    """Those that come soon do so in any order; of the others only the order counts."""
    job = driver._job
    named = [(job.is_soon(due), alarm_of(driver, action)) for due, action in job.alarms]
    return (
        frozenset(alarm for is_soon, alarm in named if is_soon),
        tuple(alarm for is_soon, alarm in named if not is_soon),
    )


def alarm_of(driver, action):
    """The state on which the result of an alarm depends; None: it will do nothing, whatever comes before."""
    if isinstance(action, functools.partial):
        return _reason(driver, action)
    if isinstance(action, FunctionType):
        given = zip(action.__code__.co_freevars, action.__closure__ or (), strict=True)
        return _judgement(driver, **{name: cell.cell_contents for name, cell in given})
    return action.__name__ if driver._membership.deadline is not None else None


def _reason(driver, action):
    """Of an end that is explained nobody asks for the reason; _settle() only logs."""
    is_open = action.func.__name__ == "_give_up_reason" and driver._deaths.is_unexplained(*action.args)
    return ("reason", *action.args) if is_open else None


def _judgement(driver, worker, report, **_):
    """Of the accused only those count that are alive, of the accuser only whether it may be ended."""
    world = driver._worlds.present.get(report.round)
    accused = (
        frozenset(name for name in world.workers_of(report.ranks) if driver._membership.has(name)) if world else ()
    )
    accuser = None if worker in driver._job.ended else worker
    is_past = world is None or world.round != driver._worlds.published.round
    ago = world and driver._worlds.published.round - world.round
    return None if is_past and not accused and not accuser else ("judge", accuser, ago, accused)


def _former(driver):
    """Those about whose end something may still be reported."""
    explained = {name for name, each in driver._deaths.failures._failed.items() if each.failure is not ENDED}
    return driver._deaths.former - driver._job.ended - (explained - driver._membership._workers.keys())


def _failed(driver):
    """Those about whom more may be reported, and whether the others have noticed their end first."""
    failed = driver._deaths.failures._failed
    settled = driver._job.ended.difference(driver.members)
    return {(name, each.failure is ENDED) for name, each in failed.items() if name not in settled}


def _losses(membership):
    """Without those that are repaired for good; and without the ranks that are no more, and were not done."""
    losses = membership._losses
    matters = {*membership._workers, *losses._done}
    unformed = {name for members in membership._unformed.values() for name in members.workers}
    later = {
        name: {other for other, last in losses._last.items() if last > loss.since}
        for name, loss in losses._lost.items()
    }
    lost = {
        (name, loss.is_explained, loss.had_part, frozenset(later[name] & matters))
        for name, loss in losses._lost.items()
        if not loss.is_explained or name in unformed or later[name].isdisjoint(losses._done)
    }
    return lost, losses._done & unformed.union(*(others for *_, others in lost))


def _worlds(driver):
    """The worlds, with the order of those that may still go on. Of the others it counts how many are lost, or done."""
    membership, history = driver._membership, driver._worlds
    newest = history.published.round
    ended = driver._job.ended
    lost, done = _losses(membership)
    counted = {name for name, *_ in lost} | done
    return (
        membership.formed.round >= 0,
        _without(ended, membership.formed.workers),
        tuple(
            (newest - round, _without(ended, members.workers), frozenset(counted.intersection(members.workers)))
            for round, members in membership._unformed.items()
        ),
        newest >= 0,
        _without(ended, driver.members),
        len(ended.intersection(driver.members)),
        tuple(
            (newest - round, _without(ended, [name for name, _ in world.workers]))
            for round, world in history.present.items()
        ),
    )


def _without(ended, names):
    return tuple(name for name in names if name not in ended)


def _membership(value):
    parts = parts_but(UNREAD[Membership].split(), value)
    return *parts, *map(frozenset, _losses(value))


def _hosts(value):
    """Those that get no worker any more are in no order."""
    is_open = {name: host.blacklisted_until < math.inf for name, host in value._hosts.items()}
    closed = ((name, host) for name, host in value._hosts.items() if not is_open[name])
    return (
        tuple((name, host) for name, host in value._hosts.items() if is_open[name]),
        frozenset((name, host.slots, host.is_here, host.is_draining) for name, host in closed),
    )


def _report(value):
    return value.kind, value.round, value.ranks


ESSENCES = {kind: functools.partial(parts_but, unread.split()) for kind, unread in UNREAD.items()} | {
    Driver: _driver,
    Membership: _membership,
    Hosts: _hosts,
    Report: _report,
}


def essence(driver):
    """A hashable value, and the name of each worker and host in it."""
    names = names_of(driver)
    return key_of(driver, driver._job.now, ESSENCES, names), names


def names_of(driver):
    """New names: each is one of the old ones of the same kind, so that further workers get the same as before."""
    workers = [*driver._membership._in_order()]
    ended = driver._places.keys() - workers
    workers += sorted(ended, key=functools.partial(_rank_of_ended, driver, *_losses(driver._membership)))
    hosts = dict.fromkeys([driver._places[worker] for worker in workers] + [*driver._membership._hosts._hosts])
    names = dict(zip(workers, sorted(workers, key=number_of), strict=True))
    return names | dict(zip(hosts, sorted(hosts), strict=True))


def _rank_of_ended(driver, lost, done, worker):
    """What an essence has about it, so that those that differ only in that are in one order."""
    flags = [(explained, had_part, len(later)) for name, explained, had_part, later in lost if name == worker]
    failed = [is_open for name, is_open in _failed(driver) if name == worker]
    return worker in _former(driver), failed, flags, worker in done, number_of(worker)
