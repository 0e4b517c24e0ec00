"""Puts the agent on every node, and lets the timer and Slurm call it."""

from __future__ import annotations

from provision.components.health import exports
from provision.components.health.settings import HealthSettings
from provision.engine import ops
from provision.engine.deploy import Context, step

_COMPILED_TEST = f"""sum=$(sha256sum {exports.SOURCE} | cut -c1-64) || exit 1
[ -x {exports.COMPILED} ] && [ "$(cat {exports.COMPILED}.of 2>/dev/null)" = "$sum $(python3 -V)" ] || exit 1"""
_COMPILED_MAKE = f"""sum=$(sha256sum {exports.SOURCE} | cut -c1-64)
python3 -I {exports.SOURCE} compile {exports.COMPILED} || exit 1
printf '%s %s\\n' "$sum" "$(python3 -V)" >{exports.COMPILED}.of"""


@step("*", after=[("slurm", "self"), ("prometheus", "self"), ("storage", "self"), ("time", "self")])
def agent(on: Context) -> None:
    settings = on.settings(HealthSettings)
    ops.packages(*on.profile.packages("python"))
    ops.directory(exports.LIBRARY)
    ops.file(exports.SOURCE, exports.program())
    ops.ensure("agent with byte code", test=_COMPILED_TEST, make=_COMPILED_MAKE, requires="python3")
    ops.link(exports.COMMAND, exports.COMPILED)
    config = exports.config_json(on.site, on.lock, on.node, on.profile, dict(on.limits))
    ops.file(exports.CONFIG, config, comment=None)
    _slurm(on)
    unit, timer = (f"/etc/systemd/system/{exports.UNIT}.{kind}" for kind in ("service", "timer"))
    ops.file(unit, exports.service())
    ops.file(timer, exports.timer(settings))
    ops.unit(f"{exports.UNIT}.timer", reads=[timer, unit])
    follower = f"/etc/systemd/system/{exports.FOLLOWER}.service"
    ops.file(follower, exports.follower())
    ops.unit(f"{exports.FOLLOWER}.service", reads=[follower, exports.COMPILED])


def _slurm(on: Context) -> None:
    """Programs that slurmd calls without arguments."""
    if not (on.site.enabled("slurm") and on.node.has("worker")):
        return
    for path, verb in (
        (exports.SLURM_PROGRAM, "slurm"),
        (exports.PROLOG, "prolog"),
        (exports.EPILOG, "epilog"),
    ):
        ops.file(path, exports.wrapper(verb), mode="755")
