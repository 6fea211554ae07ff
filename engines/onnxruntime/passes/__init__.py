"""Rewrites of a graph, one a file."""
