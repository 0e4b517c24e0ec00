"""Puts the IPMI exporter on every node."""

from __future__ import annotations

from provision.components.ipmi_exporter import exports
from provision.components.prometheus.service import serve
from provision.engine import ops
from provision.engine.deploy import Context, step


@step("*", after=[("prometheus", "self")])
def node(on: Context) -> None:
    unit = on.profile.unit("ipmi-exporter")
    ops.packages(*on.profile.packages("ipmi-exporter"))
    serve(on, unit, exports.dropin(on.profile.path("ipmi-exporter"), unit, on.node))
