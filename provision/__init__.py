"""From racks with a fresh Linux to a GPU cluster that has proved itself."""

__version__ = "0.1.0"
