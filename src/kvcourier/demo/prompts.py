"""The prompts of the demo: plain English of mixed length, written for it.

Decides what is asked. Refuses to know how and of whom.
"""

WARM_UP = "The first request pays for what all others share: connections, handshakes, warm caches."

_HARBOUR = (
    "The harbour of Lindholm wakes before the town does. At four in the morning the pilots drink "
    "their coffee standing, read the wind from the flag above the customs house, and argue about "
    "the same two sandbanks that their fathers argued about. The ferry to the islands leaves at "
    "ten past five, with the mail, the bread, the newspapers and a dozen people who work on one "
    "side of the water and live on the other. Nobody on board looks out of the window. They know "
    "the lights by heart: the red one that blinks twice, the white one that turns, and the green "
    "one on the breakwater that has been broken since the storm in March. "
)
_LIGHTHOUSE = (
    "The keeper of the lighthouse, a tall woman called Ingrid Solberg, writes everything down. "
    "Her books go back nineteen years, and in them are the weather, the ships, the birds, and "
    "the names of everyone who ever climbed the hundred and forty steps to see the lamp. When the "
    "ministry asked whether a machine could do her work, she sent them one of the books and a "
    "short letter. The machine, she wrote, would surely turn the lamp on and off as well as she "
    "did. It would not have noticed, though, that in the second week of every September the "
    "fishing boats come home an hour earlier than the tide tables say they should, and it would "
    "not have walked down to the quay to ask the oldest of the skippers why that was. "
)
_SKIPPER = (
    "The skipper thought about the question for a while. Then he said that the herring turn "
    "north when the water cools, that the cold comes down the western channel first, and that "
    "whoever waits for the tide in September will wait alone. His grandfather had known it, and "
    "so had the seals. It was in no table because the men who made the tables had never been out "
    "there in autumn. Ingrid wrote that down as well, with the date and the temperature of the "
    "water, and for the next ten years she watched the boats and found that he was right in nine. "
)

PROMPTS = (
    "The three primary colours are",
    "In the spring, when the snow melts in the mountains, the river",
    (
        "A good recipe for pancakes needs flour, milk, eggs and a pinch of salt. Mix the flour "
        "with half of the milk until there are no lumps left, then add the eggs and"
    ),
    (
        "Question: A train leaves the station at nine o'clock and travels at sixty kilometres an "
        "hour. A second train leaves the same station an hour later and travels at ninety. When "
        "does the second train catch up with the first one? Let us think about it step by step."
    ),
    _HARBOUR + "This morning, however, something was different:",
    _LIGHTHOUSE + "The old skipper laughed and said that",
    _HARBOUR + _LIGHTHOUSE + "In short, the story so far is about",
    _HARBOUR + _LIGHTHOUSE + _SKIPPER + "The lesson that the ministry drew from it was",
)
"""About 5 to 480 tokens each. Several share a beginning: the demo runs its instances without prefix
caching, so that every prompt is computed and moved whole."""
