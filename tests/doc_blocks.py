"""The Python blocks of README and docs, and how each of them is run.

A comment in front of a block says so, ``<!-- run: spark -->`` or ``<!-- with: model -->``:

* ``run`` is where: ``ranks`` (the default: in both ranks of a world of two), ``tensorflow`` (in those of another),
  ``launcher`` (once, in a process that starts ranks), ``ray``, ``trainer`` (with Ray, too), ``spark``, ``estimator``
  (on Spark, with an estimator), ``fitted`` (on Spark, with a fitted model), ``shard`` or ``keras`` (in one process,
  with a shard of rows), ``service`` (in one process, beside a data service), ``mxnet`` (in one process, with MXNet), or
  ``typed`` (saved under the name that the page gives, for the commands of the page; see tests/typed.py).
* ``with`` names what of PREAMBLES goes before it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- ([a-z]+): ([a-z]+) -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACES = (
    "ranks",
    "tensorflow",
    "launcher",
    "ray",
    "trainer",
    "spark",
    "estimator",
    "fitted",
    "shard",
    "keras",
    "service",
    "mxnet",
    "typed",
)
HVD = """
import torch
import hvd_cluster.torch as hvd
hvd.init()
"""
PREAMBLE_PLACES = {"train": "launcher", "tf": "tensorflow"}
PREAMBLES = {
    "nothing": "",
    "tf": """
import tensorflow as tf
import hvd_cluster.tensorflow as hvd
hvd.init()
""",
    "hvd": HVD,
    "model": HVD
    + """
model = torch.nn.Linear(10, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
""",
    "folder": HVD
    + """
import tempfile
model = torch.nn.Linear(10, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
scratch = tempfile.TemporaryDirectory()
folder = scratch.name
""",
    "train": """
def train(rate):
    import hvd_cluster.torch as hvd
    hvd.init()
    return hvd.rank(), rate
""",
}


@dataclass(frozen=True)
class Block:
    """A block of a page, with its preamble."""

    name: str
    place: str
    code: str


def blocks(*places):
    """All blocks that are run in one of ``places``."""
    return [block for block in _all() if block.place in places]


def _all():
    for page in PAGES:
        for number, (key, value, code) in enumerate(BLOCK.findall(page.read_text()), 1):
            place = value if key == "run" else PREAMBLE_PLACES.get(value, "ranks")
            yield Block(f"{page.relative_to(ROOT)}:{number}", place, PREAMBLES[value] + code if key == "with" else code)


def execute(block, **names):
    """Run the block as a script; the names that it leaves."""
    scope = {"__name__": "snippet", **names}
    exec(compile(block.code, block.name, "exec"), scope)
    return scope
