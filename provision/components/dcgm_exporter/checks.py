"""Does DCGM's exporter tell all that it was asked for? One that cannot profile leaves holes without a word."""

from __future__ import annotations

from provision.components.dcgm_exporter import exports
from provision.components.prometheus.exports import CURL, url
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, skip, unknown
from provision.verify.http import get


@check("dcgm-fields", role="worker")
def delivered(at: Target) -> Found:
    """Every field that was wished for has a sample."""
    if at.node.gpu is None:
        return skip("no GPU here")
    address = f"{url(at.node, exports.PORT)}/metrics"
    answer = get(at.host, address, CURL, seconds=30)
    unit = at.profile.unit("dcgm-exporter")
    if answer.refused:
        return Found(
            Verdict.FAIL, "nothing listens", "DCGM's metrics", f"journalctl -u {unit}", source=address
        )
    if answer.text is None:
        return unknown(answer.error, source=address)
    wished = exports.fields(at.site, at.node)
    missing = missing_fields(answer.text, wished)
    if not missing:
        return Found(Verdict.PASS, f"{len(wished)} fields", f"{len(wished)} fields", source=address)
    return Found(
        Verdict.FAIL,
        f"without {', '.join(missing)}",
        f"{len(wished)} fields",
        f"journalctl -u {unit} says why; another profiler, MIG or a missing capability: "
        "`monitoring: {dcgm: {profiling: false}}`",
        source=address,
    )


def missing_fields(text: str, wished: list[str]) -> list[str]:
    """Those of `wished` that have no sample in Prometheus' text format."""
    told = {line.split("{", 1)[0].split(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")}
    return [name for name in wished if name not in told]
