"""The blocks of the docs beside a data service run as they stand there."""

import pytest

from tests.doc_blocks import blocks, execute
from tests.hvd_cluster.tensorflow.data.jobs import serving


class OnlyRank:
    """In the place of hvd_cluster.tensorflow in a job of one rank."""

    rank = staticmethod(lambda: 0)
    size = staticmethod(lambda: 1)


@pytest.mark.leaves("descriptors", "threads")  # grpc keeps connections, and TensorFlow the names of the block
@pytest.mark.parametrize("block", blocks("service"), ids=lambda block: block.name)
def test_a_block(tmp_path, monkeypatch, block):
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path, 1, "compute") as (config, job):
        config.write("service.json")
        values = execute(block, hvd=OnlyRank)["values"]
        assert job.result()[0] == 0
    assert sorted(values) == pytest.approx([number**0.5 for number in range(1000)])
