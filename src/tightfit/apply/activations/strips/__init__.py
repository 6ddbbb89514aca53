"""Exact tiling: takes an autoencoder's method and a byte limit, returns the same numbers from strips; never blends."""
