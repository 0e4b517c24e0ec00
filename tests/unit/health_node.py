"""Readings of a node with two H100 that is well, as tests take them apart."""

from __future__ import annotations

from typing import Any

from provision.health.limits import Limits, load
from provision.health.readings import Absent, Device

SITE = {
    "gpus": 2,
    "model": "h100-sxm",
    "driver": "580.95.05",
    "mig": "none",
    "hardware": {"cpus": 64, "memory": 256000},
    "real_memory": 250000,
    "numa": 2,
    "governor": "performance",
    "nvme": 1,
    "swap": False,
    "services": ["sshd", "slurmd"],
    "ports": {"mlx5_0": 400.0},
    "nic_firmware": {"BOARD": "28.39"},
    "mrrs": 4096,
    "roce": {"mtu": 4096, "gid_index": 3},
    "topology": {"GPU0": {"GPU1": "NV18"}},
}


def limits(**over: Any) -> Limits:
    return load({**SITE, **over})


def gpu(index: int) -> Device:
    values: dict[str, Any] = {
        "index": index,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": f"GPU-{index}",
        "pci.bus_id": f"0000:{0x1B + index:02x}:00.0",
        "vbios_version": "96.00.01",
        "inforom.checksum_validation": "valid",
        "ecc.mode.current": "Enabled",
        "ecc.mode.pending": "Enabled",
        "ecc.errors.uncorrected.volatile.total": 0,
        "ecc.errors.uncorrected.aggregate.sram": 0,
        "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded": False,
        "ecc.errors.corrected.aggregate.sram": 12,
        "ecc.errors.corrected.aggregate.dram": 0,
        "remapped_rows.pending": False,
        "remapped_rows.failure": False,
        "remapped_rows.uncorrectable": 0,
        "remapped_rows.histogram.none": 0,
        "channel_repair_pending": False,
        "tpc_repair_pending": False,
        "unrepairable_memory": False,
        "retired_pages.single_bit_ecc.count": 0,
        "retired_pages.double_bit.count": 0,
        "retired_pages.pending": False,
        "gpu_recovery_action": "None",
        "fabric.state": "Completed",
        "fabric.status": "Success",
        "nvlink.links": [{"link": n, "up": True, "speed": 26.562} for n in range(18)],
        "nvlink.errors": [
            {
                "link": n,
                **{
                    f"{k}.{p}": v
                    for k in ("replay", "recovery", "crc")
                    for p, v in (("delta", 0), ("seconds", 60.0))
                },
            }
            for n in range(18)
        ],
        "pcie.link.width.current": 16,
        "pcie.link.width.max": 16,
        "pcie.link.gen.current": 5,
        "pcie.link.gen.max": 5,
        "pcie.replays.delta": 0,
        "pcie.replays.seconds": 600.0,
        "clocks_event_reasons.hw_slowdown": "Not Active",
        "clocks_event_reasons.hw_thermal_slowdown": "Not Active",
        "clocks_event_reasons.hw_power_brake_slowdown": "Not Active",
        "clocks_event_reasons.sw_thermal_slowdown": "Not Active",
        "clocks_event_reasons.sw_power_cap": "Not Active",
        "utilization.gpu": 100,
        "clocks.sm": 1980,
        "temperature.gpu": 45,
        "temperature.gpu.tlimit": 42,
        "temperature.tlimit.slowdown": -2,
        "enforced.power.limit": 700.0,
        "power.default_limit": 700.0,
        "persistence_mode": "Enabled",
        "mig.mode.current": "Disabled",
        "mig.mode.pending": "Disabled",
        "compute_mode": "Default",
        "processes": [],
        "memory.used": 4,
        "memory.idle": 4,
    }
    return Device(f"GPU {index}", values, "NVML")


def port() -> Device:
    values = {
        "device": "mlx5_0",
        "state": "ACTIVE",
        "phys_state": "LinkUp",
        "rate": 400.0,
        "link_layer": "Ethernet",
        "fw_ver": "28.39",
        "board_id": "BOARD",
        "mrrs": 4096,
        "flaps": 0,
        "symbol_error": 3,
        "symbol_error.delta": 0,
        "module.temperature": 50,
        "roce.mtu": 4096,
        "roce.gid_types": {"3": "RoCE v2"},
    }
    return Device("mlx5_0:1", values, "sysfs")


def node() -> Device:
    gpus = [gpu(0), gpu(1), gpu(2)][:2]
    values: dict[str, Any] = {
        "nvml": "ok",
        "gpus": gpus,
        "lost": [],
        "attached_gpus": Absent("NVML counts those it sees"),
        "pci.gpus": [each["pci.bus_id"] for each in gpus],
        "driver_version": "580.95.05",
        "module.version": "580.95.05",
        "library.version": "580.95.05",
        "fabricmanager.version": "580.95.05",
        "kernel.events": [],
        "nvswitches": 4,
        "services": {"sshd": "active", "slurmd": "active", "nvidia-fabricmanager": "active"},
        "services.restarts": {},
        "p2p": {"GPU0-GPU1 read": "OK", "GPU1-GPU0 read": "OK"},
        "topology": {"GPU0": {"GPU1": "NV18"}, "GPU1": {"GPU0": "NV18"}},
        "aer": [Device("0000:1b:00.0", {"aer.fatal.delta": 0, "aer.nonfatal.delta": 0})],
        "bridges": [Device("0000:10:00.0", {"acs.redirect": False})],
        "iommu": "passthrough",
        "virtual": None,
        "ports": [port()],
        "nics": [Device("eth0", {"flaps": 0})],
        "modules": ["nvidia", "nvidia_peermem"],
        "dmabuf": True,
        "devices": 2,
        "libraries": {"libcuda.so.1": "ok"},
        "cuda": {"GPU 0": "ok"},
        "container": "ok",
        "numa.nodes": 2,
        "cpus": 64,
        "memory.total": 256000,
        "memory.available": 252000,
        "swap.total": 0,
        "shm.used": 10,
        "governors": ["performance"],
        "edac": [Device("mc0", {"ue": 0, "ce": 0})],
        "pstore": [],
        "bmc.events": [],
        "nvme": [
            Device(
                "nvme0",
                {"state": "live", "critical_warning": 0, "available_spare": 100, "spare_threshold": 10},
            )
        ],
        "filesystems": [
            Device("/", {"mounted": True, "read_only": False, "writable": "yes", "used": 0.4, "inodes": 0.1})
        ],
        "clock.synchronised": True,
        "clock.offset_ms": 0.3,
        "clocksource": "tsc",
        "processes.stuck": [],
        "device.holders": [],
        "jobs": 0,
        "own_name": "192.0.2.1",
        "slurm": Device("gpu-1", {"state": "IDLE", "reason": None}),
    }
    return Device("gpu-1", values)
