"""Random pairs of the released shapes."""
