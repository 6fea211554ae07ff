"""``python -m slipstream``."""

from .cli import main

main()
