"""The secret of a job under that of its meeting."""

from executors.api import JobSecret
from executors.meetings.sealing import sealed, unsealed


def test_only_those_with_the_secret_of_the_meeting_can_read_it():
    secret, meeting = JobSecret(), JobSecret()
    first, second = (sealed(secret, meeting) for _ in range(2))
    assert first != second
    assert unsealed(first, meeting) == unsealed(second, meeting) == secret
    assert unsealed(first, JobSecret()) != secret
    assert secret.key.hex() not in first
