"""The process in which ansible-runner runs one playbook.

    python -m provision.engine.playbook_worker <job

Its job comes pickled on standard input, between two processes of one program and user; after that a line, or the
end of the input (the controller is gone), cancels the run. Standard output has one JSON event a line. Whatever
happens, nothing of the run is left behind: no process here, none on a cancelled run's nodes, no file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import ansible_runner

from provision.engine.inventory import inventory, variables
from provision.engine.job import own_output, take_over
from provision.engine.leftovers import MARK, end_marked, end_on_nodes, private_directory
from provision.engine.playbook_events import Reader, node_events
from provision.engine.playbook_job import PlaybookJob

_PROMPT = r"BECOME password.*:\s*$"
_COLLECTIONS = Path(__file__).parent  # of ansible_collections
_ROLES = Path(__file__).parents[2] / "roles"


class Worker:
    def __init__(self, job: PlaybookJob, out: IO[str]) -> None:
        self.job = job
        self.stopping = threading.Event()
        self._out = out
        self._turn = threading.Lock()
        merged, secrets = variables(job.site)
        self.variables = {**merged, **job.variables}
        self.reader = Reader([*secrets, *([job.sudo_password] if job.sudo_password else [])])

    def run(self) -> None:
        started = time.monotonic()
        ended, rc = "failed", 1
        try:
            with private_directory(self.job.run) as directory:
                ended, rc = self._play(directory)
        finally:
            left = end_marked(self.job.run)
            if self.reader.began and self.reader.stats is None:
                job = self.job
                for event in end_on_nodes(job.site, job.nodes, job.run, job.sudo_password):
                    self.emit(event)
            seconds = round(time.monotonic() - started, 2)
            for event in (
                []
                if ended == "failed" and not self.reader.began
                else node_events(self.reader, ended, seconds, self.job.nodes)
            ):
                self.emit(event)
            self.emit(
                {
                    "event": "end",
                    "status": ended,
                    "rc": rc,
                    "began": self.reader.began,
                    "left": left,
                    "said": self.reader.said,
                }
            )

    def _play(self, directory: Path) -> tuple[str, int]:
        """Run the playbook; ansible-runner's status and exit status."""
        job = self.job
        secret = directory / "env" / "extravars"
        _write(secret, json.dumps(self.variables))
        _write(directory / "limit", "\n".join(job.nodes) + "\n")
        _write(directory / "ansible.cfg", "")

        def take(raw: dict[str, Any]) -> bool:
            if raw.get("event") == "playbook_on_start":
                secret.unlink(missing_ok=True)  # it has been read; it need not lie there for hours
            for event in self.reader.take(raw):
                self.emit(event)
            return False  # ansible-runner keeps no copy of the event

        result = ansible_runner.run(
            private_data_dir=str(directory),
            project_dir=str(job.playbook.parent),
            playbook=str(job.playbook),
            inventory=inventory(job.site),
            limit=f"@{directory / 'limit'}",
            # Passwords are typed at Ansible's prompt: no file and no argument ever holds them.
            passwords={_PROMPT: job.sudo_password} if job.sudo_password else {},
            cmdline=" ".join(
                [*(["--ask-become-pass"] if job.sudo_password else []), *(["--check"] if job.check else [])]
            )
            or None,
            envvars=environment(directory, job),
            suppress_env_files=True,
            settings={"pexpect_timeout": 1},
            forks=job.forks,
            timeout=job.timeout,
            quiet=True,
            event_handler=take,
            cancel_callback=self.stopping.is_set,
        )
        return str(result.status), int(result.rc)

    def emit(self, event: dict[str, Any]) -> None:
        with self._turn:
            try:
                self._out.write(json.dumps(event) + "\n")
                self._out.flush()
            except BrokenPipeError:
                self.stopping.set()  # nobody is left to hear it; the run ends in order

    def listen(self) -> None:
        """Wait for the wish to stop, or for the controller's end."""
        os.read(sys.stdin.fileno(), 1)
        self.stopping.set()


def environment(directory: Path, job: PlaybookJob) -> dict[str, str]:
    """The variables that make Ansible the same everywhere, whatever the user's own configuration says."""
    roles = [job.playbook.parent / "roles", job.site.directory / "roles", _ROLES]
    collections = [
        _COLLECTIONS,
        Path.home() / ".ansible" / "collections",
        Path("/usr/share/ansible/collections"),
    ]
    return {
        MARK: job.run,
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_CONFIG": str(directory / "ansible.cfg"),
        "ANSIBLE_HOME": str(directory / "ansible"),
        "ANSIBLE_ROLES_PATH": ":".join(map(str, roles)),
        "ANSIBLE_COLLECTIONS_PATH": ":".join(map(str, collections)),
        "ANSIBLE_HOST_KEY_CHECKING": "True",  # ansible-runner switches it off otherwise
        "ANSIBLE_PIPELINING": "True",
        "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=60s",
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(directory / "cp"),
        "ANSIBLE_PYTHON_INTERPRETER": "auto_silent",
        "ANSIBLE_TRANSFORM_INVALID_GROUP_CHARS": "ignore",
        "ANSIBLE_NOCOLOR": "True",
        "ANSIBLE_FORCE_COLOR": "False",
    }


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)


def main() -> None:
    out = own_output()
    os.umask(0o077)
    for name in list(os.environ):
        if name.startswith(("ANSIBLE_", "AWX_", "RUNNER_")) or name == "PROVISION_SUDO_PASSWORD":
            del os.environ[name]
    job = take_over()
    assert isinstance(job, PlaybookJob)
    worker = Worker(job, out)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: worker.stopping.set())
    threading.Thread(target=worker.listen, daemon=True).start()
    worker.run()


if __name__ == "__main__":
    main()
