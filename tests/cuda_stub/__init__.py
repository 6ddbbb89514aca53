"""A CUDA runtime without a card: libraries that stand for NVIDIA's, and the arithmetic of its kernels on the CPU."""
