"""Takes the name of a known model or card, or a call of attention, returns facts about it; never acts on them."""
