"""Pure: the labels of nodes, and Ray's label selectors."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["check_labels", "matches"]


def check_labels(selector: object, argument: str) -> None:
    """Raise ValueError unless ``selector`` is a label selector, or None."""
    given = {} if selector is None else selector
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise ValueError(
            f"{argument} is {selector!r}, but must be a dict of labels and their values, such as "
            '{"ray.io/market-type": "!spot"}'
        )


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether ``labels`` match Ray's label selector, whose values are "a", "!a", "in(a, b)" or "!in(a, b)"."""
    return all(_match(labels.get(key), text) for key, text in selector.items())


def _match(value: str | None, text: str) -> bool:
    positive = text.removeprefix("!").strip()
    is_list = positive.startswith("in(") and positive.endswith(")")
    allowed = positive[3:-1].split(",") if is_list else [positive]
    return (value in [each.strip() for each in allowed]) != text.startswith("!")
