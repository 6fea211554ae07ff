"""The demo pair's training text: short stories made by a grammar, in chat turns.

The text is the project's own (Apache-2.0) and a pure function of the seed, so the pair can
be trained again anywhere. A story repeats its hero's name, friend, thing and place over far
more tokens than the sliding window, so the full-attention layers have real work. What the
text says about speed holds for this pair only: grammar text is easy to draft.
"""

from __future__ import annotations

import hashlib
from random import Random

HEROES = "fox rabbit bear mouse owl hedgehog squirrel badger otter beaver frog duck cat dog pony goat".split()
NAMES = """Lily Tom Mia Ben Rosie Max Ella Sam Poppy Jack Nina Leo Daisy Finn Ruby Oscar Luna Theo Hazel Milo Ivy Hugo
Clara Felix Nora Jasper Stella Rufus Willa Barnaby""".split()
THINGS = """lantern kite drum map key boat bell basket blanket book ladder whistle hat scarf clock compass mirror teapot
wagon umbrella""".split()
PLACES = {
    "in": "forest meadow village garden orchard valley barn castle".split(),
    "by": "river lake sea waterfall bridge lighthouse".split(),
    "on": "hill island mountain farm".split(),
}
COLOURS = "red blue green yellow silver golden purple white".split()
TRAITS = "kind brave shy clever curious cheerful quiet gentle stubborn careful".split()
WEATHER = ["sunny", "windy", "rainy", "snowy", "foggy", "warm"]
FOODS = ["honey cake", "apple pie", "warm soup", "blueberry jam", "fresh bread", "pumpkin stew", "cherry tart"]
LESSONS = {
    "lost": ["a good friend will always help you look", "it is wise to put things back where they belong"],
    "storm": ["being brave does not mean having no fear", "a storm is shorter when you share it"],
    "broken": [
        "telling the truth is the first step to mending things",
        "most broken things can be mended with patience",
    ],
    "race": ["it is more fun to finish together than to win alone", "slow and steady feet still reach the end"],
    "new": ["a stranger is only a friend you have not met yet", "a small hello can change a whole day"],
}
PROMPTS = [
    "Tell me a story about {a_hero} and {a_thing}.",
    "Tell me a story about {a_hero} named {name}.",
    "Write a short story with {a_hero}, {a_friend} and {a_thing}.",
    "Can you tell me a bedtime story about {a_thing}?",
    "I would like a story that happens {place}.",
    "Please tell a story about {a_hero} who learns that {lesson}.",
]
QUESTIONS = [
    ("Who is the story about?", "The story is about {name}, {a_trait} {hero} who lived {place}."),
    ("What did {name} have?", "{name} had {a_colour} {thing}."),
    ("What did they eat at the end?", "They ate {food} together."),
    ("What did {name} learn?", "{name} learned that {lesson}."),
    ("Who was the friend of {name}?", "The friend of {name} was {friend_name}, {a_friend_trait} {friend}."),
]


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _skewed(random: Random, options: list[str]) -> str:
    """Earlier options are likelier (weights 1, 1/2, 1/3, ...), as in natural text."""
    return random.choices(options, [1 / (rank + 1) for rank in range(len(options))])[0]


def _world(random: Random) -> dict[str, str]:
    hero, friend = random.sample(HEROES, 2)
    name, friend_name = random.sample(NAMES, 2)
    plot = random.choice(list(LESSONS))
    preposition = random.choice(list(PLACES))
    world = {
        "hero": hero,
        "friend": friend,
        "name": name,
        "friend_name": friend_name,
        "thing": random.choice(THINGS),
        "place": f"{preposition} the {random.choice(PLACES[preposition])}",
        "colour": random.choice(COLOURS),
        "trait": random.choice(TRAITS),
        "friend_trait": random.choice(TRAITS),
        "weather": random.choice(WEATHER),
        "food": random.choice(FOODS),
        "plot": plot,
        "lesson": random.choice(LESSONS[plot]),
    }
    for noun in ("hero", "friend", "thing", "colour", "trait", "friend_trait"):
        world[f"a_{noun}"] = _article(world[noun])
    return world


