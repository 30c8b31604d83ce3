"""docs/reference/flags.md follows from the table of flags: ``python -m tests.reference_pages`` writes it again."""

from pathlib import Path

from hvd_cluster.cli.flags import GROUPS

FLAGS = Path(__file__).parents[1] / "docs" / "reference" / "flags.md"
INTRODUCTION = """# Flags of hvdrun

For those who start jobs with `hvdrun`, or write its configuration file. A flag has precedence over the file, and the
file over the variable. [hvdrun](../hvdrun.md) explains the command, and [variables](../variables.md) the variables. A
row has the flag, its place in [the configuration file](../hvdrun.md#the-configuration-file), and the variable that the
ranks get. Four flags stand on the command line only: `-h` shows the help, `-v` (`--version`) the version, `-cb`
(`--check-build`) [what is installed](../hvdrun.md#the-installation), and `--config-file FILE` names the file.
"""
HEAD = "| flag | in the file | variable | meaning |\n|---|---|---|---|\n"


def flags_page() -> str:
    """The text of the page."""
    parts = [f"\n## {(name or 'general').capitalize()}\n\n{HEAD}{''.join(map(_row, GROUPS[name]))}" for name in GROUPS]
    return INTRODUCTION + "".join(parts)


def _row(flag) -> str:
    value = f" {flag.metavar}" if flag.metavar else ""
    written = [*(option + value for option in flag.options), *flag.negatives]
    meaning = flag.help.replace("<", "&lt;").replace("|", "&#124;")
    cells = [", ".join(map(_code, written)), _code(flag.key.replace(".", ": ")), _code(flag.variable), meaning]
    return f"| {' | '.join(cells)} |\n"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    FLAGS.write_text(flags_page())
