"""Log lines on standard error, where nobody else takes them."""

import logging
import re
from unittest import mock

import pytest

from collectives import logs


@pytest.fixture(autouse=True)
def as_before():
    kept = {name: (logging.getLogger(name).level, [*logging.getLogger(name).handlers]) for name in logs.PACKAGES}
    yield
    for name, (level, handlers) in kept.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).handlers[:] = handlers


def said(capsys, level="info", others=()):
    """The output of one log call on standard error when the root logger has the handlers ``others``."""
    logger = logging.getLogger("collectives.engine.engine")
    with mock.patch.object(logging.getLogger(), "handlers", list(others)):
        getattr(logger, level)("a %s tensor", "late")
    return capsys.readouterr().err


def test_a_line_names_time_rank_level_and_module(capsys):
    logs.configure("info", False, 3)
    assert re.fullmatch(r"\d{4}-\S+ \S+ \[rank 3\] INFO collectives\.engine\.engine: a late tensor\n", said(capsys))


def test_without_time_and_once_after_a_new_start(capsys):
    logs.configure("debug", False, 3)
    logs.configure("debug", True, 1)
    assert said(capsys, "debug") == "[rank 1] DEBUG collectives.engine.engine: a late tensor\n"


@pytest.mark.parametrize(("level", "heard"), [("warning", False), ("trace", True), ("fatal", False)])
def test_what_is_below_the_level_is_not_heard(level, heard, capsys):
    logs.configure(level, True, 0)
    assert bool(said(capsys)) is heard


def test_a_program_that_has_set_up_logging_decides(capsys):
    logs.configure("info", True, 0)
    assert not said(capsys, others=[logging.NullHandler()])
