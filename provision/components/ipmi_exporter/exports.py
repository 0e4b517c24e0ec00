"""What the IPMI exporter is made of; it asks the BMC of its own node."""

from __future__ import annotations

from provision.components.certificates import exports as certificates
from provision.components.exported import Port, Scrape
from provision.components.prometheus.exports import listen, web_config
from provision.engine.deploy import render
from provision.site.models import Node

PORT = 9290
PORTS = (Port(PORT, "*", "IPMI exporter"),)
SCRAPE = (Scrape("ipmi", "*", PORT),)


def dropin(binary: str, unit: str, node: Node) -> str:
    """The systemd drop-in; root, because the BMC's device is root's."""
    credential, _ = certificates.credentials(unit)
    words = [binary, f"--web.config.file={web_config(unit)}", f"--web.listen-address={listen(node, PORT)}"]
    text = render("prometheus", "dropin.conf.j2", command=" \\\n  ".join(words), credential=credential)
    return f"{text}User=root\n"
