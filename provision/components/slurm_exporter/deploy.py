"""Puts Slurm's exporter on the first head."""

from __future__ import annotations

from provision.components.slurm_exporter import exports
from provision.components.slurm_exporter.settings import SlurmExporterSettings
from provision.engine import ops
from provision.engine.deploy import Context, step


@step("head", after=[("slurm", "self"), ("prometheus", "self")])
def head(on: Context) -> None:
    if not on.first_head:
        return
    textfiles = on.profile.path("node-exporter.textfiles")
    units = {
        f"/etc/systemd/system/{exports.SERVICE}": exports.service(textfiles),
        f"/etc/systemd/system/{exports.TIMER}": exports.timer(on.settings(SlurmExporterSettings).interval),
    }
    ops.packages(*on.profile.packages("prometheus-client"))
    ops.directory("/usr/local/lib/provision")
    ops.file(exports.SCRIPT, exports.script(), validate="python3 -m py_compile {}")
    for path, text in units.items():
        ops.file(path, text)
    ops.unit(exports.TIMER, reads=list(units))
