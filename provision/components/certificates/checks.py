"""Is the node's certificate right, of the cluster's authority, and valid for long enough?"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from provision.components.certificates import exports
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, unknown

_RENEW = timedelta(days=14)  # a node's certificate that is this near its end has missed its renewal
_AUTHORITY_ENDS = timedelta(days=180)


@check("certificate")
def certificate(at: Target) -> Found:
    """Signed by the authority whose certificate is on this node, for this node's name, with days left."""
    answer = at.host.run(f"cat {exports.AUTHORITY} {exports.CERTIFICATE}")
    if answer.rc != 0:
        if "No such file" in answer.stderr:
            return Found(Verdict.FAIL, "no certificate", "one of the cluster's authority", "provision apply")
        return unknown(answer.stderr.strip() or f"cat: exit status {answer.rc}", source=exports.CERTIFICATE)
    try:
        authority, own = x509.load_pem_x509_certificates(answer.stdout.encode())
    except ValueError:
        return unknown("two certificates were expected, none or others were read", source=exports.CERTIFICATE)
    return judge(authority, own, at.node.name, datetime.now(UTC))


def judge(authority: x509.Certificate, own: x509.Certificate, name: str, now: datetime) -> Found:
    """What the two certificates of a node are worth at `now`. Pure."""
    faults = [
        *_signature(authority, own),
        *([] if name in _dns_names(own) else [f"for {', '.join(_dns_names(own)) or 'nobody'}"]),
        *(["not valid yet"] if now < own.not_valid_before_utc else []),
        *(["at its end"] if own.not_valid_after_utc - now < _RENEW else []),
    ]
    read = f"valid until {own.not_valid_after_utc:%Y-%m-%d}"
    expected = f"of the cluster's authority, for {name}, {_RENEW.days} days left"
    if faults:
        return Found(
            Verdict.FAIL,
            f"{read}, {', '.join(faults)}",
            expected,
            "provision apply --component certificates",
            source=exports.CERTIFICATE,
        )
    if authority.not_valid_after_utc - now < _AUTHORITY_ENDS:
        return Found(
            Verdict.WARN,
            f"the authority ends on {authority.not_valid_after_utc:%Y-%m-%d}",
            f"{_AUTHORITY_ENDS.days} days left",
            "remove /var/lib/provision/secrets/ca.pem from the head and its copy beside the site file, then "
            "provision apply: all certificates are made anew",
            source=exports.AUTHORITY,
        )
    return Found(Verdict.PASS, read, expected, source=exports.CERTIFICATE)


def _signature(authority: x509.Certificate, own: x509.Certificate) -> list[str]:
    try:
        own.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return ["not signed by the cluster's authority"]
    return []


def _dns_names(own: x509.Certificate) -> list[str]:
    try:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.DNSName)
