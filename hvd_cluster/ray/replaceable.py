"""A worker of an ``HvdTrainer`` whose lost workers are replaced: around its training function, and its end."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import cloudpickle

from collectives import InvalidRequestError
from executors import Answer, WorkerIdentity
from executors.agents.ray import BarrierGuard, ReportKeeper
from hvd_cluster.core import basics
from hvd_cluster.core.worlds import Worlds
from hvd_cluster.elastic.loop import hand_over, keeping_state

__all__ = ["replaceable"]

ALONE = (
    "a worker of an elastic HvdTrainer that replaces another one has trained without the others: the training function "
    "must train in a function that hvd.elastic.run decorates, or leave elastic out"
)


@contextmanager
def replaceable() -> Iterator[None]:
    """Around the training function: a worker that has finished stays until all have. Its engine ends before.

    Raises InvalidRequestError if a new worker has trained alone. A rank that fails keeps its engine: the others shall
    not blame a polite end.
    """
    if WorkerIdentity.of(os.environ) is None:  # a trainer without workers
        yield
        _check_trained()
        basics.shutdown()
        return
    end = _End()
    with ReportKeeper() as reports, keeping_state(), BarrierGuard(end.others_wait_in_vain):
        try:
            yield
        except SystemExit:
            if not _came_too_late():
                raise
            return
        _check_trained()
        basics.shutdown()
        end.stay(reports)


class _End:
    """Of the training function in this worker."""

    def __init__(self) -> None:
        self._is_waiting = False

    def others_wait_in_vain(self) -> bool:
        """Whether nobody shall wait at the barrier of a report: one of all workers will not come."""
        return self._is_waiting or basics.is_cut_off()

    def stay(self, reports: ReportKeeper) -> None:
        """Return when all workers have finished, and Ray Train has their last report."""
        worlds = basics.worlds()
        number = 0
        while worlds is not None and (answer := self._finish(worlds, number, reports)).kind != "end":
            if answer.kind == "return":
                hand_over(answer.number)
                basics.shutdown()
            else:
                _repeat(worlds, answer, reports)
            number += 1

    def _finish(self, worlds: Worlds, number: int, reports: ReportKeeper) -> Answer:
        self._is_waiting = True
        try:
            return worlds.finish(number, reports.last())
        finally:
            self._is_waiting = False


def _repeat(worlds: Worlds, answer: Answer, reports: ReportKeeper) -> None:
    metrics = reports.metrics
    if answer.source == worlds.identity.worker:
        worlds.give_metrics(answer.number, cloudpickle.dumps(metrics))
    elif metrics is None:
        metrics = pickle.loads(worlds.metrics_of(answer.source, answer.number))
    reports.repeat(metrics)


def _came_too_late() -> bool:
    """Whether all workers had finished when this one came, so that it has nothing to do."""
    worlds = basics.worlds()
    return worlds is not None and worlds.is_alone and worlds.is_over


def _check_trained() -> None:
    worlds = basics.worlds()
    if worlds is not None and worlds.is_alone:
        raise InvalidRequestError(ALONE)
