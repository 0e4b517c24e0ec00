"""What DCGM's exporter is made of: the fields that a GPU model can tell, and how it is reached."""

from __future__ import annotations

from provision.components.certificates import exports as certificates
from provision.components.dcgm_exporter.settings import DcgmExporterSettings
from provision.components.exported import Port, Scrape
from provision.components.prometheus.exports import listen, web_config
from provision.engine.deploy import render
from provision.profiles.gpu import gpu_model
from provision.site.models import Node

PORT = 9400
PORTS = (Port(PORT, "worker", "DCGM exporter"),)
SCRAPE = (Scrape("dcgm", "worker", PORT),)
FIELDS = "/etc/provision/dcgm-fields.csv"

# field, type in Prometheus, meaning (DCGM API reference, field identifiers); what the health agent does not tell
_FIELDS = (
    ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "counter", "NVLink bandwidth of all lanes"),
    ("DCGM_FI_DEV_MEMORY_TEMP", "gauge", "Memory temperature in C"),
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", "Energy in mJ since boot"),
    ("DCGM_FI_DEV_FB_USED", "gauge", "Frame buffer used in MiB"),
    ("DCGM_FI_DEV_XID_ERRORS", "gauge", "Last XID"),
)
# The profiling module knows data centre GPUs from Volta on (DCGM user guide, profiling metrics).
_PROFILING = (
    ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", "Ratio of time in which the graphics engine was active"),
    ("DCGM_FI_PROF_SM_ACTIVE", "gauge", "Ratio of cycles in which an SM had a warp"),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge", "Ratio of cycles in which the tensor pipe was active"),
    ("DCGM_FI_PROF_DRAM_ACTIVE", "gauge", "Ratio of cycles in which memory sent or received"),
)


def fields(node: Node, settings: DcgmExporterSettings) -> list[str]:
    """Names of the fields that `node`'s GPUs are asked for; a model that is not known is not profiled."""
    return [name for name, _, _ in _chosen(node, settings)]


def fields_csv(node: Node, settings: DcgmExporterSettings) -> str:
    return "".join(f"{name}, {kind}, {meaning}.\n" for name, kind, meaning in _chosen(node, settings))


def _chosen(node: Node, settings: DcgmExporterSettings) -> list[tuple[str, str, str]]:
    known = node.gpu is not None and gpu_model(node.gpu.model) is not None
    return [*_FIELDS, *(_PROFILING if known and settings.profiling else ())]


def dropin(binary: str, unit: str, node: Node) -> str:
    """The systemd drop-in that starts the exporter with these fields, by TLS and password."""
    credential, _ = certificates.credentials(unit)
    words = [binary, "-f", FIELDS, "--address", listen(node, PORT), "--web-config-file", web_config(unit)]
    return render("prometheus", "dropin.conf.j2", command=" ".join(words), credential=credential)
