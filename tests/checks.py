"""Checks that run on every rank of a pool."""

import pytest


def each_check(namespace, *others):
    """Gives a test the argument ``check``: each function of a test module called ``check_...``, but for ``others``."""
    found = [value for name, value in sorted(namespace.items()) if name.startswith("check_")]
    checks = [check for check in found if check not in others]
    return pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__.removeprefix("check_"))
