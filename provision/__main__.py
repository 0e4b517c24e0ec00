"""`python -m provision`: the same as the command `provision`."""

from provision.cli import main

main()
