"""Checkpoints as published: configs, tensors, tokenizers, refusals."""
