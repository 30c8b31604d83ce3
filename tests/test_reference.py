"""The pages of docs/reference/ say what the code says."""

import re

import pytest

from hvd_cluster import exceptions
from tests.doc_blocks import ROOT
from tests.reference_pages import FLAGS, flags_page

ERRORS = (ROOT / "docs" / "reference" / "errors.md").read_text()
ROWS = {name: bases for name, bases in re.findall(r"^\| `(\w+)`: (.*?) \|", ERRORS, re.MULTILINE)}
CLASSES = {name: each for name in exceptions.__all__ if isinstance(each := getattr(exceptions, name), type)}


def test_the_page_of_flags_is_that_of_the_code():
    assert FLAGS.read_text() == flags_page(), "python -m tests.reference_pages"


def test_every_error_has_a_row():
    assert set(ROWS) == set(CLASSES)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_the_bases_of_the_class(name):
    assert re.findall(r"`(\w+)`", ROWS[name]) == [base.__name__ for base in CLASSES[name].__bases__]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_tells_no_attribute_that_the_class_lacks(name):
    """Those of the text are of the class, or set by its constructor."""
    meaning = re.search(rf"^\| `{name}`: .*? \| (.*?) \| ", ERRORS, re.MULTILINE)[1]
    written = getattr(getattr(CLASSES[name].__init__, "__code__", None), "co_names", ())
    named = [each for each in re.findall(r"`([a-z_]+)`", meaning) if not each.startswith("__")]
    assert not [each for each in named if not hasattr(CLASSES[name], each) and each not in written]
