"""Takes the name of a known model or card, or an attention call, returns facts about it; never acts on them."""
