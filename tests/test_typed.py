"""Pages with scripts for ranks of this host; see tests/typed.py."""

import pytest

from tests import typed


@pytest.mark.timeout(2 * typed.SECONDS)
@pytest.mark.parametrize("page", typed.pages(), ids=typed.name_of)
def test_what_a_page_shows_is_what_it_gets(page, tmp_path):
    typed.skip_without(page)
    typed.check(page, tmp_path)
