"""What goes together of NVIDIA's software, as data, and the rules that decide by it. Pure."""

from __future__ import annotations

import re
from datetime import date
from functools import cache
from typing import Literal

from pydantic import Field

from provision import packaged
from provision.profiles.gpu import Architecture, GpuProfile
from provision.site.base import Settings

Modules = Literal["open", "proprietary"]


class Driven(Settings):
    """What drives a generation of GPUs."""

    modules: list[Modules] = Field(min_length=1)  # the preferred kind first
    first: int
    last: int | None = None
    last_cuda: str | None = None  # the last toolkit that makes code for it
    source: str = Field(min_length=10)


class Switched(Settings):
    """NVSwitches between the GPUs of one node."""

    gpus: int = Field(ge=2)  # a node with so many has them
    generation: int = Field(ge=1, le=4)


class Branch(Settings):
    """A driver branch."""

    kind: Literal["long-term", "production", "new-feature"]
    cuda: str
    driver: str
    ends: str | None = Field(None, pattern=r"^\d{4}-\d{2}$")
    source: str = Field(min_length=10)

    def supported(self, today: date) -> bool:
        return self.ends is None or f"{today:%Y-%m}" <= self.ends


class Unbuildable(Settings):
    """Modules whose source does not fit newer kernels."""

    driver: str  # this one of its branch and older ones
    modules: Modules
    kernel: str  # the first that they do not fit
    source: str = Field(min_length=10)


class Carried(Settings):
    source: str
    carried_by: dict[str, str]


class Minor(Settings):
    source: str
    drivers: dict[int, str]


class Forward(Settings):
    source: str
    branches: dict[str, list[int]]  # CUDA release of the cuda-compat package -> branches it works with


class Compatibility(Settings):
    minor: Minor
    forward: Forward


class Image(Settings):
    image: str  # a regular expression for the whole name
    cuda: str | None = None
    source: str


class Rules(Settings):
    """The whole of nvidia.yml."""

    architectures: dict[Architecture, Driven]
    switched: dict[str, Switched]
    multi_node: list[str]  # GPU models whose NVLinks reach other nodes
    needs: dict[str, int]  # GPU model -> its first branch, where that is later than its architecture's
    branches: dict[int, Branch]
    unbuildable: list[Unbuildable]
    cuda: Carried
    compatibility: Compatibility
    images: list[Image]

    def driven(self, gpu: GpuProfile) -> Driven:
        return self.architectures[gpu.architecture]

    def switches(self, gpu: GpuProfile, count: int) -> Switched | None:
        """The NVSwitches of a node with `count` of these GPUs; None where it has none."""
        found = self.switched.get(gpu.name)
        return found if found is not None and count >= found.gpus else None

    def first(self, gpu: GpuProfile) -> int:
        """The first branch that drives `gpu`."""
        return self.needs.get(gpu.name, self.driven(gpu).first)

    def fits(self, gpu: GpuProfile, branch: int) -> bool:
        """Whether `branch` drives `gpu`."""
        driven = self.driven(gpu)
        return self.first(gpu) <= branch and (driven.last is None or branch <= driven.last)

    def choose(self, gpu: GpuProfile, today: date) -> int | None:
        """The branch for who names none: long-term before production, supported, the newest; None: there is none."""
        good = [
            (entry.kind == "long-term", branch)
            for branch, entry in self.branches.items()
            if self.fits(gpu, branch) and entry.supported(today) and entry.kind != "new-feature"
        ]
        return max(good)[1] if good else None

    def misfit(self, driver: str, modules: Modules, kernel: str) -> str | None:
        """Why `modules` of `driver` do not build for `kernel` ("6.12.118"); None where nothing is known against it."""
        for rule in self.unbuildable:
            same = number(rule.driver)[0] == number(driver)[0] and rule.modules == modules
            if same and number(driver) <= number(rule.driver) and number(kernel) >= number(rule.kernel):
                return f"{modules} modules of {driver} do not build with kernel {kernel} ({rule.source})"
        return None

    def cuda_of(self, driver: str) -> str | None:
        """The newest CUDA that `driver` carries; None for one older than the table."""
        return next(
            (cuda for cuda, first in self.cuda.carried_by.items() if number(driver) >= number(first)), None
        )

    def image_cuda(self, image: str) -> str | None:
        """The CUDA in a container image, by its name; None where the table does not know it."""
        for rule in self.images:
            found = re.fullmatch(rule.image, image)
            if found:
                return rule.cuda or found["cuda"]
        return None


class Runs(Settings):
    """Whether a driver runs programs of a CUDA release."""

    how: Literal["native", "minor", "forward", "no", "unknown"]
    why: str


def runs(rules: Rules, driver: str, cuda: str, *, compat: str | None) -> Runs:
    """How `driver` runs programs built for `cuda` ("13.0"); `compat`: the release of the cuda-compat there is."""
    major = int(cuda.split(".")[0])
    carries = rules.cuda_of(driver)
    if carries is not None and number(cuda) <= number(carries):
        return Runs(how="native", why=f"driver {driver} carries CUDA {carries}")
    said = f"driver {driver} carries CUDA {carries or 'older than 10.1'}"
    least = rules.compatibility.minor.drivers.get(major)
    if least is not None and number(driver) >= number(least):
        return Runs(
            how="minor",
            why=f"{said}: {cuda} runs by minor version compatibility, without its newer features and its PTX "
            f"({rules.compatibility.minor.source})",
        )
    forward = rules.compatibility.forward
    if compat is not None and number(compat) >= number(cuda):
        if compat not in forward.branches:
            return Runs(
                how="unknown", why=f"{said}; which drivers cuda-compat {compat} works with is not known"
            )
        if number(driver)[0] in forward.branches[compat]:
            return Runs(
                how="forward", why=f"{said}: {cuda} runs with cuda-compat {compat} ({forward.source})"
            )
    if least is None and carries is None:
        return Runs(how="unknown", why=f"nothing is known of CUDA {cuda} on driver {driver}")
    needs = f"driver {least or rules.cuda.carried_by.get(cuda)} or newer"
    if cuda in forward.branches:
        needs += f", or cuda-compat {cuda} on a driver of branch {_listed(forward.branches[cuda])}"
    return Runs(how="no", why=f"{said}; CUDA {cuda} needs {needs}")


def _listed(branches: list[int]) -> str:
    """[470, 535, 550] as "470, 535 or 550"."""
    *others, last = map(str, branches)
    return f"{', '.join(others)} or {last}" if others else last


def number(version: str) -> tuple[int, ...]:
    """ "580.126.20" as (580, 126, 20): 575.64 is not 575.64.03, and older than it."""
    return tuple(int(part) for part in version.split("."))


@cache
def rules() -> Rules:
    """The rules as they stand in nvidia.yml."""
    return Rules.model_validate(packaged.data("provision.profiles", "nvidia.yml"))
