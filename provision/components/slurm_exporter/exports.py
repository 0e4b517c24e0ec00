"""What Slurm's exporter is made of. It offers no port: the node exporter hands on the file that it writes."""

from __future__ import annotations

from importlib.resources import files

SCRIPT = "/usr/local/lib/provision/slurm-metrics"
SERVICE, TIMER = "provision-slurm-metrics.service", "provision-slurm-metrics.timer"
FILE = "slurm.prom"  # in the node exporter's folder


def script() -> str:
    return files("provision.components.slurm_exporter").joinpath("metrics.py").read_text()


def service(textfiles: str) -> str:
    """Asks once; as slurm, who may see all jobs and accounts."""
    return (
        "[Unit]\nDescription=Writes what Slurm says as metrics\nAfter=slurmctld.service\n\n"
        f"[Service]\nType=oneshot\nExecStart=/usr/bin/python3 {SCRIPT} {textfiles}/{FILE}\n"
        "TimeoutStartSec=150\nNice=10\n"
        "NoNewPrivileges=yes\nProtectHome=yes\nPrivateTmp=yes\n"
        f"ProtectSystem=strict\nReadWritePaths={textfiles}\n"
    )


def timer(interval: int) -> str:
    return (
        f"[Unit]\nDescription=Writes what Slurm says as metrics every {interval} s\n\n"
        f"[Timer]\nOnActiveSec=1\nOnUnitInactiveSec={interval}\nAccuracySec=1\n\n[Install]\nWantedBy=timers.target\n"
    )
