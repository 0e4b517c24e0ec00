"""Judges what somebody recorded on a node, without the node: recognises the kind by content, parses, judges."""
