"""The key of a user."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from collectives.api import SettingsError
from executors.launchers.known_ports import FILE, chosen_key, user_key


def test_all_jobs_of_a_user_have_one_key(tmp_path):
    key = user_key(tmp_path)
    assert len(key) == 32
    assert user_key(tmp_path) == key
    assert user_key(tmp_path / "other") != key
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_ranks_that_make_it_at_once_agree_and_leave_no_draft(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(user_key, [tmp_path] * 64))
    assert len(keys) == 1
    assert [path.name for path in (tmp_path / FILE).parent.iterdir()] == ["key"]


def test_a_key_that_others_may_read_is_refused(tmp_path):
    user_key(tmp_path)
    (tmp_path / FILE).chmod(0o640)
    with pytest.raises(SettingsError, match=r"others may read it; chmod 600 it, or set HOROVOD_SECRET_KEY"):
        user_key(tmp_path)


def test_a_key_that_is_cut_off_is_refused(tmp_path):
    user_key(tmp_path)
    (tmp_path / FILE).write_bytes(b"short")
    with pytest.raises(SettingsError, match=r"has 5 bytes, but must have 32; remove it, or set HOROVOD_SECRET_KEY"):
        user_key(tmp_path)


def test_a_home_in_which_no_file_can_be_made(tmp_path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(SettingsError, match=r"cannot be made or read .*; set HOROVOD_SECRET_KEY to the same secret"):
        user_key(tmp_path / "home")


def test_the_user_may_choose_a_secret(monkeypatch):
    monkeypatch.setenv("HOROVOD_SECRET_KEY", " of all ranks ")
    assert chosen_key() == b"of all ranks"
