"""A table of our own in the kernel's packet filter, loaded at boot by a unit of our own."""

from __future__ import annotations

from provision.components.firewall import exports
from provision.engine import ops
from provision.engine.deploy import Context, step

_OTHERS = "firewalld ufw"  # a second filter with rules of its own: a port that we open would stay shut


@step("*")
def rules(on: Context) -> None:
    ops.packages(*on.profile.packages("firewall"))
    ops.ensure(
        "no second firewall",
        test=f"! systemctl is-active {_OTHERS} | grep -qx active",
        make=f"for u in {_OTHERS}; do ! systemctl -q is-active $u || systemctl disable --now $u; done",
    )
    ruleset = exports.ruleset(on.site, on.node)
    ops.file(exports.RULES, ruleset, mode="640", validate="nft -c -f {}")
    ops.file(
        exports.UNIT, on.render("provision-firewall.service.j2", nft="/usr/sbin/nft", rules=exports.RULES)
    )
    ops.unit("provision-firewall")
    # Compared in the form in which the kernel gives it back, so that a rule added or lost by hand is seen.
    # One transaction replaces the table; connections that exist go on.
    ops.ensure(
        "live ruleset",
        test=f"live=$({exports.LIVE} 2>/dev/null)\n"
        f"wanted=$({exports.NORMALISED} <<'EOF'\n{ruleset}EOF\n) || exit 2\n"
        '[ "$live" = "$wanted" ]',
        make=f"nft -f {exports.RULES}",
        requires="nft",
    )
