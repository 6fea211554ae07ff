"""The modules that are traced, and their graphs."""
