"""Reads what machines have and proposes the lines of the site file that say it."""
