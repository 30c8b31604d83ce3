"""Log lines on standard error, where nobody else takes them."""

import logging
import re
from unittest import mock

import pytest

from collectives import logs
from collectives.logs import Identity


@pytest.fixture(autouse=True)
def as_before():
    kept = {name: (logging.getLogger(name).level, [*logging.getLogger(name).handlers]) for name in logs.PACKAGES}
    yield
    for name, (level, handlers) in kept.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).handlers[:] = handlers


def said(capsys, level="info", others=(), extra=None):
    """The output of one log call on standard error when the root logger has the handlers ``others``."""
    logger = logging.getLogger("collectives.engine.engine")
    with mock.patch.object(logging.getLogger(), "handlers", list(others)):
        getattr(logger, level)("a %s tensor", "late", extra=extra)
    return capsys.readouterr().err


HERE = r"tests/collectives/test_logs\.py:\d+"


def test_a_line_has_the_format_of_horovod(capsys):
    logs.configure("info", False, Identity(3))
    line = said(capsys)
    assert re.fullmatch(rf"\[\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{6}}: I {HERE}\] \[3\]: a late tensor\n", line)


def test_without_time_and_once_after_a_new_start(capsys):
    logs.configure("debug", False, Identity(3))
    logs.configure("debug", True, Identity(1))
    assert re.fullmatch(rf"\[D {HERE}\] \[1\]: a late tensor\n", said(capsys, "debug"))


@pytest.mark.parametrize(
    ("level", "letter"), [("debug", "D"), ("info", "I"), ("warning", "W"), ("error", "E"), ("critical", "F")]
)
def test_a_letter_is_the_level(level, letter, capsys):
    logs.configure("trace", True, Identity(0))
    assert said(capsys, level).startswith(f"[{letter} ")


@pytest.mark.parametrize(
    ("identity", "extra", "id"),
    [
        (Identity(0), {}, "0"),
        (Identity(2, 0, "one/3"), {}, "2 round=0 worker=one/3"),
        (Identity(2), logs.about(["loss"]), "2 tensors=loss"),
        (Identity(2, 4, "w"), logs.about(["a", "b"], 0), "2 round=4 worker=w batch=0 tensors=a,b"),
        (Identity(2), logs.about([], 7), "2 batch=7"),
        (Identity(2), logs.about(list("abcde"), 7), "2 batch=7 tensors=a,b,c,and 2 more"),
    ],
)
def test_a_line_names_all_that_it_is_about(identity, extra, id, capsys):
    logs.configure("info", True, identity)
    assert f"] [{id}]: a late tensor" in said(capsys, extra=extra)


def test_a_program_with_its_own_handler_can_name_them(capsys):
    handler = logging.StreamHandler()
    handler.addFilter(logs.Named(Identity(2, 4, "w")))
    handler.setFormatter(logging.Formatter("%(rank)s %(round)s %(worker)s %(batch)s %(tensors)s"))
    logs.configure("info", True, Identity(2))
    logging.getLogger("collectives").addHandler(handler)
    assert said(capsys, others=[handler], extra=logs.about(["loss"], 7)).startswith("2 4 w 7 ('loss',)")


@pytest.mark.parametrize(("level", "heard"), [("warning", False), ("trace", True), ("fatal", False)])
def test_what_is_below_the_level_is_not_heard(level, heard, capsys):
    logs.configure(level, True, Identity(0))
    assert bool(said(capsys)) is heard


def test_a_program_that_has_set_up_logging_decides(capsys):
    logs.configure("info", True, Identity(0))
    assert not said(capsys, others=[logging.NullHandler()])


def test_a_new_identity_is_in_the_next_line_and_the_handlers_stay(capsys):
    logs.configure("info", True, Identity(3))
    before = [*logging.getLogger("collectives").handlers]
    logs.configure("info", True, Identity(1, 2))
    assert "] [1 round=2]: a late tensor" in said(capsys)
    assert logging.getLogger("collectives").handlers == before


def test_a_level_that_the_program_has_changed_is_set_again(capsys):
    logs.configure("info", True, Identity(0))
    logging.getLogger("collectives").setLevel(logging.ERROR)
    logs.configure("info", True, Identity(0))
    assert "a late tensor" in said(capsys)
