"""Puts Grafana on the first monitor, from its makers' repository; what people make there themselves stays."""

from __future__ import annotations

from provision.components.certificates import exports as certificates
from provision.components.grafana import exports
from provision.components.grafana.settings import GrafanaSettings
from provision.components.vendor import GRAFANA, repository
from provision.engine import ops
from provision.engine.deploy import Context, step


@step("monitor", after=[("certificates", "self"), ("prometheus", "self")])
def monitor(on: Context) -> None:
    if on.node.name != exports.first_monitor(on.site).name:
        return
    repository(on, GRAFANA)
    ops.packages(*on.profile.packages("grafana"))
    chosen = on.settings(GrafanaSettings)
    ops.file(exports.PASSWORD, on.secrets["grafana.password"], mode="600", secret=True)
    ops.file(
        exports.DATASOURCE,
        exports.datasource_yml(on.site, on.node, on.secrets["monitoring.password"]),
        mode="640",
        group="grafana",
        secret=True,
    )
    ops.file(exports.PROVIDER, exports.provider_yml())
    ops.directory(exports.DASHBOARD_FOLDER)
    for path, text in exports.dashboards().items():
        ops.file(path, text, comment=None)  # Grafana looks every ten seconds
    ops.file(exports.DROPIN, exports.dropin(on.node, chosen))
    reads = [exports.DROPIN, exports.DATASOURCE, exports.PROVIDER, exports.PASSWORD, certificates.CERTIFICATE]
    ops.unit(exports.UNIT, reads=reads)
