"""Runs components' checks against nodes and collects what they found."""
