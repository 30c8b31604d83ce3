"""``hvd-top LINK``: the live page of a job in a terminal."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

ANSWER_SECONDS = 10.0
SHOWN_LINES = 3
SHOWN_ROUNDS = 5
USAGE_ERROR = 2
FORM = "the link that the launcher has printed, such as http://127.0.0.1:8265/?token=..."
NO_RICH = 'hvd-top draws with rich, which is not installed: pip install "hvd-cluster[top]"'

Picture = Mapping[str, Any]


class TopError(Exception):
    """Why there is nothing to show; the text is for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    """Show the job of the link in ``argv`` until it is over or Ctrl-C; returns the exit status.

    The status is 0, or 1 where the job does not answer. Raises SystemExit for an invalid command line.
    """
    options = _parser().parse_args(argv)
    try:
        _show(_link(options.link), options.once)
    except TopError as error:
        sys.stderr.write(f"hvd-top: {error}\n")
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hvd-top", description="Show a job in the terminal, as its live page does.")
    parser.add_argument("link", metavar="LINK", help=f"{FORM}; in quotes, because of the question mark")
    parser.add_argument("--once", action="store_true", help="show the job as it is now, and end")
    return parser


def _link(text: str) -> SplitResult:
    try:
        link = urlsplit(text)
        is_link = link.port != 0
    except ValueError:
        is_link = False
    if not is_link or link.scheme != "http" or not link.hostname or "token=" not in link.query:
        raise TopError(f"{text!r} is not {FORM}")
    return link


def _show(link: SplitResult, once: bool) -> None:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise TopError(NO_RICH) from None
    console = Console()
    pictures = _pictures(link)
    with closing(pictures):
        if once:
            first = next(pictures)  # which may have no rates yet
            console.print(_drawn(next(pictures, first)))
            return
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            for picture in pictures:
                live.update(_drawn(picture), refresh=True)
        console.print(f"job {picture['job']} is over: {_plain(picture['over'])}", markup=False)


def _pictures(link: SplitResult) -> Generator[Picture, None, None]:
    """The pictures of the job, until it is over. Raises TopError."""
    connection = http.client.HTTPConnection(link.hostname or "", link.port, timeout=ANSWER_SECONDS)
    try:
        with closing(connection):
            connection.request("GET", f"/events?{link.query}")
            yield from _events(connection.getresponse())
    except (OSError, http.client.HTTPException, ValueError) as error:
        text = f"the job at {link.hostname} port {link.port} does not answer ({error}); it may be over"
        raise TopError(text) from error


def _events(answer: http.client.HTTPResponse) -> Iterator[Picture]:
    with answer:
        if answer.status != http.HTTPStatus.OK:
            raise TopError(answer.read(1000).decode("utf-8", "replace").strip())
        for line in answer:
            if line.startswith(b"event: end"):
                return
            if line.startswith(b"data: "):
                yield json.loads(line[len(b"data: ") :])
    raise ConnectionError("the stream ended")


# What is shown.


def _drawn(picture: Picture) -> RenderableType:
    from rich.console import Group

    parts: list[RenderableType] = [_head(picture), _table(picture["ranks"])]
    parts += [_text(f"stalled: {line}", "bold red") for line in _stalls(picture)]
    if picture["newcomers"]:
        parts.append(_text(f"in no world now: {', '.join(picture['newcomers'])}"))
    parts += [_text(f"world {each['number']}: {each['text']}") for each in picture["rounds"][:SHOWN_ROUNDS]]
    for rank in picture["ranks"]:
        parts += [_text(f"[{rank['rank']}] {line}", "dim") for _, line in rank["lines"][-SHOWN_LINES:]]
    return Group(*parts)


def _head(picture: Picture) -> Text:
    steps = f", {picture['steps_per_second']:.1f} steps/s" if picture["has_steps"] else ""
    samples = f", {picture['samples_per_second']:,.0f} samples/s" if picture["has_samples"] else ""
    state = f"over: {picture['over']}" if picture["over"] else "runs"
    text = f"job {picture['job']} {state}; world {picture['round']}, {picture['size']} ranks"
    return _text(f"{text}, {picture['batches_per_second']:.1f} batches/s{steps}{samples}", "bold")


def _table(ranks: Sequence[Mapping[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("host", "rank", "worker", "last batch", "batches/s", "MB/s", "waits", "", expand=True)
    for rank in ranks:
        remark = f"! straggler: {rank['slow']}" if rank["slow"] else ""
        remark = f"! {rank['state']}" if rank["state"] != "runs" else remark
        numbers = (f"{rank['batches_per_second']:.1f}", f"{rank['bytes_per_second'] / 1e6:.1f}")
        batch = "" if rank["batch"] is None else str(rank["batch"])
        place = (rank["host"], str(rank["rank"]), rank["worker"])
        cells = (*place, batch, *numbers, f"{rank['waiting_share']:.0%}", remark)
        table.add_row(*map(_text, cells), style="bold red" if remark else "")
    return table


def _stalls(picture: Picture) -> Iterator[str]:
    for each in picture["stalls"]:
        missing = ", ".join(map(str, each["missing"]))
        where = f" of process set {each['process_set']}" if each["process_set"] else ""
        yield f"{each['name']}{where} has waited for {each['seconds']:.0f} s" + (
            f"; missing: rank {missing}" if missing else ""
        )


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(_plain(text), style=style)


def _plain(text: str) -> str:
    """``text`` without what would control the terminal: a rank writes what it likes."""
    return "".join(each if each.isprintable() else " " for each in text)


if __name__ == "__main__":
    sys.exit(main())
