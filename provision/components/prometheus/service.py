"""How a service of the Prometheus family is run: our arguments, TLS by the node's certificate, one password."""

from __future__ import annotations

from collections.abc import Sequence

from provision.components.certificates import exports as certificates
from provision.components.prometheus import exports
from provision.engine import ops
from provision.engine.deploy import Context


def serve(
    on: Context, unit: str, dropin: str, *, group: str | None = None, reads: Sequence[str] = ()
) -> None:
    """`unit` runs as `dropin` says; it belongs to `group`, or to root, and reads `reads` besides."""
    path, web = f"/etc/systemd/system/{unit}.service.d/provision.conf", exports.web_config(unit)
    content = exports.web_yml(unit, on.secrets["monitoring.password"])
    if group is None:
        ops.file(web, content, mode="600", secret=True)
    else:
        ops.file(web, content, mode="640", group=group, secret=True)
    ops.file(path, dropin)
    # It has a copy of the node's key, which must be that of the certificate.
    ops.unit(unit, reads=[*reads, path, web, certificates.CERTIFICATE])
