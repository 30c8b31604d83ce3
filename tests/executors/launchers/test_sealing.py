"""The secret of a job under that of its rendezvous."""

from executors.api import JobSecret
from executors.launchers.bootstrap import sealed, unsealed


def test_only_those_with_the_secret_of_the_rendezvous_can_read_it():
    secret, rendezvous = JobSecret(), JobSecret()
    first, second = (sealed(secret, rendezvous) for _ in range(2))
    assert first != second
    assert unsealed(first, rendezvous) == unsealed(second, rendezvous) == secret
    assert unsealed(first, JobSecret()) != secret
    assert secret.key.hex() not in first
