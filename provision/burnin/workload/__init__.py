"""The burn-in job: one PyTorch program that proves a set of nodes, the same for two CPUs or a thousand GPUs.

It travels to the nodes by itself, so it imports the standard library and torch alone, needs Python >= 3.9 and
nothing else of this project. It runs under `srun`, under `torchrun` (or anything that sets RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT), and alone.

What it measured goes into one JSON document (`provision.burnin.result` has its shape). It judges no speed;
but a wrong element or a differing gradient bit is an error anywhere, so its exit status is 1 then, too.
"""

FORMAT = 1  # of the result document; raised when a field changes its meaning