_OPENING = [
    [
        "Once upon a time there was {a_trait} {hero} named {name} who lived {place}.",
        "There once was {a_hero} named {name}, and everyone {place} knew how {trait} {name} was.",
        "Long ago, {place}, there lived {a_trait} {hero} called {name}.",
    ],
    [
        "{name} had {a_colour} {thing} and took it everywhere.",
        "More than anything, {name} loved {a_colour} {thing} that was a gift from grandmother.",
        "Every morning {name} cleaned {a_colour} {thing} until it shone.",
    ],
    [
        "The best friend of {name} was {friend_name}, {a_friend_trait} {friend}.",
        "Next door lived {friend_name}, {a_friend_trait} {friend} who liked to laugh.",
    ],
]
_PLOTS = {
    "lost": [
        [
            "One {weather} morning the {colour} {thing} was gone.",
            "One {weather} day {name} woke up and could not find the {thing}.",
        ],
        [
            '"Oh no," said {name}, "where is my {thing}?"',
            "{name} looked under the bed, behind the door and inside the old oak tree.",
        ],
        [
            '"Do not worry," said {friend_name}. "We will look for it together."',
            '{friend_name} came at once. "Let us follow the tracks," said the {friend}.',
        ],
        ["They searched all day and asked everyone they met.", "They walked and walked until their feet were tired."],
        [
            "At last they found the {thing} under a pile of leaves.",
            "Then {friend_name} saw something {colour} in the grass, and it was the {thing}.",
        ],
    ],
    "storm": [
        ["One {weather} evening dark clouds came over the hills.", "One night a great storm came {place}."],
        [
            "The wind was so loud that {name} hid under the table with the {thing}.",
            "{name} held the {colour} {thing} tight and listened to the thunder.",
        ],
        [
            'Then there was a knock, and {friend_name} stood at the door. "May I stay with you?" asked the {friend}.',
            '"Help," cried {friend_name}, "the rain has come into my house!"',
        ],
        [
            '"Come in," said {name}. "We will be warm together."',
            "{name} was afraid, but the {hero} ran out into the rain to help.",
        ],
        [
            "They told each other stories until the storm was over.",
            "In the morning the sky was clear and everything smelled of rain.",
        ],
    ],
    "broken": [
        [
            "One {weather} day {friend_name} borrowed the {thing} and dropped it.",
            "One {weather} afternoon the {thing} fell from the shelf and broke in two.",
        ],
        [
            "{friend_name} was very sorry and did not know what to say.",
            '"It was my fault," said {friend_name} in a small voice.',
        ],
        [
            "{name} was sad for a moment, and then {name} smiled.",
            '"Thank you for telling me," said {name}. "We can mend it."',
        ],
        [
            "They worked with glue and string until the {thing} was whole again.",
            "All afternoon the {hero} and the {friend} mended the {thing} piece by piece.",
        ],
        [
            "Now the {thing} was even more {colour} than before.",
            "It had a crack, but {name} liked the {thing} better that way.",
        ],
    ],
    "race": [
        [
            "One {weather} day there was a big race {place}.",
            'One {weather} morning {friend_name} said, "Let us race to the old bridge!"',
        ],
        [
            "{name} wanted to win the {colour} ribbon more than anything.",
            "{name} tied the {thing} to a string and got ready to run.",
        ],
        [
            "Halfway there {friend_name} fell and hurt a foot.",
            "{friend_name} was fast, but soon the {friend} was tired and sat down.",
        ],
        [
            '{name} stopped and came back. "Lean on me," said the {hero}.',
            "{name} could have won, but the {hero} turned around to help.",
        ],
        [
            "They crossed the line side by side while everyone cheered.",
            "They were the last to arrive, and nobody minded at all.",
        ],
    ],
    "new": [
        [
            "One {weather} day a new {friend} came to live {place}.",
            "One {weather} morning {name} saw a {friend} sitting all alone.",
        ],
        [
            '"Hello," said {name}, "would you like to see my {thing}?"',
            "{name} was too shy to speak, so the {hero} waved the {colour} {thing}.",
        ],
        [
            'The {friend} smiled. "My name is {friend_name}," the {friend} said.',
            '"I am {friend_name}," said the {friend}, "and I do not know anyone here."',
        ],
        [
            "{name} showed {friend_name} every path and every secret place.",
            "They played with the {thing} until the sun went down.",
        ],
        ["From that day on they were never apart.", "Soon everyone {place} knew the name of {friend_name}."],
    ],
}
_ENDING = [
    [
        "That evening they shared {food} and laughed.",
        "They went home and ate {food} by the fire.",
        "To celebrate they made {food} for everyone.",
    ],
    ["And {name} learned that {lesson}.", "From then on {name} always remembered that {lesson}."],
]


def _story(random: Random, world: dict[str, str]) -> str:
    openings = _OPENING if world["plot"] != "new" else _OPENING[:2]
    beats = [*openings, *_PLOTS[world["plot"]], *_ENDING]
    return " ".join(_skewed(random, beat).format(**world) for beat in beats)


def is_held_out(world: dict[str, str]) -> bool:
    """One world in 16 is never trained on: decided by hero, name and thing."""
    key = f"{world['hero']} {world['name']} {world['thing']}".encode()
    return hashlib.sha256(key).digest()[0] % 16 == 0


def conversation(random: Random, *, held_out: bool = False) -> list[dict[str, str]]:
    """Chat messages: a request and a story, then up to two questions about it."""
    world = _world(random)
    while is_held_out(world) != held_out:
        world = _world(random)
    messages = [
        {"role": "user", "content": random.choice(PROMPTS).format(**world)},
        {"role": "assistant", "content": _story(random, world)},
    ]
    for question, answer in random.sample(QUESTIONS, random.choice([0, 0, 1, 2])):
        messages.append({"role": "user", "content": question.format(**world)})
        messages.append({"role": "assistant", "content": answer.format(**world)})
    return messages
