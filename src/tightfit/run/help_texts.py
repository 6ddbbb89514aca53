"""Help texts of the commands, shown first by `tightfit COMMAND --help`."""

__all__ = ["CHART_EXAMPLES", "EXAMPLES", "EXPORT_EXAMPLES", "MACHINE_EXAMPLES", "PLAN_EXAMPLES", "RUN_EXAMPLES"]

EXAMPLES = """Any diffusers pipeline, any memory budget, the same pictures.

Examples:

  tightfit run "a red circle on the left"
  tightfit run ./sdxl "an astronaut riding a horse" --budget 8GB

tightfit COMMAND --help says more.
"""

RUN_EXAMPLES = """Generate pictures.

Examples:

  tightfit run "a red circle on the left and a small blue square on the right"
  tightfit run ./sdxl "an astronaut riding a horse" --level 3 --out horse.png
  tightfit run ./flux "a lighthouse" --budget 8GB --ram 16GB
  tightfit run ./flux "a lighthouse" --budget cuda:0=10GB,cuda:1=8GB
  tightfit run ./flux "a lighthouse" --level 2 --set vae.tile=256
  tightfit run "a green triangle at the top" --level 3 --timeline memory.png

MODEL is a diffusers folder or a hub id. Left out, it is the demo model that
ships with tightfit.
"""

PLAN_EXAMPLES = """Say what would happen, without weights and without the card.

Examples:

  tightfit plan flux.1-dev --card rtx4090 --budget 8GB
  tightfit plan flux.1-dev --card rtx4090 --level 3
  tightfit plan sdxl --card rtx3060,rtx4060 --budget rtx3060=6GB,rtx4060=4GB
  tightfit plan sdxl --card rtx3060 --level 1 --height 1024 --width 1024
  tightfit plan wan-2.1-14b --card a100-80gb --frames 81 --json
  tightfit plan flux.1-dev --card rtx3060 --level 3 --timeline memory.png

MODEL is a known model, a diffusers folder or a hub id (only its small files
and the headers of its weights are read); left out, the demo model. CARD is a
known card, or several with commas between; left out, this computer, measured
once (tightfit machine). A wrong name is answered with those near it. Exit code
3: it does not fit.
"""

MACHINE_EXAMPLES = """Say what this computer has, and measure what it reaches.

Examples:

  tightfit machine
  tightfit machine --refresh
  tightfit machine --json

Memory is what is free now. Rates are measured once, in less than 20 s, and
kept; --refresh measures them anew. What runs with a budget took corrects the next
plan for the same; --refresh forgets that, too.
"""

EXPORT_EXAMPLES = """Export a model's denoiser to a file, for one size of request.

Examples:

  tightfit export --out unet.exported
  tightfit export ./sdxl --height 1024 --width 1024 --out sdxl.exported
  tightfit run ./sdxl "a lighthouse" --set components.unet.exported=sdxl.exported

The file holds no weights and no code. It is refused for other shapes, another
dtype, another configuration and other versions of torch and diffusers.
"""

CHART_EXAMPLES = """Say what known models do on known cards: level, time, peak, largest.

Examples:

  tightfit chart --models sd-1.5,flux.1-dev --cards rtx4060,rtx4090
  tightfit chart --models sdxl --ram 16GB
  tightfit chart --models sdxl,ltx-video-2b --out chart.png
  tightfit chart --level-table wan2.1-14b --cards rtx4090

What a model does is measured once, in seconds to minutes for each size, and
kept: another card is a matter of seconds, and an interrupted chart goes on
where it was. All known models may take hours the first time. Time and peak
are those of the plan that tightfit makes for the card, which is lossless.
Neither weights nor cards are needed.
"""
