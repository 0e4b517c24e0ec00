"""chrony on every node; heads are the source for all others."""

from __future__ import annotations

import shlex

from provision.components.restarts import restarting
from provision.components.time import exports
from provision.engine import ops
from provision.engine.deploy import Context, step

SYNCHRONISED = 60  # seconds: munge and Slurm come next, and refuse a clock that is far off


@step("head")
def source(on: Context) -> None:
    """The time that all others follow."""
    _chrony(on)


@step("*", after=[("time", "head")])
def follower(on: Context) -> None:
    """After the heads: a source that does not answer yet is only asked again a poll later."""
    if not on.node.has("head") and _chrony(on):
        ops.wait(
            "clock synchronised",
            test="chronyc -n tracking | grep -q '^Leap status *: Normal'",
            timeout=SYNCHRONISED,
        )


def _chrony(on: Context) -> bool:
    """chrony runs, and nothing else that sets the clock; whether it was started anew."""
    ops.packages(*on.profile.packages("time"))
    others = shlex.join(exports.OTHERS)
    ops.ensure(
        "no other time daemon",
        test=f"! systemctl is-active {others} | grep -qx active",
        make=f"for u in {others}; do ! systemctl -q is-active $u || systemctl disable --now $u; done",
    )
    conf = on.profile.path("time")
    ops.file(conf, exports.chrony_conf(on.site, on.node, on.profile), validate="chronyd -p -f {} >/dev/null")
    unit = on.profile.unit("time")
    return ops.unit(unit, reads=[conf, restarting(unit)])
