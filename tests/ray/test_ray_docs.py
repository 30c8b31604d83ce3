"""The blocks of the docs that need Ray run as they stand there."""

import pytest

from tests.doc_blocks import blocks, execute

pytest.importorskip("torch")
pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.leaves("descriptors", "processes")]


@pytest.mark.parametrize("block", blocks("ray"), ids=lambda block: block.name)
def test_a_block(cluster, block):
    results = execute(block)["results"]
    assert [rank for rank, _ in results] == [0, 1]
    assert len({norm for _, norm in results}) == 1
