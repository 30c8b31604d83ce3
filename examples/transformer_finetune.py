"""Fine-tune a small transformer: it learns English from one text, and then the style of another one.

::

    hvdrun -np 2 python examples/transformer_finetune.py --picture transformer.svg

The model reads words and guesses the next one. It learns from the language reference that Python ships in
``pydoc_data.topics``, and then from the descriptions of data sets that scikit-learn ships. While it is fine-tuned, the
embeddings and the lower half of its layers are frozen: they have no gradients, so nothing of them travels, and only the
upper half is in the optimizer. A second model learns the descriptions from scratch, in as many steps. The table
compares both on a part of the descriptions that neither has seen.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from importlib.resources import files
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

import hvd_cluster.torch as hvd

WORDS = 1000
LENGTH = 32
EVERY = 10


def texts() -> tuple[Tensor, Tensor, Tensor]:
    """Python's language reference, and scikit-learn's descriptions in a part to learn from and a held-out part.

    Each is a tensor with the number of each word. The most common words have numbers of their own, all others have 0.
    """
    pages = sorted(files("sklearn.datasets.descr").iterdir(), key=lambda page: page.name)
    described = words("\n".join(page.read_text() for page in pages if page.name.endswith(".rst")))
    reference = words("\n".join(topics[name] for name in sorted(topics)))
    common = Counter(reference + described).most_common(WORDS - 1)
    numbers = {word: number for number, (word, _) in enumerate(common, 1)}
    first, second = (torch.tensor([numbers.get(word, 0) for word in each]) for each in (reference, described))
    return first, second[: len(second) * 4 // 5], second[len(second) * 4 // 5 :]


def words(text: str) -> list[str]:
    """The words and signs of a text."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


class WordModel(nn.Module):
    """Scores for the word behind each word, from those before it."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.2)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of shape [texts, words, WORDS]."""
        inner = self.words(text) + self.places(torch.arange(text.shape[1]))
        later = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        for layer in self.layers:
            inner = layer(inner, src_mask=later, is_causal=True)
        return self.head(inner)

    def freeze(self) -> None:
        """Leave the embeddings and the lower half of the layers as they are."""
        for part in (self.words, self.places, *self.layers[: len(self.layers) // 2]):
            part.requires_grad_(False)


def batch(text: Tensor, size: int) -> Tensor:
    """Pieces of a text at random places; each rank draws its own."""
    starts = torch.randint(len(text) - LENGTH - 1, (size, 1))
    return text[starts + torch.arange(LENGTH + 1)]


def loss_of(model: nn.Module, pieces: Tensor) -> Tensor:
    """The mean loss of a word, in nats."""
    return nn.functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    """The loss on a text that the model has not seen; each rank reads every so many pieces of it."""
    pieces = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)[hvd.rank() :: hvd.size()]
    return hvd.metrics.average({"loss": loss_of(model, pieces).item()}, samples=len(pieces))["loss"]


def train(name: str, model: WordModel, text: Tensor, held_out: Tensor, steps: int, size: int) -> list[float]:
    """The held-out loss before the training and after every EVERY steps."""
    learns = [(key, parameter) for key, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW([parameter for _, parameter in learns], lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=learns)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    count = sum(parameter.numel() for _, parameter in learns)
    losses = [evaluate(model, held_out)]
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss_of(model, batch(text, size)).backward()
        optimizer.step()
        if step % EVERY == 0:
            losses.append(evaluate(model, held_out))
    hvd.print_once(f"{name:20} {count:9,} parameters learn   held-out loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


def draw(curves: dict[str, list[float]], path: str) -> None:
    """The held-out loss by step, a line for each model."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for name, losses in curves.items():
        axes.plot([EVERY * number for number in range(len(losses))], losses, label=name)
    axes.set(xlabel="steps on the descriptions", ylabel="held-out loss of a word")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Train three times; rank 0 prints a line for each, and draws."""
    parser = argparse.ArgumentParser(description="Fine-tune a small transformer on text.")
    add = parser.add_argument
    add("--pretrain-steps", type=int, default=300, help="on the language reference (%(default)s)")
    add("--steps", type=int, default=60, help="on the descriptions (%(default)s)")
    add("--batch-size", type=int, default=16, help="pieces of text of each rank (%(default)s)")
    add("--seed", type=int, default=1, help="of all random numbers (%(default)s)")
    add("--picture", metavar="FILE", help="draw the curves into this file, such as transformer.svg")
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    hvd.set_seed(arguments.seed)
    (reference, text, held_out), size = texts(), arguments.batch_size
    model, fresh = WordModel(), WordModel()
    train("pretrained", model, reference, held_out, arguments.pretrain_steps, size)
    model.freeze()
    curves = {"fine-tuned": train("fine-tuned", model, text, held_out, arguments.steps, size)}
    curves["from scratch"] = train("from scratch", fresh, text, held_out, arguments.steps, size)
    if arguments.picture and hvd.rank() == 0:
        draw(curves, arguments.picture)


if __name__ == "__main__":
    main()
