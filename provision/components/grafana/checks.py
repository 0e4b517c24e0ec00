"""Does Grafana answer, by TLS and to those alone who log in, and can it ask Prometheus?"""

from __future__ import annotations

from shlex import quote

from provision.components.grafana import exports
from provision.components.prometheus.exports import url
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, expect, skip, unknown

_REFUSED = 7  # curl: nothing listens there


@check("grafana", role="monitor")
def answers(at: Target) -> Found:
    """Its health page answers by TLS, its dashboards do not without a login."""
    if at.node.name != exports.first_monitor(at.site).name:
        return skip("Grafana runs on the first monitor")
    base = url(at.node, exports.settings(at.site).port)
    ask = "curl -sS --noproxy '*' --globoff --max-time 20 --cacert /etc/provision/tls/ca.crt -o /dev/null"
    seen: dict[str, str] = {}
    for page in ("/api/health", "/api/search"):
        status = at.host.run(f"{ask} -w '%{{http_code}}' {quote(base + page)}")
        if status.rc == _REFUSED:
            action = f"journalctl -u {exports.UNIT}"
            return Found(Verdict.FAIL, "nothing listens", "Grafana answers", action, source=base)
        if status.rc != 0:
            return unknown(status.stderr.strip() or f"curl: exit status {status.rc}", source=base)
        seen[page] = status.stdout.strip()
    return expect(
        f"health {seen['/api/health']}, without a login {seen['/api/search']}",
        "health 200, without a login 401",
        action=f"journalctl -u {exports.UNIT}; provision apply --component grafana",
        source=base,
    )
