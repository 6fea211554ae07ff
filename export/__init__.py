"""From a Gemma 4 checkpoint pair to a bundle, and its verification. Needs the ``export`` extra."""
