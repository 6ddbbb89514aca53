"""Takes the name of a known model or card, returns facts about it; never acts on them."""
