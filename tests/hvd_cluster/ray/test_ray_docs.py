"""The blocks of the docs that need Ray run as they stand there, and the script of the RayJob."""

import pytest
import yaml

from tests.doc_blocks import ROOT, Block, blocks, execute

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.leaves("descriptors", "processes"),
    # Ray Data warns of its own defaults.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data"),
]


@pytest.mark.parametrize("block", blocks("ray"), ids=lambda block: block.name)
def test_a_block(cluster, block):
    if "ray.data" in block.code:
        pytest.importorskip("pyarrow")
    results = execute(block)["results"]
    assert [rank for rank, _ in results] == [0, 1]
    assert len({norm for _, norm in results}) == 1


def test_the_script_of_the_ray_job(cluster):
    manifest = ROOT / "docs" / "launch" / "files" / "kubernetes" / "rayjob.yaml"
    script = next(yaml.safe_load_all(manifest.read_text()))["data"]["train.py"]
    norms = execute(Block("train.py", "ray", script))["results"]
    assert len(norms) == 2
    assert len(set(norms)) == 1
