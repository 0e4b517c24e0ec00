"""Puts the IPMI exporter on every node."""

from __future__ import annotations

from provision.components.certificates import exports as certificates
from provision.components.ipmi_exporter import exports
from provision.components.prometheus.exports import web_config, web_yml
from provision.engine import ops
from provision.engine.deploy import Context, step


@step("*", after=[("prometheus", "self")])
def node(on: Context) -> None:
    unit = on.profile.unit("ipmi-exporter")
    web, dropin = web_config(unit), f"/etc/systemd/system/{unit}.service.d/provision.conf"
    ops.packages(*on.profile.packages("ipmi-exporter"))
    ops.file(web, web_yml(unit, on.secrets["monitoring.password"]), mode="600", secret=True)
    ops.file(dropin, exports.dropin(on.profile.path("ipmi-exporter"), unit, on.node))
    ops.unit(unit, reads=[web, dropin, certificates.CERTIFICATE])
