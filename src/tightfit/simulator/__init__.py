"""A simulated accelerator: takes tensor operations, returns values or shapes, bytes and times; never needs a card."""
