"""How activations are cut up, laid out and moved: slices, tiles, memory formats, and what waits for later."""
