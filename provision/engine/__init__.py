"""Brings nodes to what the site file describes: plan, apply, and the processes that do it."""
