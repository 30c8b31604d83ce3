"""The estimators under Horovod's module paths."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

NAMES = {
    "horovod.spark.lightning": ("hvd_cluster.spark.lightning", "TorchEstimator TorchModel LightningEstimator"),
    "horovod.spark.keras": ("hvd_cluster.spark.keras", "KerasEstimator KerasModel"),
    "horovod.spark.torch": ("hvd_cluster.spark.torch", "TorchEstimator TorchModel"),
    "horovod.spark.common.params": ("hvd_cluster.spark.estimators.params", "EstimatorParams ModelParams"),
    "horovod.spark.common.estimator": ("hvd_cluster.spark.estimators.estimator", "HorovodEstimator HorovodModel"),
    "horovod.spark.common.backend": (
        "hvd_cluster.spark.estimators.backend",
        "Backend SparkBackend default_num_proc",
    ),
    "horovod.spark.common.util": (
        "hvd_cluster.spark.estimators.parquet",
        "prepare_data check_validation to_list",
    ),
    "horovod.spark.common.store": (
        "hvd_cluster.spark.estimators.store",
        "Store AbstractFilesystemStore FilesystemStore LocalStore HDFSStore DBFSLocalStore",
    ),
}


def test_horovods_names_are_ours():
    pytest.importorskip("torch")
    lines = [
        f"import {alias}, {real}; assert {alias}.{name} is {real}.{name}"
        for alias, (real, names) in NAMES.items()
        for name in names.split()
        if find_spec(alias.rpartition(".")[2]) or not alias.endswith("keras")
    ]
    script = "\n".join(["import hvd_cluster.horovod", "hvd_cluster.horovod.install()", *lines])
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
