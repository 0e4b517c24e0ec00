"""Does Grafana answer, by TLS and to those alone who log in, and can it ask Prometheus?"""

from __future__ import annotations

from provision.components.certificates.exports import AUTHORITY
from provision.components.grafana import exports
from provision.components.prometheus.exports import url
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, expect, skip, unknown
from provision.verify.http import status


@check("grafana", role="monitor")
def answers(at: Target) -> Found:
    """Its health page answers by TLS, its dashboards do not without a login."""
    if at.node.name != exports.first_monitor(at.site).name:
        return skip("Grafana runs on the first monitor")
    base = url(at.node, exports.settings(at.site).port)
    seen: dict[str, str] = {}
    for page in ("/api/health", "/api/search"):
        answer = status(at.host, base + page, f"--cacert {AUTHORITY}")
        if answer.refused:
            action = f"journalctl -u {exports.UNIT}"
            return Found(Verdict.FAIL, "nothing listens", "Grafana answers", action, source=base)
        if answer.text is None:
            return unknown(answer.error, source=base)
        seen[page] = answer.text.strip()
    return expect(
        f"health {seen['/api/health']}, without a login {seen['/api/search']}",
        "health 200, without a login 401",
        action=f"journalctl -u {exports.UNIT}; provision apply --component grafana",
        source=base,
    )
