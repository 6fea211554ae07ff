"""What drafting gains on this device: matched runs, alternating, with the interval of their ratio."""
