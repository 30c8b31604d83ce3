"""The command line of hvdrun -> the values of flags, and the command that the ranks run."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hvd_cluster import __version__
from hvd_cluster.cli.config_file import read_config
from hvd_cluster.cli.flags import CONTROLLERS, GROUPS, Flag
from hvd_cluster.cli.values import Parse, count
from hvd_cluster.cli.values import text as some_text

USAGE_ERROR = 2
UNKNOWN = re.compile(r"unrecognized arguments: (\S+)")
WITHOUT_WORDS = re.compile(r"argument (--\w+-args): expected one argument")
JOINED = r"\g<0>; if it begins with a dash, write \1='...'"
EXAMPLE = "as in: hvdrun -np 2 python train.py"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The ``command`` of the ranks and the ``values`` of the flags, by name; those that nobody gave are missing."""

    command: list[str]
    values: dict[str, Any]
    fail: Callable[[str], NoReturn]
    """Ends the program because of the command line, with this reason."""

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def controller(self) -> str:
        """The program that starts the ranks: one of CONTROLLERS."""
        return next((name for name in CONTROLLERS if self[name]), CONTROLLERS[0])


def read_command_line(argv: Sequence[str] | None) -> CommandLine:
    """Read ``argv``, by default that of the process, and the configuration file that it names.

    The command line has precedence over the file. Raises SystemExit for a bad one, and for ``--version``, ``--help``
    and ``--check-build``.
    """
    parser = _parser()
    given = vars(parser.parse_args(argv))
    command, config = given.pop("command"), given.pop("config_file", None)
    if command[:1] == ["--"]:
        del command[0]
    if not command:
        parser.error(f"there is no command; put it last, {EXAMPLE}")
    try:
        values = _together({} if config is None else read_config(config), given)
    except ValueError as error:
        parser.error(str(error))
    if "num_proc" not in values and "min_np" not in values:
        parser.error(f"the number of processes is missing, {EXAMPLE}")
    return CommandLine(command, values, parser.error)


def _together(file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of both; those that are ``given`` have precedence. Raises ValueError for several controllers."""
    replaced = set(CONTROLLERS) if set(CONTROLLERS) & given.keys() else set()
    values = {name: value for name, value in file.items() if name not in replaced} | dict(given)
    controllers = [f"--{name}" for name in CONTROLLERS if values.get(name)]
    if len(controllers) > 1:
        raise ValueError(f"{' and '.join(controllers)} contradict each other: give only one of them")
    return values


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = UNKNOWN.match(message)
        text = self._suggest(unknown[1].partition("=")[0]) if unknown else WITHOUT_WORDS.sub(JOINED, message)
        self.exit(USAGE_ERROR, f"{self.prog}: {text}\n")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Only the value of a short option, as in -p22: argparse also takes -c for -cb, and -hosts for -h."""
        found: list[Any] = super()._get_option_tuples(option_string)
        return [each for each in found if option_string.startswith(each[1]) and each[0].nargs != 0]

    def _suggest(self, option: str) -> str:
        # Compared without dashes: they make all short names alike, and --np unlike -np.
        known = {name.lstrip("-"): name for name in self._option_string_actions}
        similar = difflib.get_close_matches(option.lstrip("-"), known, 1)
        advice = f"did you mean {known[similar[0]]}?" if similar else "see hvdrun --help"
        return f"there is no option {option}; {advice}"


class _CheckBuild(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        from hvd_cluster.cli.check_build import build_summary  # with NumPy, which no launch needs

        sys.stdout.write(build_summary())
        parser.exit()


def _parser() -> _Parser:
    parser = _Parser(
        prog="hvdrun",
        usage="%(prog)s -np N [options] command [argument ...]",
        description="Run a command on N processes that train together.",
        epilog="A value on the command line has precedence over the configuration file, and that over the environment.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("-v", "--version", action="version", version=__version__, help="print the version and exit")
    text = "print the frameworks and libraries that are available, and exit"
    parser.add_argument("-cb", "--check-build", action=_CheckBuild, nargs=0, help=text)
    text = "a YAML file with the values of options"
    parser.add_argument("--config-file", metavar="FILE", type=_checked(some_text), help=text)
    parser.add_argument("-n", dest="num_proc", type=_checked(_joined_count), help=argparse.SUPPRESS)
    for name, flags in GROUPS.items():
        group = parser.add_argument_group(name) if name else parser
        for flag in flags:
            _add(group, flag)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command that each process runs")
    return parser


def _add(group: argparse._ActionsContainer, flag: Flag) -> None:
    if not flag.words:
        group.add_argument(*flag.options, dest=flag.name, action="store_true", help=flag.help)
        if flag.negatives:
            text = f"the opposite of {flag.options[0]}"
            group.add_argument(*flag.negatives, dest=flag.name, action="store_false", help=text)
        return
    words = flag.metavar.split()
    group.add_argument(
        *flag.options,
        dest=flag.name,
        type=_checked(flag.parse),
        metavar=words[0] if len(words) == 1 else tuple(words),
        nargs=None if len(words) == 1 else len(words),
        help=flag.help,
    )


def _checked(parse: Parse) -> Parse:
    def read(given: str) -> Any:
        try:
            return parse(given)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{given!r} must be {error}") from None

    return read


def _joined_count(given: str) -> int:
    """The count in ``-np2``, which argparse reads as ``-n`` with the value ``p2``."""
    if not given.startswith("p"):
        raise argparse.ArgumentTypeError(f"there is no such option; say -np {given}")
    try:
        return count(given[1:])
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{given[1:]!r} must be {error}") from None
