"""Pure: the named points in the life of a world, at which a trap may hit the process that comes by."""

from dataclasses import dataclass

BEFORE, AFTER = "before ", "after "


@dataclass(frozen=True)
class Point:
    """The function at ``place``, ``module:name``; a point is before it, and another one is after it.

    ``when`` processes come by: in each ``step``, after a ``loss``, in each ``change`` of the ranks, when the job can
    ``grow`` after a loss, when a rank can ``leave``, or at the ``end`` of the training.
    """

    place: str
    when: str


STEP, LOSS, CHANGE, GROW, LEAVE, END = "step", "loss", "change", "grow", "leave", "end"

SESSION = "hvd_cluster.elastic.session"
STATE = "hvd_cluster.elastic.state:ObjectState"
WORLDS = "hvd_cluster.core.worlds:Worlds"
ENGINE = "collectives.engine.engine:Engine"
DRIVER = "executors.driver.driver:Driver"
WORKER = "tests.faults.jobs.training:Worker"

OF_RANKS = {
    "the step": Point(f"{WORKER}.step", STEP),
    "the vote": Point("collectives.engine.bypass:Bypass.attempt", STEP),
    "the batch": Point("collectives.engine.bypass:Attempt.run", STEP),
    "the commit": Point("hvd_cluster.elastic.snapshots:Snapshots.close_cycle", STEP),
    "the look for news": Point(f"{SESSION}:check", STEP),
    "the next world": Point(f"{WORLDS}.after", LOSS),
    "the end of the engine": Point(f"{ENGINE}.step_out", CHANGE),
    "the connection": Point(f"{WORLDS}._connect_once", CHANGE),
    "the agreement on sets": Point(f"{SESSION}:_agree", CHANGE),
    "the submission": Point("collectives.engine.loop:EngineLoop._submit", CHANGE),
    "the negotiated batch": Point("collectives.engine.runner:Runner.run", CHANGE),
    "the sync": Point(f"{STATE}.sync", CHANGE),
    "the reports of states": Point(f"{STATE}._reports", CHANGE),
    "the restoration": Point(f"{STATE}._follow", CHANGE),
    "the wait for the others": Point(f"{SESSION}:await_others", CHANGE),
    "the formation": Point(f"{SESSION}:formed", CHANGE),
    "the training": Point(f"{WORKER}.train", CHANGE),
    "the admission": Point(f"{WORLDS}.join", GROW),
    "the planned change": Point(f"{WORLDS}._interrupt", GROW),
    "the notice": Point(f"{WORLDS}.give_notice", LEAVE),
    "the departure": Point(f"{WORLDS}.tell_leaving", LEAVE),
    "the return": Point(f"{SESSION}:returned", END),
    "the last reports": Point(f"{WORLDS}.await_reports", END),
    "the shutdown": Point(f"{ENGINE}.shutdown", END),
}

OF_DRIVERS = {
    "the publication": Point(f"{DRIVER}._show", CHANGE),
    "the report of a rank": Point(f"{DRIVER}._take", CHANGE),
    "the failure of a rank": Point(f"{DRIVER}.failed", LOSS),
    "the news of a formation": Point(f"{DRIVER}._formed", CHANGE),
    "the start of a rank": Point(f"{DRIVER}._start", GROW),
    "the readiness of a rank": Point(f"{DRIVER}._ready", GROW),
    "the success of a rank": Point(f"{DRIVER}.done", END),
    "the end of the job": Point(f"{DRIVER}._finish", END),
}


def names(points, *moments):
    """The names of ``points`` that have one of the ``moments``, both of each."""
    return [f"{side}{name}" for name, point in points.items() if point.when in moments for side in (BEFORE, AFTER)]


def moment_of(name):
    """When processes come by the point ``name``."""
    return {**OF_RANKS, **OF_DRIVERS}[name.removeprefix(BEFORE).removeprefix(AFTER)].when


def is_of_driver(name):
    """Whether the driver comes by, and no rank."""
    return name in names(OF_DRIVERS, LOSS, CHANGE, GROW, END)
