"""An elastic script for Horovod, unchanged, under ``hvdrun --horovod-alias``."""

from pathlib import Path

import pytest

from tests.hvd_cluster.elastic.jobs import assert_agreement

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("horovod_script.py")


def test_ranks_are_lost_and_come(start):
    job = start(3, "--horovod-alias", "--blacklist-cooldown-range", 1, 1, script=SCRIPT)
    job.kill(0)
    job.until_training(1, 2, 3)
    job.kill(2)
    job.until_training(1, 3, 4)
    assert job.end() == 0, job.log
    assert_agreement(job, 1, 3, 4)
    assert "reset 2" in job.notes(1)
    assert ", 0 steps lost" in job.log
