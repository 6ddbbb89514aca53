"""A simulated accelerator: takes tensor operations, returns numbers or shapes, bytes and times; never needs a card."""
