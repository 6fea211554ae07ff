"""What initializers hold: recipes, quantization, checks, files."""
