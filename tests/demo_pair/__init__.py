"""The corpus and the training script of the tiny pair that ships with slipstream."""
