"""A network that makes its own weights anew on the device as it works, as StableUnCLIP's image normalizer does."""

from __future__ import annotations

import torch
from torch import nn

from inspection import relative_error
from tightfit import fit

PLACEMENTS = ("resident", "offload", "stream")


class Renewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = nn.Parameter(self.scale.to(x.device) * 2)
        self.layers[1].weight = nn.Parameter(self.layers[1].weight.to(x.device) * 3)
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def check_renewed(placement: str, device: str, x: torch.Tensor) -> None:
    """Two calls and `undo`: what `x`, on the device, gives, and where the weights are then."""
    torch.manual_seed(0)
    like, network = Renewing(), Renewing()
    network.load_state_dict(like.state_dict())
    wanted = [like(x.cpu()) for _ in range(2)]
    fitted = fit(network, plan={"components": {"model": {"placement": placement}}}, device=device)
    assert all(relative_error(network(x).cpu(), numbers) < 1e-5 for numbers in wanted)
    fitted.undo()
    assert {weight.device.type for weight in network.parameters()} == {"cpu"}
    assert all(map(torch.equal, network.parameters(), like.parameters()))
