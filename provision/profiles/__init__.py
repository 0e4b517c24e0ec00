"""Data that differs by product, release or distribution, and its typed loaders."""

from provision.profiles.distribution import Distribution, UnsupportedDistribution, distribution

__all__ = ["Distribution", "UnsupportedDistribution", "distribution"]
