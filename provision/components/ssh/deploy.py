"""The ssh server of every node, reloaded and never restarted: sessions go on."""

from __future__ import annotations

from provision.components.ssh import exports
from provision.components.ssh.settings import SshSettings
from provision.engine import ops
from provision.engine.deploy import Context, step


@step("*")
def server(on: Context) -> None:
    ssh = on.settings(SshSettings)
    ops.packages(*on.profile.packages("ssh"))
    ops.file(exports.DROP_IN, exports.drop_in(ssh), validate="sshd -t -f {}")
    ops.unit(on.profile.unit("ssh"), reads=[exports.DROP_IN, "/etc/ssh/sshd_config"], reload=True)
