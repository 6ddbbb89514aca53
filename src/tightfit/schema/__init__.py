"""Takes plain values, returns frozen records of requests, footprints, machines, plans and results; never computes."""
