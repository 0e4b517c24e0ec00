"""Burn-in: prove nodes under load, judge the numbers, keep the bad ones out."""
