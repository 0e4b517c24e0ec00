"""What a machine has, as typed facts: pure parsers of what its programs and /sys say, and the questions to ask."""
