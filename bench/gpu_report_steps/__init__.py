"""The steps of bench/gpu_report.py: what each measures on a CUDA card, and the page and the picture made of it."""
