"""The tiny trained pair that ships with slipstream, its corpus and its training script."""
