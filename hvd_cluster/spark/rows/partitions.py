"""The partitions of a DataFrame: each is the shard of one rank, so they decide which rows a rank gets."""

from __future__ import annotations

from typing import Any

from pyspark.sql import functions

from executors.agents.spark import Session


def repeatable(frame: Any, size: int) -> Any:
    """``frame`` with its rows evenly distributed over ``size`` partitions, each in the order of hashes of its rows.

    So a partition that Spark computes again has the same order, whatever blocks of the shuffle arrive first.
    """
    return frame.repartition(size).sortWithinPartitions(functions.xxhash64(*frame.columns))


def divided(session: Session, frame: Any, size: int, repartition: bool = False) -> Any:
    """``frame``, for a barrier stage, in ``size`` partitions: as it is, or with its rows evenly distributed.

    With ``repartition`` the rows are always distributed.
    """
    as_it_is = not repartition and not session.connect and _fits(frame, size)
    return frame if as_it_is else frame.repartition(size)


def _fits(frame: Any, size: int) -> bool:
    plan = frame._jdf.queryExecution()
    # An adaptive plan chooses its partitions when it runs, and asking for its RDD would run it.
    if "AdaptiveSparkPlan" in plan.executedPlan().toString():
        return False
    return _is_straight(plan.toRdd(), size)


def _is_straight(rdd: Any, size: int) -> bool:
    """Whether every RDD in the stage of ``rdd`` has ``size`` partitions, as Spark requires for a barrier stage."""
    if rdd.getNumPartitions() != size:
        return False
    dependencies = [rdd.dependencies().apply(index) for index in range(rdd.dependencies().size())]
    parents = [each.rdd() for each in dependencies if "ShuffleDependency" not in each.getClass().getName()]
    return all(_is_straight(parent, size) for parent in parents)
