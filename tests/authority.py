"""Certificate authorities for tests, made by openssl, and whom they vouch for."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Authority:
    """`NAME.crt` and `NAME.key` in `folder`; those of whom it vouches for stand beside them."""

    folder: Path
    name: str

    @classmethod
    def made(cls, folder: Path, name: str = "ca") -> Authority:
        _openssl(folder, "req", "-x509", *EC, "-days", "2", "-subj", f"/CN={name}", *_out(name, "crt"))
        return cls(folder, name)

    def vouch(self, name: str, subject: str) -> None:
        """A certificate for `subject` ("/O=system:nodes/CN=..."), also that of a server at 127.0.0.1."""
        _openssl(self.folder, "req", *EC, "-subj", subject, *_out(name, "csr"))
        (self.folder / "san").write_text("subjectAltName=IP:127.0.0.1")
        _openssl(
            self.folder,
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{self.name}.crt", "-CAkey", f"{self.name}.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", "san", "-out", f"{name}.crt"),
        )
        # as a kubelet keeps them: both in one file
        (self.folder / f"{name}.pem").write_bytes(
            (self.folder / f"{name}.crt").read_bytes() + (self.folder / f"{name}.key").read_bytes()
        )


def _out(name: str, kind: str) -> tuple[str, ...]:
    return "-keyout", f"{name}.key", "-out", f"{name}.{kind}"


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)
