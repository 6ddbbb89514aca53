"""Training the demo model: the same from the same seed, and the same when it was interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo_training import autoencoder, denoiser, networks, text

CPU = torch.device("cpu")


class Interrupted(Exception):
    pass


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, *, stop_at: int | None = None) -> dict[str, torch.Tensor]:
    """A few steps of each stage; `stop_at` raises after that many denoiser checkpoints."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(denoiser, "SAVE_EVERY", 0)
    monkeypatch.setattr(denoiser, "score", lambda *_, **__: {})
    torch.manual_seed(0)
    tokenizer = networks.make_tokenizer()
    vae, encoder, unet = networks.make_autoencoder(), networks.make_text_encoder(tokenizer), networks.make_denoiser()
    autoencoder.train(vae, folder, steps=2, whole=1, seed=0, device=CPU)
    autoencoder.sharpen(vae, folder, steps=2, seed=0, device=CPU)
    text.train(encoder, tokenizer, folder, steps=2, seed=0, device=CPU)
    saves = 0
    plain_save = denoiser.checkpoint.save

    def save(*arguments: object) -> None:
        nonlocal saves
        plain_save(*arguments)
        saves += 1
        if saves == stop_at:
            raise Interrupted

    monkeypatch.setattr(denoiser.checkpoint, "save", save)
    try:
        _, average = denoiser.train(vae, encoder, tokenizer, unet, folder, steps=4, scenes=64, seed=0, device=CPU)
    finally:
        monkeypatch.undo()
    return {key: value.clone() for key, value in average.state_dict().items()}


@pytest.mark.slow
def test_sharpening_leaves_the_encoder_alone(tmp_path: Path) -> None:
    vae = networks.make_autoencoder()
    before = {key: value.clone() for key, value in vae.state_dict().items()}
    autoencoder.sharpen(vae, tmp_path, steps=2, seed=0, device=CPU)
    changed = {key for key, value in vae.state_dict().items() if not torch.equal(value, before[key])}
    assert {key.split(".")[0] for key in changed} == {"decoder", "post_quant_conv"}


@pytest.mark.slow
def test_interrupted_training_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tmp_path / "whole", monkeypatch)
    with pytest.raises(Interrupted):
        train(tmp_path / "broken", monkeypatch, stop_at=2)
    resumed = train(tmp_path / "broken", monkeypatch)
    assert [key for key in whole if not torch.equal(whole[key], resumed[key])] == []
