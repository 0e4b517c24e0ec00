"""The checks of the catalogue, by what they are about."""
