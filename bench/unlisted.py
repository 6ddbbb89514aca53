"""Folders of models that are not in the catalog, of classes that are: configurations, and weights that nobody has.

    python bench/unlisted.py FOLDER  # writes FOLDER/sdxl-unlisted and FOLDER/wan-unlisted

Each is a known model with other networks: an SDXL with shallower blocks, a Wan with fewer layers, and in both an
autoencoder that scales latents otherwise. Tokenizers and schedulers are those of the tests' tiny pipelines. Files of
weights have their headers and no numbers: as long as they ought to be, and sparse on the disk.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # for the tiny pipelines
from tightfit.catalog.known import KnownComponent, known_model
from tightfit.measure.build_models import build_part
from tiny_pipelines import CASES

MODELS: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {  # the known one, the tiny one, and what differs
    "sdxl-unlisted": (
        "sdxl",
        "StableDiffusionXL",
        {"unet": {"transformer_layers_per_block": [1, 2, 4]}, "vae": {"scaling_factor": 0.2}},
    ),
    "wan-unlisted": ("wan-2.1-14b", "Wan", {"transformer": {"num_layers": 30}, "vae": {"latents_mean": [0.0] * 16}}),
}
PROMPT_TOKENS = 77
_SHORT = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.int64": "I64"}


def make_folder(name: str, folder: Path) -> Path:
    """Writes the model called `name` to a folder of its own in `folder`."""
    like, tiny, changes = MODELS[name]
    known, store = known_model(like), folder / name
    (case,) = (case for case in CASES if case.name == tiny)
    case.make().save_pretrained(store, safe_serialization=True)
    for part, component in known.components.items():
        if component.dtype is not None:
            changed = component.model_copy(update={"config": component.config | changes.get(part, {})})
            _write_network(part, changed, store / part)
    for file in store.glob("tokenizer*/tokenizer_config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": PROMPT_TOKENS}))
    return store


def _write_network(name: str, component: KnownComponent, store: Path) -> None:
    network = build_part(name, component)
    for file in store.glob("*.safetensors*"):
        file.unlink()
    before = json.loads((store / "config.json").read_text())
    own = {key: value for key, value in before.items() if key in ("_class_name", "architectures", "model_type")}
    (store / "config.json").write_text(json.dumps(component.config | own))
    header, end = {}, 0
    for path, tensor in network.state_dict().items():
        span = [end, end := end + tensor.nbytes]
        header[path] = {"dtype": _SHORT[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": span}
    words = json.dumps(header).encode()
    kind = "model" if component.library == "transformers" else "diffusion_pytorch_model"
    file = store / f"{kind}.safetensors"
    file.write_bytes(len(words).to_bytes(8, "little") + words)
    os.truncate(file, 8 + len(words) + end)


if __name__ == "__main__":
    for name in MODELS:
        print(make_folder(name, Path(sys.argv[1])))
