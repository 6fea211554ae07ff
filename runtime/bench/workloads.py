"""Prompts of four kinds, written for this project: drafting gains most where text is predictable."""

from __future__ import annotations

from typing import Literal

Workload = Literal["code", "prose", "chat", "json"]

WORKLOADS: dict[Workload, tuple[str, ...]] = {
    "code": (
        "Write a Python function that merges two sorted lists into one sorted list, with a docstring and type hints.",
        "Write a C function that reverses a string in place, and explain each line in a comment.",
        "Write a SQL query that lists the ten customers who spent most in the last year, with their totals.",
    ),
    "prose": (
        "Write a short story about a lighthouse keeper who finds a bottle with a letter in it.",
        "Describe a market on a rainy morning to somebody who has never seen one.",
        "Tell the story of a fox and a lantern.",
    ),
    "chat": (
        "I have two days in a city by the sea and it will rain on one of them. What should I do?",
        "My bread never rises. What are the three most likely reasons?",
        "Explain to a curious ten-year-old why the sky is blue.",
    ),
    "json": (
        "Give three planets as a JSON list of objects with the keys name, diameter_km and has_rings. Only the JSON.",
        "Turn this into JSON with the keys item, amount and unit: two litres of milk, six eggs, 500 grams of flour.",
        "Describe a train from Oslo to Bergen as a JSON object with stops, each with name, arrival and departure.",
    ),
}
