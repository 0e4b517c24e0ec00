"""munge: one key, and why a credential was refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.components.munge import checks, exports
from provision.report.model import Verdict

FRESH = exports.Daemon(key_written=1000, started=1001)
STALE = exports.Daemon(key_written=1000, started=900)


def test_the_key_is_adopted_where_it_is_and_long_enough_where_it_is_made() -> None:
    (secret,) = exports.SECRETS
    assert secret.adopt == ("/etc/munge/munge.key",)
    assert len(secret.make()) == 1024
    assert secret.make() != secret.make()


@pytest.mark.parametrize(
    ("status", "here", "there", "why"),
    [
        ("unmunge: Error: Invalid credential", STALE, FRESH, "munged on a1 is older than its key"),
        ("unmunge: Error: Invalid credential", FRESH, STALE, "munged on h1 is older than its key"),
        ("unmunge: Error: Invalid credential", FRESH, FRESH, "a1 and h1 have different keys"),
        ("unmunge: Error: Invalid credential", None, None, "a1 and h1 have different keys"),
        ("unmunge: Error: Rewound credential", FRESH, FRESH, "the clocks of a1 and h1 differ"),
        ("unmunge: Error: Expired credential", STALE, FRESH, "the clocks of a1 and h1 differ"),
        ("unmunge: Error: Replayed credential", FRESH, FRESH, "used twice"),
        ("something else", FRESH, FRESH, "something else"),
    ],
)
def test_why_a_credential_was_refused(
    status: str, here: exports.Daemon | None, there: exports.Daemon | None, why: str
) -> None:
    assert why in exports.cause(status, here, there, "a1", "h1")


REWOUND = """\
STATUS:           Rewound credential (16)
ENCODE_HOST:      a1 (10.0.0.11)
ENCODE_TIME:      2026-01-01 12:10:00 +0000 (1767269400)
DECODE_TIME:      2026-01-01 12:00:00 +0000 (1767268800)
TTL:              300
CIPHER:           aes128 (4)
MAC:              sha256 (5)
ZIP:              none (0)
UID:              root (0)
GID:              root (0)
LENGTH:           0

"""


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (REWOUND, "Rewound credential (16)"),
        ("unmunge: Error: Invalid credential\n", "unmunge: Error: Invalid credential"),
        ("one\ntwo\n", "two"),
        ("\n", ""),
    ],
)
def test_the_status_is_read_where_it_stands(answer: str, status: str) -> None:
    assert exports.status(answer) == status


def test_a_clock_that_is_off_is_read_as_what_unmunge_says_of_the_credential() -> None:
    def made(command: str) -> SimpleNamespace:
        return SimpleNamespace(rc=0, stdout="MUNGE:AAAA:\n", stderr="")

    def refused(command: str) -> SimpleNamespace:
        if "unmunge" in command:
            return SimpleNamespace(rc=16, stdout=REWOUND, stderr="")
        return SimpleNamespace(rc=1, stdout="", stderr="")

    head = SimpleNamespace(run=refused)
    at = SimpleNamespace(
        site=SimpleNamespace(head=SimpleNamespace(name="h1")),
        node=SimpleNamespace(name="a1"),
        host=SimpleNamespace(run=made),
        on=lambda name: head,
    )
    found = checks.cross.run(at)  # type: ignore[arg-type]
    assert (found.verdict, found.read) == (Verdict.FAIL, "Rewound credential (16)")
    assert "clocks of a1 and h1 differ" in str(found.why)
    assert str(found.action).startswith("make clocks equal")


def test_a_daemon_older_than_its_key_has_not_read_it() -> None:
    found = exports.parse_daemon(
        "1700000000\nActiveState=active\nActiveEnterTimestamp=Sun 2020-09-13 12:26:40.500000 UTC\n"
    )
    assert found is not None
    assert found.started == 1600000000.5
    assert found.stale
    assert exports.parse_daemon("1700000000\nActiveState=inactive\nActiveEnterTimestamp=\n") is None


@given(st.text(alphabet="abc=@\n ", max_size=80))
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        exports.parse_daemon(text)


@pytest.mark.parametrize(
    ("shown", "verdict"),
    [
        ("400 munge:munge 1024", Verdict.PASS),
        ("600 munge:munge 128", Verdict.PASS),  # as mungekey makes it
        ("640 munge:munge 1024", Verdict.FAIL),
        ("400 root:root 1024", Verdict.FAIL),
        ("400 munge:munge 0", Verdict.FAIL),
    ],
)
def test_a_key_is_munges_alone(shown: str, verdict: Verdict) -> None:
    answer = SimpleNamespace(rc=0, stdout=f"{shown}\n", stderr="")
    at = SimpleNamespace(host=SimpleNamespace(run=lambda command: answer))
    assert checks.key.run(at).verdict is verdict  # type: ignore[arg-type]
