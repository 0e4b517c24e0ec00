"""Puts DCGM's exporter on nodes with GPUs."""

from __future__ import annotations

from provision.components.certificates import exports as certificates
from provision.components.dcgm_exporter import exports
from provision.components.dcgm_exporter.settings import DcgmExporterSettings
from provision.components.prometheus.exports import web_config, web_yml
from provision.engine import ops
from provision.engine.deploy import Context, step


@step("worker", after=[("prometheus", "self")])
def worker(on: Context) -> None:
    if on.node.gpu is None:
        return
    unit = on.profile.unit("dcgm-exporter")
    web, dropin = web_config(unit), f"/etc/systemd/system/{unit}.service.d/provision.conf"
    ops.packages(*on.profile.packages("dcgm-exporter"))
    ops.file(exports.FIELDS, exports.fields_csv(on.node, on.settings(DcgmExporterSettings)))
    ops.file(web, web_yml(unit, on.secrets["monitoring.password"]), mode="600", secret=True)
    ops.file(dropin, exports.dropin(on.profile.path("dcgm-exporter"), unit, on.node))
    ops.unit(unit, reads=[exports.FIELDS, web, dropin, certificates.CERTIFICATE])
