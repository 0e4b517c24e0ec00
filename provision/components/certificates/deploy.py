"""Gives every node the authority's certificate and one of its own, renewed long before it ends."""

from __future__ import annotations

from shlex import quote

from provision.components.certificates import exports
from provision.components.certificates.settings import CertificatesSettings
from provision.engine import ops
from provision.engine.deploy import Context, step

# One stream, key first; the certificate last, so that a pair that was interrupted is seen by its key.
_INSTALL = f"""set -eu; umask 077
t=$(mktemp -d {exports.DIRECTORY}/.new.XXXXXX); trap 'rm -rf "$t"' EXIT
cat >"$t/pem"
openssl pkey -in "$t/pem" -out "$t/node.key"
openssl x509 -in "$t/pem" -out "$t/node.crt"
chmod 600 "$t/node.key"; chmod 644 "$t/node.crt"; sync "$t"/node.*
mv -f "$t/node.key" {exports.KEY}
mv -f "$t/node.crt" {exports.CERTIFICATE}"""


def _valid(on: Context, seconds: int) -> str:
    """Shell: exits 0 when certificate and key are a pair, for this node, of this authority, and last long enough."""
    crt, key, names = exports.CERTIFICATE, exports.KEY, quote(exports.alternative_names(on.node))
    return f"""[ -s {crt} ] && [ -s {key} ] && [ "$(stat -c %a%U {key})" = 600root ] &&
openssl verify -CAfile {exports.AUTHORITY} {crt} >/dev/null 2>&1 &&
openssl x509 -in {crt} -noout -checkend {seconds} >/dev/null &&
[ "$(openssl x509 -in {crt} -noout -ext subjectAltName | sed -n '2s/^ *//p')" = {names} ] &&
[ "$(openssl x509 -in {crt} -noout -pubkey)" = "$(openssl pkey -in {key} -pubout)" ] || exit 1"""


@step("*")
def node(on: Context) -> None:
    """The authority's key stays on the head; a node's key is made new with each certificate."""
    days = on.settings(CertificatesSettings).days
    ops.packages(*on.profile.packages("openssl"))
    ops.directory(exports.DIRECTORY)
    authority = on.secrets["ca.pem"]
    ops.file(exports.AUTHORITY, exports.authority_certificate(authority), comment=None)
    ops.ensure(
        f"certificate of {on.node.name}",
        test=_valid(on, days * 86400 // 3),
        make=_INSTALL,
        stdin=lambda: exports.issue(authority, on.node, days),
        requires="openssl",
        owns=(exports.KEY, exports.CERTIFICATE),
    )
