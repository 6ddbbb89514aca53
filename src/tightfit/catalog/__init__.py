"""Facts, no behaviour: known models' configurations and known cards."""
