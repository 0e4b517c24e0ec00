"""The cluster's own certificates: what is issued, and what a check says of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from provision.components.certificates import checks, exports
from provision.report.model import Verdict
from provision.site.models import Access, Node

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
AUTHORITY = exports.make_authority(NOW)


def node(name: str = "g1", address: str | None = "192.0.2.11") -> Node:
    return Node(name, "gpu", frozenset({"worker"}), Access(), address)


def issued(authority: bytes = AUTHORITY, days: int = 397, name: str = "g1") -> x509.Certificate:
    return x509.load_pem_x509_certificate(exports.issue(authority, node(name), days, NOW))


def authority(pem: bytes = AUTHORITY) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def test_the_authoritys_certificate_holds_no_key() -> None:
    assert b"PRIVATE KEY" in AUTHORITY
    assert "PRIVATE KEY" not in exports.authority_certificate(AUTHORITY)


def test_a_certificate_is_for_the_names_and_addresses_of_its_node() -> None:
    names = issued().extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["g1", "localhost"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "192.0.2.11"]
    assert (
        exports.alternative_names(node())
        == "DNS:g1, DNS:localhost, IP Address:127.0.0.1, IP Address:192.0.2.11"
    )


def test_names_are_written_as_openssl_prints_them() -> None:
    """Compared with `openssl x509 -ext subjectAltName`: eight groups, capitals, no leading zeros."""
    assert exports.alternative_names(node(address="2001:db8::a:1")).endswith(
        "IP Address:2001:DB8:0:0:0:0:A:1"
    )
    assert exports.alternative_names(node(address=None)) == "DNS:g1, DNS:localhost, IP Address:127.0.0.1"


def test_a_certificate_never_outlives_its_authority() -> None:
    late = NOW + timedelta(days=3600)
    own = x509.load_pem_x509_certificate(exports.issue(AUTHORITY, node(), 397, late))
    assert own.not_valid_after_utc == authority().not_valid_after_utc


def test_a_good_certificate_passes() -> None:
    assert checks.judge(authority(), issued(), "g1", NOW).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("own", "name", "when", "said"),
    [
        (issued(exports.make_authority(NOW)), "g1", NOW, "not signed by the cluster's authority"),
        (issued(name="g2"), "g1", NOW, "for g2, localhost"),
        (issued(days=30), "g1", NOW + timedelta(days=17), "at its end"),
        (issued(), "g1", NOW - timedelta(days=1), "not valid yet"),
    ],
)
def test_a_certificate_that_is_wrong_fails_and_says_how(
    own: x509.Certificate, name: str, when: datetime, said: str
) -> None:
    found = checks.judge(authority(), own, name, when)
    assert found.verdict is Verdict.FAIL
    assert said in str(found.read)


def test_an_authority_near_its_end_is_told_half_a_year_before() -> None:
    when = NOW + timedelta(days=3650 - 179)
    own = x509.load_pem_x509_certificate(exports.issue(AUTHORITY, node(), 397, when))
    found = checks.judge(authority(), own, "g1", when)
    assert found.verdict is Verdict.WARN
    assert "2036-02-27" in str(found.read)
