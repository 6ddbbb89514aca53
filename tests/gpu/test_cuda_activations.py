"""Activations that wait in host memory, on a real card: beside its arithmetic, with the bits of what stays there."""

from __future__ import annotations

import pytest
import torch

from inspection import assert_same, imprint
from tightfit import fit
from tightfit.devices.choose import choose_device
from tightfit.devices.cuda_support import cuda_count
from tightfit.devices.pinned_pool import ActivationHostPool, bytes_of
from tiny_autoencoders import CASES as AUTOENCODERS
from tiny_autoencoders import decode
from tiny_pipelines import CASES, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_count(), reason="needs a CUDA card")]

MIB = 2**20


def test_memory_is_not_used_again_before_copies_are_done() -> None:
    """Large copies out, each from memory that is freed and overwritten at once, and back, while the card computes."""
    device = choose_device("cuda")
    host_pool = ActivationHostPool(device)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        tapes = []
        for number in range(6):
            source = torch.full((16 * MIB,), number, dtype=torch.int32, device="cuda")
            tape = host_pool.tape(source.nbytes)
            tape.write(bytes_of(source))
            tapes.append(tape)
            del source
            if number % 2:
                tapes[-2].sent()
            torch.full((16 * MIB,), -1, dtype=torch.int32, device="cuda")  # where what was freed lay
            busy = busy @ busy / 64
        handles = []
        for number, tape in enumerate(tapes):
            target = torch.empty(16 * MIB, dtype=torch.int32, device="cuda")
            handles.append((number, target, tape.read(0, bytes_of(target))))
            busy = busy @ busy / 64
        for number, target, handle in handles:
            handle.settle()
            assert bool((target == number).all())
    host_pool.close()
    assert host_pool.idle


@pytest.mark.realtime
def test_copies_pass_beside_the_arithmetic() -> None:
    device = choose_device("cuda")
    host_pool, size = ActivationHostPool(device), 256 * MIB
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    left, right = (torch.randn(4096, 4096, device="cuda", dtype=torch.float16) for _ in range(2))
    tape = host_pool.tape(size)
    tape.write(source)
    host_pool.settle()  # pages are locked now

    def copy() -> None:
        tape.read(0, source).settle()

    crossing = device.seconds(copy)
    once = device.seconds(lambda: [left @ right for _ in range(20)]) / 20
    times = round(crossing / once)

    def both() -> None:
        handle = tape.read(0, source)
        for _ in range(times):
            left @ right
        handle.settle()

    both()
    assert device.seconds(both) < 1.5 * crossing
    host_pool.close()


@pytest.mark.parametrize("strips", [1, 30_000, 10**9])
def test_maps_in_host_memory_give_the_bits_of_maps_on_the_card(strips: int) -> None:
    case = next(case for case in AUTOENCODERS if case.name == "AutoencoderKL without attention")
    model = case.make().eval()
    before, latents, made = imprint(model), case.latents(16, 1).to("cuda"), []
    for maps in ("device", "host"):
        fitted = fit(model, plan={"vae": {"strips": strips, "feature_maps": maps}}, device="cuda")
        made.append([decode(model, case, latents, 1).cpu() for _ in range(3)])
        moved = fitted.report().trace.phases[0].bytes_out
        assert (moved > 0) == (maps == "host")
        fitted.undo()
    assert all(torch.equal(made[1][0], again) for again in made[1])
    assert float((made[0][0] - made[1][0]).abs().max()) <= 1e-5 * float(made[0][0].abs().max())  # other strips
    assert_same(before, imprint(model))


@pytest.mark.parametrize("name", ["StableDiffusion", "StableDiffusionXL"])
def test_skips_in_host_memory_change_nothing(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    pipe = case.make()
    fit(pipe, level=0, device="cuda")
    wanted = run(pipe, case).cpu()
    fitted = fit(pipe, plan={"level": 0, "offload_activations": True}, device="cuda")
    for _ in range(3):
        assert torch.equal(run(pipe, case).cpu(), wanted)
    assert sum(phase.bytes_out for phase in fitted.report().trace.phases) > 0
    fitted.undo()
