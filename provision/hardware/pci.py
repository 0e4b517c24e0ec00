"""PCI functions as /sys has them: there before any driver is."""

from __future__ import annotations

from dataclasses import dataclass

from provision.profiles.gpu import pci_model

NVIDIA, MELLANOX = 0x10DE, 0x15B3
_FIELDS = (
    *("vendor", "device", "class", "numa_node"),
    *("current_link_width", "max_link_width", "current_link_speed", "max_link_speed"),
)
# A line a function: address, then the fields, "-" for what it does not have.
QUERY = rf"""cd /sys/bus/pci/devices || exit 1
for d in *; do
  [ -e "$d/vendor" ] || continue
  printf '%s' "$d"
  for f in {" ".join(_FIELDS)}; do
    v=-; [ ! -r "$d/$f" ] || read -r v <"$d/$f"
    printf '|%s' "$v"
  done
  echo
done"""


@dataclass(frozen=True)
class Function:
    """One PCI function. Widths in lanes, speeds in GT/s; None where its link tells none."""

    address: str  # "0000:0b:00.0"
    vendor: int
    device: int
    kind: int  # class, subclass, interface: 0x030200 is a 3D controller
    numa: int | None
    width: int | None
    width_max: int | None
    speed: float | None
    speed_max: float | None

    @property
    def is_gpu(self) -> bool:
        """A display controller of NVIDIA: VGA or 3D."""
        return self.vendor == NVIDIA and self.kind >> 16 == 0x03

    @property
    def is_nvswitch(self) -> bool:
        return self.vendor == NVIDIA and self.kind >> 8 == 0x0680

    @property
    def is_nic(self) -> bool:
        return self.kind >> 16 == 0x02


def gpu_model_name(gpu: Function) -> str:
    """The model as a site file names it; "10de:1234" for one that is not known."""
    profile = pci_model(gpu.device)
    return profile.name if profile else f"{gpu.vendor:04x}:{gpu.device:04x}"


def parse(text: str) -> list[Function]:
    """What QUERY printed. Raises ValueError naming a line that is not of its form."""
    return [_function(line) for line in text.splitlines() if line.strip()]


def _function(line: str) -> Function:
    address, *values = line.split("|")
    if len(values) != len(_FIELDS):
        raise ValueError(f"not a PCI function: {line!r}")
    field = dict(zip(_FIELDS, values, strict=True))
    try:
        node = _number(field["numa_node"])
        return Function(
            address,
            int(field["vendor"], 16),
            int(field["device"], 16),
            int(field["class"], 16),
            None if node is None or node < 0 else node,
            _number(field["current_link_width"]),
            _number(field["max_link_width"]),
            _speed(field["current_link_speed"]),
            _speed(field["max_link_speed"]),
        )
    except ValueError as error:
        raise ValueError(f"not a PCI function: {line!r}: {error}") from error


def _number(text: str) -> int | None:
    return None if text in ("-", "") else int(text)


def _speed(text: str) -> float | None:
    """ "32.0 GT/s PCIe" is 32.0; bridges without a link say "Unknown"."""
    word = text.split()[0] if text.split() else "-"
    return None if word in ("-", "Unknown") else float(word)
