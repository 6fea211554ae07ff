"""What this machine has, and what memory runs and builds take."""
