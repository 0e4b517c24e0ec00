"""`python -m ...workload` and the shipped archive both start here."""

import os
import sys

if sys.argv[1:2] == ["--spawn"]:
    from . import spawn

    sys.exit(spawn.main(sys.argv[2], sys.argv[3:]))

# torch's own warnings about a lost store are stack traces; the burn-in says in one line which rank has gone.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from .program import main

sys.exit(main(sys.argv[1:]))
