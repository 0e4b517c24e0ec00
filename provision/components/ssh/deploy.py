"""The ssh server of every node, reloaded and never restarted: sessions go on."""

from __future__ import annotations

from shlex import quote

from provision.components.ssh import exports
from provision.components.ssh.settings import SshSettings
from provision.engine import ops
from provision.engine.deploy import Context, step


@step("*")
def server(on: Context) -> None:
    ssh = on.settings(SshSettings)
    ops.packages(*on.profile.packages("ssh"))
    # Asked before the file is in place: whether the user that nodes are reached as could still log in by key.
    login = "sshd -T -f {} -C " + quote(f"user={on.node.access.user},host=controller,addr=192.0.2.1")
    tests = ["sshd -t -f {}", f"{login} | grep -qx 'pubkeyauthentication yes'"]
    if on.node.access.user == "root":
        tests.append(f"! {login} | grep -qx 'permitrootlogin no'")
    ops.file(exports.DROP_IN, exports.drop_in(ssh), validate=f"({' && '.join(tests)})")
    ops.unit(on.profile.unit("ssh"), reads=[exports.DROP_IN, "/etc/ssh/sshd_config"], reload=True)
