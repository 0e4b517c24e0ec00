"""One munge key on all nodes, and a munged that has read it."""

from __future__ import annotations

from provision.components.munge import exports
from provision.components.restarts import restarting
from provision.engine import ops
from provision.engine.deploy import Context, step


@step("*")
def node(on: Context) -> None:
    """Key and daemon. The key comes before anything of Slurm's, and munged is restarted before it."""
    ops.packages(*on.profile.packages("munge"))
    ops.directory("/etc/munge", mode="700", user="munge", group="munge")
    ops.file(
        exports.KEY,
        on.secrets["munge.key"],
        mode="400",
        user="munge",
        group="munge",
        secret=True,
        comment=None,
    )
    unit = on.profile.unit("munge")
    ops.unit(unit, reads=[exports.KEY, restarting(unit)])
