"""From backend calls to a finished generation: the loop, commits, results."""
