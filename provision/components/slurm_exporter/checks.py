"""Does Slurm's exporter answer, and did Slurm answer it?"""

from __future__ import annotations

import re

from provision.components.slurm_exporter import exports
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, skip, unknown

_OLDEST = 300  # seconds
_UP = re.compile(r'^slurm_source_up\{source="(\w+)"\} ([\d.]+)$', re.MULTILINE)


@check("slurm-metrics", role="head")
def metrics(at: Target) -> Found:
    """The file is fresh and every question was answered."""
    if at.node.name != at.site.head.name:
        return skip(f"Slurm's exporter runs on {at.site.head.name}")
    path = f"{at.profile.path('node-exporter.textfiles')}/{exports.FILE}"
    answer = at.host.run(f"echo $(($(date +%s) - $(stat -c %Y {path}))) && cat {path}")
    if answer.rc != 0 and "No such file" in answer.stderr:
        return Found(Verdict.FAIL, "no metrics", "fresh metrics", _action(), source=path)
    age, _, text = answer.stdout.partition("\n")
    sources = dict(_UP.findall(text))
    if answer.rc != 0 or not age.lstrip("-").isdigit() or not sources:
        return unknown(answer.stderr.strip() or "the file holds no metrics of Slurm", source=path)
    silent = sorted(name for name, up in sources.items() if float(up) != 1)
    read = f"{age} s old" if int(age) > _OLDEST else "fresh"
    if silent:
        read += f", no answer about {', '.join(silent)}"
    verdict = Verdict.PASS if read == "fresh" else Verdict.FAIL
    return Found(verdict, read, "fresh", None if verdict is Verdict.PASS else _action(), source=path)


def _action() -> str:
    return f"journalctl -u {exports.SERVICE}"
