"""The recipe of RFD4-Proteina, which designs proteins."""

import diffusers
import torch

from pipeline_classes.pictures_parts import _case
from tiny_pipelines import Parts, TinyCase

WANTED = ("hbond", "pistack", "pication", "saltbridge", "hydrophobic", "metal-coord")
RESIDUES, KINDS, LATENT = 147, 7, 8


def _proteina(scale: int = 1) -> Parts:
    width: Parts = {"token_dim": scale * 32, "nheads": 2 * scale, "dim_cond": scale * 16, "pair_repr_dim": scale * 16}
    transformer = diffusers.RFD4ProteinaTransformer(
        **width,
        nlayers=3,
        latent_dim=LATENT,
        token_type_emb_dim=8,
        cath_emb_dim=8,
        t_emb_dim=16,
        seq_sep_dim=8,
        tri_mult_c=scale * 8,
    )
    vae = diffusers.RFD4ProteinaAutoencoder(
        atom37_mask=[[True] * 37] * RESIDUES,
        allowed_residue_types=[[True] * RESIDUES] * KINDS,
        latent_dim=LATENT,
        nlayers=2,
        token_dim=32,
        nheads=2,
        dim_cond=16,
        pair_repr_dim=16,
        token_type_emb_dim=8,
    )
    return {
        "transformer": transformer,
        "vae": vae,
        "bb_ca_scheduler": diffusers.RFD4ProteinaScheduler("log", "1/t", 2.0, 0.5, tail_steps=1),
        "local_latents_scheduler": diffusers.RFD4ProteinaScheduler("power", "tan", 2.0, 0.5, tail_steps=1),
        "recycle_depths": [2, 1],
    }


def _chain(height: int) -> Parts:
    """One chain of amino acids, the first quarter of which is given."""
    length = height // 4
    places = torch.arange(length)[None]
    given = places < length // 4
    chain = torch.zeros(1, length, dtype=torch.long)
    atoms = torch.randn(1, length, 37, 3, generator=torch.Generator().manual_seed(2))
    wanted = (atoms[..., 0] > 1).long()
    return {
        "padding_mask": torch.ones(1, length, dtype=torch.bool),
        "is_in_context_conditioning": given,
        "supports_local_latent": torch.ones(1, length, dtype=torch.bool),
        "token_type": chain,
        "atom37_mask": torch.ones(1, length, 37, dtype=torch.bool),
        "coords_nm": atoms,
        "conditioning_features": {
            **{f"condition_{name}_1_atom": wanted for name in WANTED},
            "condition_sequence_1_residue": chain,
            "condition_index-group_1_token": chain,
            "molecule_iid": chain,
            "molecule_entity_id": chain,
            "token_bond_path_length": (places[..., None] - places[:, None]).abs(),
        },
    }


CASES: tuple[TinyCase, ...] = (_case("RFD4Proteina", _proteina, _chain),)
OPTIONAL_PARTS: dict[str, str] = {}
