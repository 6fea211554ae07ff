"""What every engine shares: calls, KV buffers, tensors by address."""
