"""What this machine and a bundle have, and which ways of running work here."""
