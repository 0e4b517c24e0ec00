"""Where the controller keeps what belongs to one site: journal and stored documents."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from provision.site.models import Site


def state_directory(site: Site) -> Path:
    """The site's own folder below XDG_STATE_HOME (~/.local/state), made when needed, readable to its owner alone.

    Two files of one cluster name, in two checkouts, do not share it.
    """
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    digest = hashlib.sha256(str(site.path).encode()).hexdigest()[:8]
    directory = home.absolute() / "provision" / f"{site.cluster}-{digest}"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return directory
