"""A bundle compared with transformers."""
