"""One result model for everything the tool finds out, and its renderings."""
