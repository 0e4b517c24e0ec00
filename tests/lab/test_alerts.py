"""What goes wrong on a node reaches a webhook in time, and its end too; what this tool works on is silent."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.admitted import HEAD, OTHER, WORKER, Admitted, bad
from tests.lab.command import provision

SOON = 90  # seconds from the fault to the webhook
PORT = 9999
RECEIVER = f"""
import http.server, json
class Hook(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open("/run/told", "a") as file:
            for alert in told["alerts"]:
                file.write(json.dumps([alert["status"], alert["labels"]]) + "\\n")
        self.send_response(200); self.end_headers()
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", {PORT}), Hook).serve_forever()
"""

Told = Callable[..., bool]
CURL = "curl -sS --config /etc/provision/monitoring.curl"


@pytest.fixture
def told(admitted: Admitted, tmp_path: Path) -> Iterator[Told]:
    """A webhook on the head; asks whether an alert of this status, name and node, and other labels, has reached it."""
    text = Path(admitted.site).read_text()
    site = tmp_path / "lab.yml"
    changed, found = re.subn(
        r"(?m)^monitoring: .*$", f"monitoring: {{alerts: {{webhook: http://127.0.0.1:{PORT}/}}}}", text
    )
    assert found == 1
    site.write_text(changed)
    admitted.on(
        HEAD, f"cat >/run/hook.py <<'EOF'\n{RECEIVER}EOF\nsystemd-run -q --unit=hook python3 /run/hook.py"
    )
    applied = provision("apply", str(site), "--component", "prometheus")
    assert applied.rc == 0, bad(applied)

    def reached(status: str, alert: str, node: str, **others: str) -> bool:
        wanted = {"alertname": alert, "node": node, **others}
        lines = admitted.on(HEAD, "cat /run/told 2>/dev/null || [ ! -e /run/told ]").splitlines()
        heard = [json.loads(line) for line in lines]
        return any(state == status and wanted.items() <= labels.items() for state, labels in heard)

    yield reached
    admitted.on(HEAD, "systemctl stop hook; rm -f /run/told /run/hook.py")


def within(seconds: float, happened: Callable[[], bool], what: str) -> float:
    started = time.monotonic()
    while not happened():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what}"
        time.sleep(1)
    return time.monotonic() - started


def test_of_a_healthy_cluster_nothing_is_told_or_about_to_be(admitted: Admitted) -> None:
    """Alerts that wait for their time are pending as soon as their expression holds."""

    def alerts() -> list[dict[str, str]]:
        answer = json.loads(admitted.on(HEAD, f"{CURL} https://{HEAD}:9090/api/v1/alerts"))
        return [each["labels"] for each in answer["data"]["alerts"]]

    quiet = time.monotonic()  # since when; the nodes have just booted
    until = quiet + 300
    while time.monotonic() - quiet < 60:  # four evaluations of every rule
        if found := alerts():
            assert time.monotonic() < until, found
            quiet = time.monotonic()
        time.sleep(5)


def test_alerts_come_in_time_and_go_after_the_mend(
    admitted: Admitted, told: Told, record_property: Callable[[str, object], None]
) -> None:
    faults: dict[str, tuple[str, Callable[[], object], Callable[[], object]]] = {
        "NodeDown": (
            OTHER,
            lambda: admitted.lab.power_loss(OTHER),
            lambda: admitted.lab.start(OTHER),
        ),
        "FilesystemFull": (
            WORKER,
            lambda: admitted.lab.fault("fill-disk", WORKER),
            lambda: admitted.lab.fault("fill-disk", WORKER, undo=True),
        ),
        "SlurmControllerDown": (
            HEAD,
            lambda: admitted.on(HEAD, "systemctl stop slurmctld"),
            lambda: admitted.on(HEAD, "systemctl start slurmctld"),
        ),
    }
    for alert, (node, break_it, mend_it) in faults.items():
        break_it()
        took = within(SOON, lambda a=alert, n=node: told("firing", a, n), f"{alert} of {node}")
        record_property(alert, round(took, 1))
        mend_it()
        within(180, lambda a=alert, n=node: told("resolved", a, n), f"the end of {alert} of {node}")


def test_an_xid_reaches_the_webhook_and_its_end_once_it_is_dealt_with(
    admitted: Admitted, told: Told, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The kernel's message starts a reading: no timer of minutes stands between."""
    site = tmp_path / "lab.yml"
    site.write_text(f"{site.read_text()}health: {{act: false}}\n")
    applied = provision("apply", str(site), "--component", "health")
    assert applied.rc == 0, bad(applied)
    agent = "/usr/local/sbin/provision-health"
    fatal = {"alert": "GpuXidFatal", "node": WORKER}
    assert not told("firing", **fatal)
    admitted.lab.fault("xid", WORKER, xid=79)
    took = within(SOON, lambda: told("firing", **fatal), f"GpuXidFatal of {WORKER}")
    record_property("GpuXidFatal", round(took, 1))
    admitted.lab.fault("kernel-message", WORKER, undo=True)
    admitted.on(WORKER, f"{agent} acknowledge reset && systemctl start provision-health")
    within(180, lambda: told("resolved", **fatal), f"the end of GpuXidFatal of {WORKER}")


def test_a_node_under_maintenance_is_silent_until_it_is_back(admitted: Admitted, told: Told) -> None:
    mark = f"scontrol update nodename={OTHER}"
    admitted.on(HEAD, f"{mark} state=drain reason='rolling maintenance'")
    alerts = f"{CURL} https://{HEAD}:9093/api/v2/alerts"
    slurmd = {"name": "slurmd.service"}

    def state(alert: str, **others: str) -> list[str]:
        wanted = {"alertname": alert, "node": OTHER, **others}
        found = json.loads(admitted.on(HEAD, alerts))
        return [alert["status"]["state"] for alert in found if wanted.items() <= alert["labels"].items()]

    within(120, lambda: bool(state("NodeUnderMaintenance")), "the maintenance is known")
    admitted.on(OTHER, "systemctl stop slurmd")
    within(300, lambda: state("ServiceDown", **slurmd) == ["suppressed"], "slurmd's alert is held back")
    assert not told("firing", "ServiceDown", OTHER)
    admitted.on(HEAD, f"{mark} state=resume")
    within(
        180, lambda: told("firing", "ServiceDown", OTHER, **slurmd), "it is told once the maintenance is over"
    )
    admitted.on(OTHER, "systemctl start slurmd")
    within(180, lambda: told("resolved", "ServiceDown", OTHER, **slurmd), "its end")
