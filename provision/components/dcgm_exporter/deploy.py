"""Puts DCGM's exporter on nodes with GPUs."""

from __future__ import annotations

from provision.components.dcgm_exporter import exports
from provision.components.prometheus.service import serve
from provision.engine import ops
from provision.engine.deploy import Context, step


@step("worker", after=[("prometheus", "self")])
def worker(on: Context) -> None:
    if on.node.gpu is None:
        return
    unit = on.profile.unit("dcgm-exporter")
    ops.packages(*on.profile.packages("dcgm-exporter"))
    ops.file(exports.FIELDS, exports.fields_csv(on.site, on.node))
    serve(on, unit, exports.dropin(on.profile.path("dcgm-exporter"), unit, on.node), reads=[exports.FIELDS])
