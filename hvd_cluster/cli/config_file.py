"""The configuration file of hvdrun: YAML -> the values of flags."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvd_cluster.cli.flags import CONTROLLERS, Flag, all_flags

CONTROLLER = "controller"


def read_config(path: str | Path) -> dict[str, Any]:
    """The values of flags, by their names, from the YAML file at ``path``.

    Raises ValueError, which names the file, for a file that cannot be read, an unknown key, and a value that is not
    allowed; unknown keys come with the known ones that are like them.
    """
    try:
        return dict(_values(_load(path)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _values(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    flags = {flag.key: flag for flag in all_flags()}
    sections = {key.partition(".")[0] for key in flags if "." in key}
    for key, value in _flatten(content, sections):
        if key in sections:
            raise ValueError(f"{key} is {value!r}, but must have keys, such as {_example(key, flags)}")
        if key == CONTROLLER:
            yield _controller(value), True
        elif key in flags:
            yield flags[key].name, _value(flags[key], value)
        else:
            raise ValueError(_unknown(key, [*flags, CONTROLLER]))


def _controller(value: object) -> str:
    if not isinstance(value, str) or value not in CONTROLLERS:
        raise ValueError(f"{CONTROLLER} is {value!r}, but must be one of: {', '.join(CONTROLLERS)}")
    return value


def _load(path: str | Path) -> Mapping[str, Any]:
    import yaml  # only for jobs with a file

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"the configuration file cannot be read ({' '.join(str(error).split())})") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ValueError("a configuration file has keys and values, such as num_proc: 2")
    return content


def _flatten(content: Mapping[Any, Any], sections: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The values by their paths, without those that have none."""
    for key, value in content.items():
        if isinstance(value, Mapping) and key in sections:
            yield from ((f"{key}.{name}", each) for name, each in value.items() if each is not None)
        elif value is not None:
            yield str(key), value


def _example(section: str, flags: Iterable[str]) -> str:
    return next(key for key in flags if key.startswith(f"{section}."))


def _unknown(key: str, known: list[str]) -> str:
    similar = difflib.get_close_matches(key, known, 1)
    allowed = f"did you mean {similar[0]}?" if similar else f"the keys are {', '.join(sorted(known))}"
    return f"there is no key {key}; {allowed}"


def _value(flag: Flag, value: Any) -> Any:
    """A list is as many values as the flag takes, or else one value with commas."""
    given = list(map(_text, value)) if isinstance(value, list) else [_text(value)]
    try:
        if flag.words < 2:
            return flag.parse(",".join(given))
        if len(given) != flag.words:
            raise ValueError(f"{flag.words} values")
        return list(map(flag.parse, given))
    except ValueError as error:
        raise ValueError(f"{flag.key} is {value!r}, but must be {error}") from None


def _text(value: Any) -> str:
    """As it would be on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)
