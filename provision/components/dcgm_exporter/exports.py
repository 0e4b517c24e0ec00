"""What DCGM's exporter is made of: the fields that a GPU model can tell, and how it is reached."""

from __future__ import annotations

from provision.components.certificates import exports as certificates
from provision.components.dcgm_exporter.settings import DcgmExporterSettings
from provision.components.exported import Port, Scrape
from provision.components.nvidia.settings import NvidiaSettings
from provision.components.prometheus.exports import listen, web_config
from provision.engine.deploy import render
from provision.profiles.gpu import gpu_model
from provision.site.models import Node, Site

PORT = 9400
PORTS = (Port(PORT, "worker", "DCGM exporter"),)
SCRAPE = (Scrape("dcgm", "worker", PORT),)
FIELDS = "/etc/provision/dcgm-fields.csv"

# field, type in Prometheus, meaning (DCGM API reference, field identifiers); what the health agent does not tell
_FIELDS = (
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", "Energy in mJ since boot"),
    ("DCGM_FI_DEV_FB_USED", "gauge", "Frame buffer used in MiB"),
    ("DCGM_FI_DEV_XID_ERRORS", "gauge", "Last XID"),
)
_NVLINK = (("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "counter", "NVLink bandwidth of all lanes"),)
_HBM = (("DCGM_FI_DEV_MEMORY_TEMP", "gauge", "Memory temperature in C"),)
# The profiling module knows data centre GPUs from Volta on (DCGM user guide, profiling metrics).
_PROFILING = (
    ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", "Ratio of time in which the graphics engine was active"),
    ("DCGM_FI_PROF_SM_ACTIVE", "gauge", "Ratio of cycles in which an SM had a warp"),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge", "Ratio of cycles in which the tensor pipe was active"),
    ("DCGM_FI_PROF_DRAM_ACTIVE", "gauge", "Ratio of cycles in which memory sent or received"),
)


def fields(site: Site, node: Node) -> list[str]:
    """Names of the fields that `node`'s GPUs are asked for, no more than they can tell.

    A model that is not known is asked for what every GPU has. NVLink counts nothing where a GPU is divided (NVIDIA
    Multi-Instance GPU User Guide, "Application considerations": no peers by NVLink); memory has a temperature where it
    is HBM (nvidia-smi, temperature.memory).
    """
    return [name for name, _, _ in _chosen(site, node)]


def fields_csv(site: Site, node: Node) -> str:
    return "".join(f"{name}, {kind}, {meaning}.\n" for name, kind, meaning in _chosen(site, node))


def _chosen(site: Site, node: Node) -> list[tuple[str, str, str]]:
    model = gpu_model(node.gpu.model) if node.gpu is not None else None
    if model is None:
        return [*_FIELDS]
    profiled = site.settings("dcgm_exporter", node, DcgmExporterSettings).profiling
    return [
        *_FIELDS,
        *(_NVLINK if model.nvlinks and not _divided(site, node) else ()),
        *(_HBM if model.hbm else ()),
        *(_PROFILING if profiled else ()),
    ]


def _divided(site: Site, node: Node) -> bool:
    """Whether the site wants MIG on `node`."""
    return site.enabled("nvidia") and site.settings("nvidia", node, NvidiaSettings).mig != "none"


def dropin(binary: str, unit: str, node: Node) -> str:
    """The systemd drop-in that starts the exporter with these fields, by TLS and password."""
    credential, _ = certificates.credentials(unit)
    words = [binary, "-f", FIELDS, "--address", listen(node, PORT), "--web-config-file", web_config(unit)]
    return render("prometheus", "dropin.conf.j2", command=" ".join(words), credential=credential)
