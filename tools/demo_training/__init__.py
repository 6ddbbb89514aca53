"""How the demo model was made: networks, three stages (autoencoder, text, denoiser), checkpoints.

Takes a seed and the grammar of `tightfit.demo`, returns a StableDiffusionPipeline; nothing here ships.
"""
