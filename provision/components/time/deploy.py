"""chrony on every node; heads are the source for all others."""

from __future__ import annotations

import shlex

from provision.components.time import exports
from provision.engine import ops
from provision.engine.deploy import Context, step


@step("*")
def clock(on: Context) -> None:
    ops.packages(*on.profile.packages("time"))
    others = shlex.join(exports.OTHERS)
    ops.ensure(
        "no other time daemon",
        test=f"! systemctl is-active {others} | grep -qx active",
        make=f"for u in {others}; do ! systemctl -q is-active $u || systemctl disable --now $u; done",
    )
    conf = on.profile.path("time")
    ops.file(conf, exports.chrony_conf(on.site, on.node, on.profile), validate="chronyd -p -f {} >/dev/null")
    ops.unit(on.profile.unit("time"), reads=[conf])
