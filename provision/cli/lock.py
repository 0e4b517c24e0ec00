"""`provision lock SITE`: which versions of what every group of nodes gets."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from provision.cli.common import (
    JsonOption,
    SiteArgument,
    answer,
    ask_sudo_password,
    open_site,
    refuse,
)
from provision.components.nvidia import locking
from provision.engine.locking import resolve
from provision.report.model import Document, Finding, Verdict, worst
from provision.site.lock import NvidiaLock, load_lock, lock_path, save_lock


def lock(
    site: SiteArgument,
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether the lock file fits the site file; ask no node.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Resolve one consistent set of NVIDIA's software for each group of GPU nodes, and write it beside the site file.

    Driver, kernel modules, fabric manager, CUDA and NCCL go together, or are refused with the reason. One node of each
    group is asked for its distribution, its kernel and what its package sources offer; nothing on it is changed. apply
    installs exactly what is locked, and verify asserts it.

    Example: provision lock inventories/atlas.yml && git diff inventories/atlas.lock.yml
    """
    start = time.monotonic()
    cluster = open_site(site)
    if not cluster.enabled("nvidia"):
        refuse(f"{cluster.path}: there is nothing to lock: `nvidia` is not named in it")
    groups = list(locking.gpu_groups(cluster))
    before = load_lock(cluster)
    after = before
    if not check:
        password = ask_sudo_password(cluster, [n for g in locking.gpu_groups(cluster).values() for n in g])
        console = Console(stderr=True, quiet=as_json)
        after = resolve(cluster, before, groups, sudo_password=password, show=console.print)
        if after != before:
            save_lock(cluster, after)
    wrong = locking.lock_problems(cluster, after)
    findings = [
        Finding(
            verdict=Verdict.PASS,
            check="nvidia-lock",
            subject=group,
            read=summary(after.nvidia[group]),
            expected=summary(before.nvidia[group]) if group in before.nvidia else None,
            source=str(lock_path(cluster)),
        )
        for group in groups
        if group in after.nvidia and not any(why.startswith(f"group {group}") for why in wrong)
    ]
    findings += [
        Finding(
            verdict=Verdict.FAIL,
            check="nvidia-lock",
            subject=why.split(":")[0].removeprefix("group ").split(" has no")[0],
            read=why,
            expected="a set that fits the site file",
            action=f"provision lock {site}",
            source=str(lock_path(cluster)),
        )
        for why in wrong
    ]
    document = Document(
        verb="lock",
        site=cluster.cluster,
        verdict=worst([Verdict.PASS, *(finding.verdict for finding in findings)]),
        seconds=round(time.monotonic() - start, 3),
        findings=findings,
    )
    if not as_json:
        for group in groups:
            if group in after.nvidia:
                Console().print(f"{group}: {summary(after.nvidia[group])}", soft_wrap=True, highlight=False)
    answer(document, as_json)


def summary(entry: NvidiaLock) -> str:
    """One line: "580.126.20 open dkms for 8 x h100-sxm on ubuntu 24.04 (generic), fabric manager, CUDA 13.0"."""
    more = [
        *(["fabric manager"] if entry.fabric_manager else []),
        *(["NVLink subnet manager"] if entry.nvlsm else []),
        *(["IMEX"] if entry.imex else []),
        *([f"CUDA {entry.cuda}"] if entry.cuda else []),
        *([f"cuda-compat {entry.compat}"] if entry.compat else []),
        *([f"NCCL {entry.nccl}"] if entry.nccl else []),
        *entry.also,
    ]
    text = (
        f"{entry.driver} {entry.modules} {entry.build} from {entry.source} for {entry.gpus} on {entry.distribution} "
        f"({entry.kernel})"
    )
    return ", ".join([text, *more])
