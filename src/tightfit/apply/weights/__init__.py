"""Where weights are kept, in which dtype, and how they are loaded and evicted. Eviction copies only changes back."""
