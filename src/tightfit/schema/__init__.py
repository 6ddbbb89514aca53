"""Takes plain values, returns frozen records (requests, footprints, machines, plans, results); never imports torch."""
