"""Signatures and replays, without a network."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.store import signing
from collectives.store.signing import RefusedError, ReplayGuard, Seal, ServerTime, StaleError, check_body, sign, verify
from tests.collectives.store.wire import SECRET

RUN, LATER_RUN = "1" * 32, "2" * 32
TIME = ServerTime(RUN, 1.0)


def seal(nonce: str, seconds: float, challenge: str = RUN) -> Seal:
    return Seal(ServerTime(challenge, seconds), nonce, "")


def others(value: str | bytes) -> st.SearchStrategy[str | bytes]:
    """Values of the same type: any, or differing in one character that leaves a header well-formed."""
    if isinstance(value, bytes):
        return st.binary(max_size=40).filter(lambda other: other != value)
    places = st.integers(0, max(len(value) - 1, 0))
    near = st.builds(lambda i, digit: value[:i] + digit + value[i + 1 :], places, st.sampled_from("0123456789abcdef"))
    return (near | st.text(max_size=20)).filter(lambda other: other != value)


class TestSigning:
    texts = st.text(max_size=20)
    nonces = st.text("0123456789abcdef", min_size=32, max_size=32)
    messages = st.tuples(
        st.binary(min_size=1, max_size=40),
        texts,
        texts,
        st.binary(max_size=40),
        st.builds(ServerTime, nonces, st.integers(0, 10**15).map(lambda microseconds: microseconds / 1e6)),
        nonces,
    )

    @given(messages)
    def test_a_signed_message_is_authentic(self, message: tuple[bytes, str, str, bytes, ServerTime, str]) -> None:
        secret, method, path, body, time, nonce = message
        seal = verify(secret, method, path, sign(*message))
        check_body(seal.digest, body)
        assert (seal.time, seal.nonce) == (time, nonce)

    @given(messages, messages)
    def test_two_messages_never_share_a_signature(self, one: tuple, other: tuple) -> None:
        same = sign(*one)[signing.SIGNATURE] == sign(*other)[signing.SIGNATURE]
        assert same == (one == other)

    @given(messages, st.data())
    def test_any_change_to_any_field_breaks_it(self, message: tuple, data: st.DataObject) -> None:
        secret, method, path, body, _, _ = message
        fields: dict[str, Any] = {"secret": secret, "method": method, "path": path, "body": body, **sign(*message)}
        name = data.draw(st.sampled_from(sorted(fields)))
        fields[name] = data.draw(others(fields[name]))
        headers = {name: value for name, value in fields.items() if name.startswith("x-")}
        with pytest.raises(RefusedError):
            check_body(verify(fields["secret"], fields["method"], fields["path"], headers).digest, fields["body"])

    def test_text_cannot_move_from_one_field_to_the_next(self) -> None:
        headers = sign(SECRET, "GET", "/keys/a", b"", TIME, "0" * 32)
        with pytest.raises(RefusedError, match="signature is wrong"):
            verify(SECRET, "GET/", "keys/a", headers)

    @pytest.mark.parametrize(
        "name", [signing.CHALLENGE, signing.TIMESTAMP, signing.NONCE, signing.BODY_DIGEST, signing.SIGNATURE]
    )
    @pytest.mark.parametrize("value", [None, "", "nan", "1", "é", "٣" * 32, "0" * 1000])
    def test_missing_and_malformed_headers(self, name: str, value: str | None) -> None:
        headers = sign(SECRET, "GET", "/keys/a", b"", TIME, "0" * 32)
        headers = {key: text for key, text in (headers | {name: value}).items() if text is not None}
        with pytest.raises(RefusedError, match=name):
            verify(SECRET, "GET", "/keys/a", headers)

    def test_an_answer_is_bound_to_status_nonce_and_body(self) -> None:
        headers = signing.sign_answer(SECRET, 200, b"value", "n1")
        check_body(signing.verify_answer(SECRET, 200, "n1", headers), b"value")
        for status, nonce in ((404, "n1"), (200, "n2")):
            with pytest.raises(RefusedError):
                signing.verify_answer(SECRET, status, nonce, headers)
        with pytest.raises(RefusedError):
            check_body(headers[signing.BODY_DIGEST], b"other")


class TestServerTime:
    @given(st.integers(0, 10**15))
    def test_travels(self, microseconds: int) -> None:
        time = ServerTime(RUN, microseconds / 1e6)
        assert ServerTime.decode(time.encode()) == time

    @pytest.mark.parametrize("body", [b"", b"\xff", b"1 1.0", RUN.encode(), RUN.encode() + b" -1.000000"], ids=repr)
    def test_malformed(self, body: bytes) -> None:
        with pytest.raises(RefusedError, match="malformed"):
            ServerTime.decode(body)


class TestReplayGuard:
    def test_admits_once(self) -> None:
        guard = ReplayGuard(RUN)
        guard.admit(seal("a", 1000.0), 1000.0)
        guard.admit(seal("b", 1000.0), 1000.0)
        with pytest.raises(RefusedError, match="received before") as error:
            guard.admit(seal("a", 1000.0), 1000.0)
        assert not isinstance(error.value, StaleError)  # its sender must not sign it again

    def test_a_check_uses_nothing_up(self) -> None:
        guard = ReplayGuard(RUN)
        for _ in range(2):
            guard.check(seal("a", 1000.0), 1000.0)
        guard.admit(seal("a", 1000.0), 1000.0)
        with pytest.raises(RefusedError, match="received before"):
            guard.check(seal("a", 1000.0), 1000.0)

    def test_a_request_to_an_earlier_run(self) -> None:
        with pytest.raises(StaleError, match="another run"):
            ReplayGuard(LATER_RUN).admit(seal("a", 1000.0), 1000.0)

    @pytest.mark.parametrize("now", [699.9, 1300.1])
    def test_stale_both_ways(self, now: float) -> None:
        with pytest.raises(StaleError, match="sign again"):
            ReplayGuard(RUN).admit(seal("a", 1000.0), now)

    @pytest.mark.parametrize("now", [700.0, 1300.0])
    def test_the_window_is_inclusive(self, now: float) -> None:
        ReplayGuard(RUN).admit(seal("a", 1000.0), now)

    def test_entries_expire_and_stay_refused(self) -> None:
        guard = ReplayGuard(RUN)
        guard.admit(seal("a", 1000.0), 1000.0)
        guard.admit(seal("b", 1400.0), 1400.0)
        assert len(guard) == 1
        with pytest.raises(StaleError):
            guard.admit(seal("a", 1000.0), 1400.0)

    @given(st.lists(st.tuples(st.integers(0, 30), st.integers(800, 1200)), max_size=60))
    def test_full_memory_never_admits_twice(self, requests: list[tuple[int, int]]) -> None:
        guard, admitted = ReplayGuard(RUN, capacity=4), set()
        for number, seconds in requests:
            try:
                guard.admit(seal(f"{number}@{seconds}", seconds), 1000.0)
            except RefusedError:
                continue
            assert (number, seconds) not in admitted
            admitted.add((number, seconds))
            assert len(guard) <= 4

    def test_full_memory_still_admits_what_is_new(self) -> None:
        guard = ReplayGuard(RUN, capacity=4)
        for number in range(100):
            guard.admit(seal(str(number), 1000.0 + number / 1000), 1000.0)
