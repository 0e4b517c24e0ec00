"""The cluster's own certificate authority and the certificates that it gives to nodes. Pure, but for randomness."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from provision.engine.deploy import Secret
from provision.site.models import Node

DIRECTORY = "/etc/provision/tls"
AUTHORITY = f"{DIRECTORY}/ca.crt"
CERTIFICATE = f"{DIRECTORY}/node.crt"
KEY = f"{DIRECTORY}/node.key"  # root's alone: services get it by LoadCredential=

_AUTHORITY_DAYS = 3650
_BACKDATED = timedelta(hours=1)  # clocks of nodes that are not synchronised yet


def credentials(unit: str) -> tuple[str, str]:
    """The lines of a unit's [Service] that hand it the node's key, and where it finds it then."""
    return f"LoadCredential=node.key:{KEY}", f"/run/credentials/{unit}.service/node.key"


def make_authority(now: datetime | None = None) -> bytes:
    """A new authority: its key and its own certificate, PEM, one after the other."""
    key = ec.generate_private_key(ec.SECP256R1())
    start = now or datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"provision {start:%Y-%m-%d}")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - _BACKDATED)
        .not_valid_after(start + timedelta(days=_AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _key_pem(key) + certificate.public_bytes(serialization.Encoding.PEM)


SECRETS = (Secret("ca.pem", make=make_authority),)


def authority_certificate(authority: bytes) -> str:
    """The public part of what `make_authority` made, PEM."""
    certificate = x509.load_pem_x509_certificate(authority)
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def issue(authority: bytes, node: Node, days: int, now: datetime | None = None) -> bytes:
    """A new key for `node` and its certificate for server and client, PEM, one after the other."""
    issuer = x509.load_pem_x509_certificate(authority)
    issuer_key = serialization.load_pem_private_key(authority, password=None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    start = now or datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node.name)]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - _BACKDATED)
        .not_valid_after(min(start + timedelta(days=days), issuer.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName(_names(node)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
        )
        .sign(issuer_key, hashes.SHA256())
    )
    return _key_pem(key) + certificate.public_bytes(serialization.Encoding.PEM)


def alternative_names(node: Node) -> str:
    """The names that a node's certificate must be for, as `openssl x509 -ext subjectAltName` prints them."""
    written = {x509.DNSName: "DNS", x509.IPAddress: "IP Address"}
    return ", ".join(f"{written[type(name)]}:{_printed(name.value)}" for name in _names(node))


def _names(node: Node) -> list[x509.GeneralName]:
    """What the node is called by others, and by itself."""
    names: list[x509.GeneralName] = [x509.DNSName(node.name), x509.DNSName("localhost")]
    addresses = ["127.0.0.1", *([node.address] if node.address else [])]
    return [*names, *(x509.IPAddress(ipaddress.ip_address(address)) for address in addresses)]


def _printed(value: object) -> str:
    """OpenSSL prints an IPv6 address as eight groups of capital letters without leading zeros."""
    if isinstance(value, ipaddress.IPv6Address):
        return ":".join(f"{int(part, 16):X}" for part in value.exploded.split(":"))
    return str(value)


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
