"""The run before a bundle appears."""
