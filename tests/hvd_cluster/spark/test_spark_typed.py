"""Pages with scripts for Spark; see tests/typed.py."""

import pytest
from spark_cluster import JAVA_OPTIONS

from tests import typed


@pytest.mark.timeout(2 * typed.SECONDS)
@pytest.mark.parametrize("page", typed.pages("pyspark"), ids=typed.name_of)
def test_what_a_page_shows_is_what_it_gets(page, tmp_path, monkeypatch):
    typed.skip_without(page)
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", JAVA_OPTIONS)
    typed.check(page, tmp_path)
