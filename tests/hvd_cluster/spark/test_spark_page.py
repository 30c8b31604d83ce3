"""The live page of jobs in Spark."""

import pytest

from hvd_cluster.spark import run, run_elastic
from tests.live_page import link_file, looker

# Spark keeps its own processes and connections.
pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.leaves("descriptors", "processes"),
    pytest.mark.timeout(240),
]


@pytest.mark.parametrize("launch", [run, run_elastic])
def test_all_workers_are_on_the_page(spark, launch, monkeypatch, tmp_path):
    shown, _ = launch(looker(link_file(monkeypatch, tmp_path)), num_proc=2, dashboard=True)
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]
