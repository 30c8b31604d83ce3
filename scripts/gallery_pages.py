"""The gallery: what each example shows. ``scripts/gallery`` runs examples and keeps what they print and draw.

The text of a page comes from the docstring of its example; the titles are below. ``scripts/gallery`` writes the front
page, docs/gallery/README.md, too; a test compares it with :func:`index`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "gallery"
TOPICS = {
    "Models": {
        "transformer_finetune": "Fine-tune a transformer",
        "resnet_cifar": "A ResNet on CIFAR-like images",
        "gan_ring": "A GAN with two optimizers",
        "spark_wide_deep": "A wide-and-deep recommender",
        "adasum_digits": "AdaSum against the average",
    },
    "First steps": {
        "digits": "The five lines in a script",
        "digits_uneven": "Ranks with different numbers of batches",
        "digits_amp": "Mixed precision and accumulation",
        "lightning_digits": "Lightning's Trainer",
        "keras_digits": "Keras, with model.fit",
        "tensorflow_digits": "TensorFlow, with a tape",
        "mxnet_mnist_gluon": "MXNet, with Gluon",
        "mxnet_mnist_module": "MXNet, with the Module API",
        "horovod_digits": "A script for Horovod, as it is",
    },
    "Ranks that come and go": {
        "elastic_preempted": "Preempted nodes, and no lost step",
        "elastic_digits": "An elastic loop in PyTorch",
        "elastic_keras": "An elastic model.fit",
        "elastic_same_result": "Random losses, the same result",
        "elastic_ray": "Elastic on Ray",
        "elastic_spark": "Elastic in Spark",
    },
    "On Ray": {
        "digits_ray": "Train on a Ray cluster",
        "search_ray": "A search that stops bad trials early",
        "tune_ray": "Ray Tune with Ray Train",
    },
    "On Spark": {
        "spark_digits": "Train on the rows of a DataFrame",
        "spark_regression": "A larger table, made by Spark",
        "spark_estimator_torch": "An estimator for PyTorch",
        "spark_estimator_lightning": "Lightning in a pipeline, with a search",
        "spark_estimator_keras": "An estimator for Keras",
    },
    "Measure, and find faults": {
        "synthetic_benchmark": "Images per second",
        "stalls": "Why a rank keeps the others waiting",
    },
}
"""Topic -> name of an example -> title."""
TITLES = {name: title for topic in TOPICS.values() for name, title in topic.items()}
MXNET = ("mxnet_mnist_gluon", "mxnet_mnist_module")
WITH_LOG = {"elastic_preempted", "elastic_ray", "elastic_same_result", "stalls", *MXNET}
"""What they, or their launcher, write into the log is a part of what they show."""

MOST_LINES, EXCERPT_LINES, EXCERPT_COLUMNS = 40, 8, 60
COMMAND = re.compile(r"(?:hvdrun|python)[^\n`#]*examples/\w+\.py[^\n`#]*")
PICTURE = re.compile(r" *--picture \S+")
RANK = re.compile(r"^\[\d+\]<std(?:out|err)>:", re.MULTILINE)
NOISE = re.compile(
    r"(\[\d+\]<std(out|err)>:)?("
    r"\s*warn|.*Warning: |.*WARN|hvdrun: OMP_NUM|View detailed|To visualize|Using Spark"  # of most
    r"|.*\(raylet\)"  # of Ray
    r"|\[.*MKLDNN|Already bound|  self.init_params)"  # of MXNet
)
COLOUR = re.compile(r"\x1b\[[\d;]*m")
STYLE = """
axes.spines.top: False
axes.spines.right: False
figure.dpi: 110
font.size: 9
svg.hashsalt: gallery
"""


@dataclass(frozen=True)
class Example:
    """A file of examples/, by its name without the ending."""

    name: str

    @functools.cached_property
    def source(self) -> str:
        """The whole file."""
        return (ROOT / "examples" / f"{self.name}.py").read_text()

    @functools.cached_property
    def docstring(self) -> str:
        """That of the file."""
        return ast.get_docstring(ast.parse(self.source)) or ""

    @property
    def summary(self) -> str:
        """The first sentence, without the command in it."""
        first = self.docstring.partition("\n\n")[0].replace("\n", " ")
        return re.sub(r":? ``(?:hvdrun|python)[^`]*``\.?$", ".", first)

    @property
    def text(self) -> str:
        """What follows the first sentence, as Markdown, without the block of commands."""
        rest = re.sub(r"^::\n\n(?: {4}.*\n+)+", "", self.docstring.partition("\n\n")[2], flags=re.MULTILINE)
        return re.sub(r"`(\w+)\.py`", _link, rest.replace("``", "`"))

    @property
    def command(self) -> str:
        """The one that the page shows and that the gallery runs: on several ranks where there is a choice."""
        commands = [re.sub(" +", " ", PICTURE.sub("", found)).strip() for found in COMMAND.findall(self.docstring)]
        return min(commands, key=lambda command: not command.startswith("hvdrun"))

    @property
    def picture(self) -> str | None:
        """The file in docs/gallery, of the kind that the help of ``--picture`` names. None if it draws nothing."""
        found = re.search(r'"--picture".*such as \w+\.(\w+)', self.source)
        return f"{self.name}.{found[1]}" if found else None

    @property
    def output(self) -> Path:
        """The file with what it printed."""
        return FOLDER / f"{self.name}.txt"


def _link(match: re.Match[str]) -> str:
    return f"[{match[0]}]({match[1]}.py)" if match[1] in TITLES else match[0]


def page(name: str) -> str:
    """The page of an example, in Markdown, with links as in the folder examples/."""
    example = Example(name)
    parts = [f"# {TITLES[name]}", f"For you to copy: the file `examples/{name}.py`. {example.summary}", example.text]
    if example.picture:
        parts.append(f"![What the example draws](../docs/gallery/{example.picture})")
    output = example.output.read_text() if example.output.exists() else ""
    parts += [f"```console\n$ {example.command}\n{output}```", "## The script", f"```python\n{example.source}```"]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def index() -> str:
    """The front page: a card for each example, with its picture or the end of what it prints."""
    head = "# Gallery\n\nFor those who look for a script like theirs. Each script has made what its card shows.\n"
    head += "A card leads to the script, its command and all that it prints; `scripts/gallery` has run them.\n"
    head += "All ran on two cores that did other work, too, so their speeds are no measure.\n"
    parts = [head]
    for topic, titles in TOPICS.items():
        cards = "\n".join(card(Example(name), title) for name, title in titles.items())
        parts.append(f'## {topic}\n\n<div class="grid cards gallery" markdown>\n\n{cards}\n</div>\n')
    return "\n".join(parts)


def card(example: Example, title: str) -> str:
    """An item of the list that is a grid in the site."""
    script = f"../../examples/{example.name}.py"
    shown = f"[![{title}]({example.picture})]({script})" if example.picture else f"```text\n{excerpt(example)}\n```"
    blocks = [f"**[{title}]({script})**", shown, example.summary]
    return "-   " + "\n\n".join(blocks).replace("\n", "\n    ").replace("\n    \n", "\n\n") + "\n"


def excerpt(example: Example) -> str:
    """The end of the output, cut off at the right."""
    lines = RANK.sub("", example.output.read_text()).splitlines() if example.output.exists() else []
    return "\n".join(line[:EXCERPT_COLUMNS].rstrip() for line in lines[-EXCERPT_LINES:])


def run(example: Example) -> None:
    """Run it, and keep its output and its picture."""
    sys.stderr.write(f"$ {example.command}\n")
    with tempfile.TemporaryDirectory() as folder:
        style = Path(folder) / "matplotlibrc"
        style.write_text(STYLE)
        tools = {"MATPLOTLIBRC": str(style), "MPLBACKEND": "agg", "SOURCE_DATE_EPOCH": "0", "COLUMNS": "110"}
        tools["RAY_AIR_NEW_OUTPUT"] = "0"  # no tables of Ray Tune while it runs
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        command = example.command.split()
        if example.picture:
            command += ["--picture", str(FOLDER / example.picture)]
        if example.name in MXNET:
            command = ["scripts/mxnet", os.environ.get("VENV", ".venv"), *command]
        log = subprocess.STDOUT if example.name in WITH_LOG else None
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **tools, "PATH": path}, stdout=subprocess.PIPE, stderr=log, check=True
        )
    example.output.write_text(clean(done.stdout.decode()))
    if example.picture:
        shrink(FOLDER / example.picture)


def clean(output: str) -> str:
    """Without names of this machine and the noise of libraries, and not too long."""
    host = re.escape(socket.gethostname())
    short = "node".ljust(len(host))
    output = re.sub(rf"\b{host} {{{len(short) - len(host)}}}(?= )", short, COLOUR.sub("", output))  # in a table
    lines = [re.sub(rf"\b{host}\b", "node", line).rstrip() for line in output.splitlines()]
    lines = [line for line in lines if not NOISE.match(line)]
    while lines and not lines[0]:
        lines.pop(0)
    if len(lines) > MOST_LINES:
        lines[MOST_LINES // 2 : -MOST_LINES // 2] = ["..."]
    return "\n".join(lines) + "\n"


def shrink(path: Path) -> None:
    """Leave out digits of coordinates that nobody sees, or colours."""
    if path.suffix == ".svg":
        short = re.sub(r' d="[^"]*"', lambda each: re.sub(r"(\d\.\d)\d+", r"\1", each[0]), path.read_text())
        path.write_text(re.sub(r"\s*<metadata>.*?</metadata>", "", short, flags=re.DOTALL))
    else:
        from PIL import Image

        Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


def main() -> None:
    """Run examples, and write the front page."""
    parser = argparse.ArgumentParser(description="Run examples, and write the gallery.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of an example; all of them by default")
    parser.add_argument("--index", action="store_true", help="run nothing, and write the front page only")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name in [] if options.index else options.names or TITLES:
        run(Example(name))
    (FOLDER / "README.md").write_text(index())


if __name__ == "__main__":
    main()
