"""The tiny autoencoders are fit to test with: all there are, of any height, repeatable, finite, of order one."""

import diffusers.models
import pytest
import torch

from tiny_autoencoders import CASES, OPTIONAL_PARTS, TinyAutoencoder, decode, encode

# one of them looks at neighbourhoods by flex attention, which has no compiled kernel here
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

TINY = [case for case in CASES if not case.large]
BATCH = 2


def test_every_class_that_decodes_has_a_case_or_a_reason() -> None:
    exported = {name: getattr(diffusers.models, name) for name in dir(diffusers.models)}
    decoders = {name for name, kind in exported.items() if isinstance(kind, type) and hasattr(kind, "decode")}
    cases = {case.name.partition(" ")[0] for case in CASES}
    assert len(decoders) > 30
    assert cases | set(OPTIONAL_PARTS) == decoders
    assert not cases & set(OPTIONAL_PARTS)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_it_decodes_and_encodes_a_batch_of_any_height(case: TinyAutoencoder) -> None:
    model = case.make()
    for rows in [case.only_rows] if case.only_rows else [case.least_rows, case.least_rows + 3 * case.granule]:
        latents, pixels = case.latents(rows, BATCH), case.pixels(rows, BATCH)
        decoded = decode(model, case, latents, BATCH)
        assert decoded.shape[-2:] == pixels.shape[-2:]
        assert len(decoded) == len(pixels)
        assert decoded.isfinite().all()
        assert 0.2 < decoded.std() < 2
        if case.encodes:
            encoded = encode(model, pixels)
            assert encoded.shape == latents.shape
            assert encoded.isfinite().all()
            assert encoded.std() > 0.1


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_the_same_call_gives_the_same(case: TinyAutoencoder) -> None:
    latents = case.latents(case.only_rows or case.least_rows, 1)
    model, again = case.make(), case.make()
    decoded = decode(model, case, latents, 1)
    assert torch.equal(decode(again, case, latents, 1), decoded) != case.draws_noise
