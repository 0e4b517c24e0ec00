"""Measurements that a person runs; each prints a table and keeps its numbers in reports/."""
