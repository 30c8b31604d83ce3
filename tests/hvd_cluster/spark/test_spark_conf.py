"""Spark knows the settings by these keys, and takes these values."""

import importlib

import pytest

from hvd_cluster.spark import conf

# Spark keeps its own processes and connections.
pytestmark = pytest.mark.leaves("descriptors", "processes")

PAIRS = {name: pair for name in conf.__all__ if isinstance(pair := getattr(conf, name), tuple)}


def test_the_defaults_are_those_of_spark(spark):
    entries = spark._jvm.org.apache.spark.internal.config.ConfigEntry
    found = {key: entries.findEntry(key).defaultValueString() for key in conf.SPARK_CONF_DEFAULT_VALUES}
    # Undefined means false there.
    assert found == conf.SPARK_CONF_DEFAULT_VALUES | {"spark.excludeOnFailure.enabled": "<undefined>"}
    assert {key for key, _ in PAIRS.values()} == set(found)


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_spark_takes_the_values(spark, name):
    settings = spark._jvm.org.apache.spark.SparkConf(False)
    for key, value in (conf.SPARK_CONF_BLACKLIST_ENABLED, conf.SPARK_CONF_ALWAYS_RESTART_FAILED_TASK, PAIRS[name]):
        settings.set(key, value)
    tracker = spark._jvm.org.apache.spark.scheduler.HealthTracker
    tracker.validateExcludeOnFailureConfs(settings)
    assert tracker.isExcludeOnFailureEnabled(settings) is (name != "SPARK_CONF_BLACKLIST_DISABLED")


def test_scripts_for_horovod(horovod_alias):
    assert importlib.import_module("horovod.spark.conf") is conf
