"""Tiling, chunking and offload of activations: takes modules and plan fields, returns new forwards; never plans."""
