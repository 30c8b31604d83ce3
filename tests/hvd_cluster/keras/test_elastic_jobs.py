"""Whole elastic jobs with Keras: a rank is killed, a newcomer comes in, a rank is asked to leave. No step is lost."""

import signal
from pathlib import Path

import pytest

from tests.hvd_cluster.elastic.jobs import assert_agreement
from tests.hvd_cluster.keras.conftest import BACKENDS

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("elastic_training.py")
COOLDOWN = ("--blacklist-cooldown-range", 1, 1)


@pytest.mark.parametrize(
    ("backend", "way"), [("tensorflow", "fit"), ("tensorflow", "loop"), ("torch", "fit"), ("jax", "fit")]
)
def test_a_loss_a_newcomer_and_a_notice(start, backend, way):
    if backend not in BACKENDS:
        pytest.skip(f"{backend} is not installed")
    variables = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    job = start(3, *COOLDOWN, script=SCRIPT, arguments=[way], variables=variables)
    job.kill(1)
    job.until_training(0, 2, 3)
    job.kill(0, number=signal.SIGTERM)
    job.until_training(2, 3)
    assert job.end() == 0, job.log
    assert_agreement(job, 2, 3)
    assert job.notes(2)[-2] == job.notes(3)[-2]  # digests of all variables
    assert [change.partition(": ")[0] for change in job.changes] == ["world 1", "world 2", "world 3"]
    assert job.log.count(", 0 steps lost") == 3


def test_a_rank_is_killed_in_a_step_that_xla_compiles(start):
    """The others have submitted their gradients, and XLA may have changed variables: they go back to the commit."""
    if "tensorflow" not in BACKENDS:
        pytest.skip("tensorflow is not installed")
    variables = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    job = start(2, *COOLDOWN, script=SCRIPT, arguments=["compiled"], variables=variables)
    job.want("die", 1)
    job.until_training(0, 2)
    assert job.end() == 0, job.log
    assert_agreement(job, 0, 2)
    assert job.notes(0)[-2] == job.notes(2)[-2]  # digests of all variables
    assert [change.partition(": ")[0] for change in job.changes] == ["world 1", "world 2"]
    assert job.log.count(", 0 steps lost") == 2
