"""Does the IPMI exporter answer, and the BMC it?"""

from __future__ import annotations

import re

from provision.components.ipmi_exporter import exports
from provision.components.prometheus.exports import CURL, url
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, expect, unknown
from provision.verify.http import get

_UP = re.compile(r'^ipmi_up\{collector="([\w-]+)"\} ([\d.]+)$', re.MULTILINE)


@check("ipmi-answers")
def answers(at: Target) -> Found:
    """Every collector of the exporter got an answer from the BMC."""
    address = f"{url(at.node, exports.PORT)}/metrics"
    answer = get(at.host, address, CURL, seconds=60)
    unit = at.profile.unit("ipmi-exporter")
    if answer.refused:
        return Found(
            Verdict.FAIL, "nothing listens", "the BMC's metrics", f"journalctl -u {unit}", source=address
        )
    if answer.text is None:
        return unknown(answer.error, source=address)
    collectors = dict(_UP.findall(answer.text))
    if not collectors:
        return unknown("the answer holds no ipmi_up", source=address)
    silent = sorted(name for name, up in collectors.items() if float(up) != 1)
    return expect(
        f"no answer to {', '.join(silent)}" if silent else "the BMC answers",
        "the BMC answers",
        action="ipmitool mc info; a BMC that hangs: ipmitool mc reset cold",
        source=address,
    )
