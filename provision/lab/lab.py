"""The lab: a throwaway cluster of systemd containers on this machine, made, mended and removed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from provision.lab import cgroup, faults, files, host, layers, network, snapshot, state
from provision.lab import gpus as simulated
from provision.lab import node as disk
from provision.lab.command import InputError, LabError, execute
from provision.lab.host import Mirror
from provision.lab.progress import Progress
from provision.lab.state import NETWORK, PROXY_PORT, Node, Paths, Spec
from provision.site.problem import instead

BOOT_TIMEOUT = 180.0  # an upper bound for busy machines: a node that stops is noticed at once
SHUTDOWN_TIMEOUT = 90.0
MACHINES = Path("/run/systemd/nspawn/propagate")  # systemd-nspawn leaves a folder a container there
ROOT_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}


class Lab:
    """One lab. Its state folder tells what it should be; what is there is read from the system each time."""

    def __init__(
        self, state_dir: Path | None = None, cache: Path | None = None, progress: Progress | None = None
    ) -> None:
        self.paths = Paths(state_dir or state.default_state())
        self.cache = cache or state.default_cache()
        self.progress = progress or Progress()
        self._interrupted = False

    @property
    def nodes(self) -> dict[str, Node]:
        """The nodes that the lab should have, by name; empty when there is no lab."""
        spec = state.load(self.paths)
        return {node.name: node for node in spec.nodes} if spec else {}

    def node(self, name: str) -> Node:
        """Raises InputError, with the names there are, for one that is not in the lab."""
        nodes = self.nodes
        if name not in nodes:
            there = instead(name, nodes) if nodes else "there is none: run `provision lab up`"
            raise InputError(f"{name}: no such node in the lab at {self.paths.state}; {there}")
        return nodes[name]

    # ---- up and down

    def up(
        self,
        workers: int | None = None,
        gpus: int | None = None,
        model: str | None = None,
        mirror: str | None = None,
        layer_names: Sequence[str] | None = None,
        fresh: bool = False,
    ) -> None:
        """Make the lab, or complete and mend the one that is there; returns when all nodes answer ssh.

        What is not given stays as it is (at first: 2 workers, 2 simulated H100 each, the machine's mirror, all layers);
        with `fresh` all nodes are made anew.
        """
        host.require()
        old = state.load(self.paths)
        if fresh:
            self.down()
        elif old and layer_names is not None and set(layer_names) != set(old.layers):
            raise InputError(f"--layers: the lab has {','.join(old.layers)}; --fresh makes it anew")
        with state.locked(self.paths.state):
            spec = self._spec(old, workers, gpus, model, mirror, layer_names)
            self._keys()
            self._remove_surplus(spec.nodes)
            before = {node.name: node for node in old.nodes} if old else {}
            self.parallel(lambda node: self._make_node(spec, node, before.get(node.name)), spec.nodes)
            state.save(self.paths, spec)
            self._write_access(spec.nodes)
            self._ensure_network()
            self._ensure_proxy()
            self.parallel(lambda node: self.start(node.name), spec.nodes)

    def down(self, cache: bool = False) -> None:
        """Remove the lab and all that belongs to it, in any state; with `cache` also the shared cache."""
        with state.locked(self.paths.state):
            cgroup.remove(self.paths.cgroup)
            for namespace in network.names(self.paths):
                network.remove(namespace)
            for folder in MACHINES.glob(f"{self.paths.hub}-*"):
                folder.rmdir()
            shutil.rmtree(self.paths.state)
        if cache:
            others = [g.name for g in self.paths.cgroup.parent.glob("plab-*")]
            if others:
                raise LabError(f"{self.cache}: other labs use it ({', '.join(others)}); take them down first")
            shutil.rmtree(self.cache)

    def _spec(
        self,
        old: Spec | None,
        workers: int | None,
        gpus: int | None,
        model: str | None,
        mirror: str | None,
        layer_names: Sequence[str] | None,
    ) -> Spec:
        """What the lab should be: what was asked for now, else what it was, else the defaults."""
        recipe = layers.load_recipe()
        if layer_names is None:
            layer_names = old.layers if old else [layer.name for layer in recipe.layers]
        recipe = recipe.select(layer_names)
        if old and (mirror is None or mirror == old.mirror):
            source = Mirror(old.mirror, old.security)
        else:
            source = host.find_mirror(mirror, recipe.suite)
        before = {node.name: node for node in old.nodes} if old else {}
        if workers is None:
            workers = sum(node.role == "worker" for node in before.values()) if before else 2
        worker = next((node for node in before.values() if node.role == "worker"), None)
        if gpus is None:
            gpus = worker.gpus if worker else 2
        if model is None:
            model = worker.model if worker else state.DEFAULT_MODEL
        simulated.require(model)
        nodes = self._with_layers(state.plan_nodes(workers, gpus, model), before, recipe, source)
        return Spec(recipe.suite, source.url, source.security, tuple(layer_names), nodes)

    def _with_layers(
        self, nodes: Iterable[Node], before: Mapping[str, Node], recipe: layers.Recipe, source: Mirror
    ) -> tuple[Node, ...]:
        """Give each node its layers, made where they are missing; a node that is there keeps those it has."""
        shared = files.shared_layer(self.cache, self.paths.hybrid)
        chosen: list[Node] = []
        for node in nodes:
            newest = (*layers.folder_names(recipe, recipe.stack(node.role)), shared)
            has = before[node.name].layers if node.name in before else ()
            kept = self.paths.node(node.name).exists() and all(path.is_dir() for path in self._folders(has))
            if has and kept:
                if has != newest:
                    self.progress.say(node.name, "keeps its older layers (--fresh makes it anew)")
                chosen.append(replace(node, layers=has))
                continue
            layers.ensure(recipe, node.role, source, self.cache, self.paths.cgroup.parent, self.progress)
            chosen.append(replace(node, layers=newest))
        return tuple(chosen)

    def _keys(self) -> None:
        """The key that all nodes accept."""
        if not self.paths.key.exists():
            disk.make_key(self.paths.key, "provision-lab")
        self.paths.log.mkdir(exist_ok=True)
        (self.paths.state / "nodes").mkdir(exist_ok=True, mode=0o700)

    def _remove_surplus(self, wanted: Iterable[Node]) -> None:
        names = {node.name for node in wanted}
        for folder in sorted((self.paths.state / "nodes").iterdir()):
            if folder.name not in names:
                self._remove_node(folder.name)

    def _remove_node(self, name: str) -> None:
        cgroup.remove(self.paths.node_cgroup(name))
        namespace = self.paths.namespace(name)
        if namespace in network.names(self.paths):
            network.remove(namespace)
        for left in MACHINES.glob(namespace):
            left.rmdir()
        shutil.rmtree(self.paths.node(name))

    def _make_node(self, spec: Spec, node: Node, old: Node | None) -> None:
        """Make the node's folder where it is missing, or change the one that is there."""
        folder = self.paths.node(node.name)
        if folder.exists() and old is not None and old.layers != node.layers:
            self.progress.say(node.name, "its layers are gone from the cache: made anew")
            self._remove_node(node.name)
        if folder.exists():
            if old is not None and (old.gpus, old.model) != (node.gpus, node.model):
                self.power_off(node.name)
                disk.set_gpus(self.paths, node, self._lowers(node))
            return
        cgroup.remove(self.paths.node_cgroup(node.name))  # may run without its folder: nothing of it is left
        recipe = layers.load_recipe().select(spec.layers)
        sources = files.apt_sources(Mirror(spec.mirror, spec.security), spec.suite, recipe.components)
        disk.make(self.paths, node, self._lowers(node), sources, layers.unique_files(recipe, node.role))
        self.progress.say(node.name, "made")

    def _lowers(self, node: Node) -> list[Path]:
        """The node's layers as folders, highest first."""
        return self._folders(reversed(node.layers))

    def _folders(self, names: Iterable[str]) -> list[Path]:
        return [self.cache / "layers" / name for name in names]

    def _write_access(self, nodes: Sequence[Node]) -> None:
        """known_hosts and ssh_config, from the host keys that the nodes were made with."""
        keys = {
            node.name: (node, (self.paths.node(node.name) / "keys/ssh_host_ed25519_key.pub").read_text())
            for node in nodes
        }
        state.write_file(self.paths.known_hosts, files.known_hosts(keys))
        config = files.ssh_config(self.paths.hub, self.paths.key, self.paths.known_hosts, nodes)
        state.write_file(self.paths.ssh_config, config)

    def _ensure_network(self) -> None:
        cgroup.make(self.paths.cgroup)
        cgroup.delegate(self.paths.cgroup)
        if network.ensure_hub(self.paths):
            cgroup.remove(self.paths.proxy_cgroup)  # one from before listens in a namespace that is gone

    def _ensure_proxy(self) -> None:
        group = self.paths.proxy_cgroup
        if cgroup.populated(group):
            try:
                network.answers(self.paths, f"{NETWORK}.1", PROXY_PORT)
                return
            except OSError:
                self.progress.say("packages", "the package cache does not answer: started anew")
        cgroup.remove(group)
        cgroup.make(group)
        argv = [
            *(sys.executable, "-m", "provision.lab.proxy", "--listen", f"{NETWORK}.1:{PROXY_PORT}"),
            *("--netns", str(network.RUN / self.paths.hub), "--cache", str(self.cache / "packages")),
        ]
        with (self.paths.log / "proxy.log").open("a") as log:
            process = subprocess.Popen(
                cgroup.detached(group, argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=state.python_environment(),
            )
        with process:  # ends at once; the package cache keeps its standard output until it listens
            assert process.stdout is not None
            if not process.stdout.readline():
                raise LabError(f"the package cache did not start: see {self.paths.log / 'proxy.log'}")

    # ---- one node

    def start(self, name: str) -> None:
        """Start the node unless it runs, mend its network, wait for its ssh."""
        node = self.node(name)
        group = self.paths.machine_cgroup(node.name)
        if cgroup.frozen(group):
            cgroup.freeze(group, False)
        payload = cgroup.pids(group / "payload")
        if payload and not network.is_in(self.paths.namespace(node.name), payload[0]):
            self.progress.say(node.name, "runs without its network: switched off")
            cgroup.remove(self.paths.node_cgroup(node.name))
        network.ensure_node(self.paths, node)
        if not self.running(node.name):
            self.progress.say(node.name, "starting")
            self._power_on(node)
        network.wait_ssh(
            self.paths, node, BOOT_TIMEOUT, lambda: self.running(node.name) and not self._interrupted
        )
        self._wait_login(node)
        self.progress.say(node.name, f"answers at {node.address}")

    def state_of(self, name: str) -> str:
        """What the system says of the node: running, frozen, off, or unreachable (runs without ssh)."""
        node = self.node(name)
        if not self.running(name):
            return "off"
        if cgroup.frozen(self.paths.machine_cgroup(name)):
            return "frozen"
        try:
            answering = network.answers(self.paths, node.address, network.SSH_PORT).startswith(b"SSH-")
        except OSError:
            answering = False
        return "running" if answering else "unreachable"

    def running(self, name: str) -> bool:
        """Whether the node is powered: its supervisor lives (between two boots nothing else does)."""
        return cgroup.populated(self.paths.node_cgroup(name) / "supervisor")

    def _power_on(self, node: Node) -> None:
        """Start the node's supervisor in a control group and a mount namespace of its own."""
        group = self.paths.node_cgroup(node.name)
        cgroup.remove(group)
        cgroup.make(group)
        cgroup.delegate(group)
        cgroup.make(group / "supervisor")
        record = self.paths.node(node.name) / "boot.json"
        state.write_json(record, disk.boot_record(self.paths, node, self._lowers(node)))
        argv = ["unshare", "--mount", sys.executable, "-m", "provision.lab.supervisor", str(record)]
        with (self.paths.log / f"{node.name}.console").open("ab") as console:
            subprocess.run(
                cgroup.detached(group / "supervisor", argv),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=state.python_environment(),
                check=True,
            )

    def _wait_login(self, node: Node) -> None:
        """Wait for the end of the boot: the login of ordinary users opens a moment after sshd does."""
        try:
            booted = self.run(node.name, "systemctl is-system-running --wait", timeout=BOOT_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise LabError(f"{node.name}: does not finish its boot within {BOOT_TIMEOUT:g} s") from error
        if booted.stdout.strip() not in ("running", "degraded"):
            raise LabError(
                f"{node.name}: does not finish its boot: {booted.stdout.strip()} {booted.stderr.strip()}"
            )

    def power_off(self, name: str) -> None:
        """Shut the node down as its power button does; what does not end in time is ended."""
        group = self.paths.node_cgroup(name)
        if not cgroup.frozen(self.paths.machine_cgroup(name)):
            for pid in cgroup.pids(group / "supervisor"):
                with suppress(ProcessLookupError):
                    os.kill(pid, 15)
            cgroup.wait_empty(group, SHUTDOWN_TIMEOUT)
        cgroup.remove(group)

    def power_loss(self, name: str) -> None:
        """End all of the node at once."""
        cgroup.remove(self.paths.node_cgroup(name))

    # ---- use

    def ssh(self, name: str, user: str = "ops") -> list[str]:
        """The words that start a command on the node: append it as one word."""
        return [
            "ssh",
            "-F",
            str(self.paths.ssh_config),
            "-o",
            "BatchMode=yes",
            "-l",
            user,
            self.node(name).name,
        ]

    def run(
        self,
        name: str,
        command: str | Sequence[str],
        *,
        user: str = "root",
        timeout: float = 60,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command (or words) on the node; never raises for its exit status."""
        text = command if isinstance(command, str) else shlex.join(command)
        return subprocess.run(
            [*self.ssh(name, user), text],
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def inside(self, name: str, script: str, *arguments: str, stdin: str = "") -> str:
        """Run a shell script as root in the node's namespaces, without ssh; its standard output.

        Raises LabError where the node is off or the script fails.
        """
        payload = cgroup.pids(self.paths.machine_cgroup(name) / "payload")
        init = next((pid for pid in payload if _is_init(pid)), None)
        if init is None:
            raise LabError(f"{name}: is not running: start it with `provision lab up`")
        enter = [
            "nsenter",
            f"--target={init}",
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--cgroup",
            "--root",
        ]
        what = f"{name}: a script inside"
        return execute(
            [*enter, "sh", "-c", script, "sh", *arguments], stdin=stdin, env=ROOT_ENVIRONMENT, name=what
        )

    def fault(self, kind: str, name: str, undo: bool = False, **options: Any) -> None:
        """Make a fault (see provision.lab.faults.FAULTS) happen on a node, or take it back."""
        faults.inject(self, kind, name, undo, **options)

    def snapshot(self, name: str) -> None:
        """Keep the disks of all nodes as `name`; the nodes are shut down for it and started again."""
        with state.locked(self.paths.state):
            snapshot.take(self, name)

    def restore(self, name: str) -> None:
        """Put the disks of all nodes back as they were kept as `name`, and boot from them."""
        with state.locked(self.paths.state):
            snapshot.restore(self, name)

    def parallel(self, work: Callable[[Node], None], nodes: Sequence[Node]) -> None:
        """Do `work` on all nodes at once; the failures of all of them in one LabError."""
        with ThreadPoolExecutor(max_workers=max(1, len(nodes))) as pool:
            futures = [pool.submit(work, node) for node in nodes]
            try:
                wait(futures)
            except KeyboardInterrupt:
                self._interrupted = True  # ends what waits for a node to answer
                raise
        failed = [str(future.exception()) for future in futures if future.exception() is not None]
        unexpected = [e for f in futures if (e := f.exception()) is not None and not isinstance(e, LabError)]
        if unexpected:
            raise unexpected[0]
        if failed:
            raise LabError("\n".join(failed))


def _is_init(pid: int) -> bool:
    """Whether `pid` is process 1 of its own namespace."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    inner = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
    return len(inner) > 1 and inner[-1] == "1"
