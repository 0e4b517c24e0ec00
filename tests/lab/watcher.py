"""Records all that an unprivileged user of a machine can get hold of; run on nodes by a test, standard library only.

    python3 watcher.py FILE

Writes "watching" to the standard output when it does, and on SIGTERM what it has seen to FILE, as lines of JSON
{"where", "content" (base64)}: arguments and environments of processes, and the content of every file that was made or
changed meanwhile and could be opened at some moment. A file that could be opened once is read again when it changes.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import hashlib
import json
import os
import select
import signal
import stat
import struct
import sys

PLACES = (
    "/tmp",
    "/var",
    "/run",
    "/etc",
    "/home",
    "/dev/shm",
    "/shared",
    "/scratch",
    "/opt",
    "/srv",
    "/usr/local",
)
MASK = 0x2 | 0x4 | 0x8 | 0x80 | 0x100  # modify, attrib, close after write, moved to, create
IS_DIRECTORY, OVERFLOW = 0x40000000, 0x4000
MOST = 4 << 20  # bytes of one file
NONBLOCK = 0o4000


class Watcher:
    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.events = self.libc.inotify_init1(NONBLOCK)
        if self.events < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self.folders: dict[int, str] = {}
        self.held: dict[str, int] = {}
        self.seen: dict[str, tuple[str, bytes]] = {}
        self.devices: dict[str, int] = {}
        self.ended = False

    def mounted(self, *, read: bool = True) -> None:
        """Watch the places anew over which something was mounted."""
        for place in PLACES:
            if os.path.isdir(place) and not os.path.islink(place):
                device = os.stat(place).st_dev
                if self.devices.get(place) != device:
                    self.devices[place] = device
                    self.watch(place, read=read)

    def watch(self, folder: str, *, read: bool) -> None:
        """Watch a tree; `read`: it is new, so what is in it is read at once."""
        for path, folders, files in os.walk(folder, onerror=None):
            number = self.libc.inotify_add_watch(self.events, os.fsencode(path), MASK)
            if number < 0:
                if ctypes.get_errno() in (errno.ENOSPC, errno.ENOMEM):
                    raise OSError(ctypes.get_errno(), f"inotify_add_watch {path}")
                folders.clear()  # not ours to look into
                continue
            self.folders[number] = path
            if read:
                for name in files:
                    self.look(os.path.join(path, name))

    def look(self, path: str) -> None:
        """Read what a file holds now, by the descriptor of an earlier moment if it can be opened no more."""
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode) and path not in self.held:
                return
        except OSError:
            pass  # gone or moved: what is held of it is read
        try:
            descriptor = os.open(path, os.O_RDONLY | NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            descriptor = -1
        if descriptor >= 0:
            old = self.held.pop(path, None)
            if old is not None:
                self.keep(path, old)
                os.close(old)
            self.held[path] = descriptor
            if len(self.held) > 900:
                first = next(iter(self.held))
                os.close(self.held.pop(first))
        if path in self.held:
            self.keep(path, self.held[path])

    def keep(self, where: str, descriptor: int) -> None:
        try:
            self.note(where, os.pread(descriptor, MOST, 0))
        except OSError:
            return  # a folder, or a file system that is gone

    def note(self, where: str, content: bytes) -> None:
        if content:
            self.seen.setdefault(hashlib.sha256(content).hexdigest(), (where, content))

    def processes(self) -> None:
        for name in os.listdir("/proc"):
            if name.isdigit():
                for what in ("cmdline", "environ"):
                    try:
                        with open(f"/proc/{name}/{what}", "rb") as file:
                            self.note(f"/proc/{name}/{what}", file.read())
                    except OSError:
                        continue  # not ours, or gone

    def take_events(self) -> None:
        while True:
            try:
                data = os.read(self.events, 1 << 16)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                number, mask, _, length = struct.unpack_from("iIII", data, at)
                name = os.fsdecode(data[at + 16 : at + 16 + length].rstrip(b"\0"))
                at += 16 + length
                if mask & OVERFLOW:
                    raise RuntimeError("events were lost: the watcher was too slow")
                path = os.path.join(self.folders.get(number, "?"), name)
                if mask & IS_DIRECTORY:
                    if name:
                        self.watch(path, read=True)
                else:
                    self.look(path)

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.events, select.POLLIN)
        while not self.ended:
            self.take_events()
            self.processes()
            self.mounted()
            poll.poll(5)
        self.take_events()

    def write(self, path: str) -> None:
        for where, descriptor in self.held.items():
            self.keep(where, descriptor)
        with open(path, "w") as file:
            for where, content in self.seen.values():
                line = {"where": where, "content": base64.b64encode(content).decode()}
                file.write(json.dumps(line) + "\n")


def main() -> None:
    target = sys.argv[1]
    os.umask(0o077)
    watcher = Watcher()

    def end(_number: int, _frame: object) -> None:
        watcher.ended = True

    signal.signal(signal.SIGTERM, end)
    watcher.mounted(read=False)
    print("watching", flush=True)
    watcher.run()
    watcher.write(target)


if __name__ == "__main__":
    main()
