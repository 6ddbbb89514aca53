"""What moves together, what stays and how large the ring is; and that a step takes no longer than it must."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tightfit.errors import PlanError
from tightfit.plan.layer_selection import (
    AHEAD,
    ALIGNMENT,
    BLOCKS_FROM,
    choose_resident_layers,
    group_layers,
    resolve_streaming,
)
from tightfit.plan.prefetch import Lease, Ring
from tightfit.schema.footprint import Component, WeightBlock
from tightfit.schema.plan import ComponentPlan, Granularity
from tightfit.schema.stores import STORES

PAGE = ALIGNMENT
PADDING, SECTORS = 1024, 4  # bytes and pages that a layer takes in addition, from host memory and from the disk
BARE = PAGE - PADDING  # bytes of a leaf that takes one page in the ring
GRANULARITIES: tuple[Granularity, ...] = ("layer", "block")


def component(leaves: Mapping[str, int], blocks: Collection[str] = (), small_bytes: int = 0) -> Component:
    units = (WeightBlock(name=name, bytes=0) for name in (*blocks, ""))
    return Component(
        name="transformer",
        class_name="T",
        role="denoiser",
        bytes=sum(leaves.values()) + small_bytes,
        blocks=tuple(units) if blocks else (),
        layers=tuple(WeightBlock(name=name, bytes=size) for name, size in leaves.items()),
    )


def layers(*pages: int, small_bytes: int = 0) -> Component:
    """Layers that take so many pages in the ring."""
    return component({f"l{i}": (count - 1) * PAGE + BARE for i, count in enumerate(pages)}, small_bytes=small_bytes)


def settle(what: Component, seconds: Mapping[str, float] | None = None, **choices: Any) -> ComponentPlan:
    return resolve_streaming(what, ComponentPlan(placement="stream", **choices), seconds)


def in_ring(what: Component, plan: ComponentPlan) -> dict[str, int]:
    """Bytes that all that moves together takes on the device, by what is said of them."""
    assert plan.granularity is not None
    more = SECTORS * PAGE if plan.offload_to == "disk" else PADDING
    own = {layer.name: layer.bytes + more for layer in what.layers}
    groups = group_layers(what, plan.granularity)
    return {name: -(-sum(own[layer] for layer in inside) // PAGE) * PAGE for name, inside in groups.items()}


def stay_bytes(what: Component, plan: ComponentPlan) -> int:
    sizes = in_ring(what, plan)
    return sum(sizes[name] for name in plan.resident_layers or ())


@st.composite
def components(draw: st.DrawFn) -> Component:
    """Blocks that are alike, or not, and layers outside of them."""
    size = st.one_of(st.integers(1, 5 * PAGE), st.integers(1, 60 * PAGE))
    alike = draw(st.lists(size, min_size=1, max_size=4))
    blocks = draw(st.integers(0, 12))
    leaves = {f"blocks.{b}.l{i}": size for b in range(blocks) for i, size in enumerate(alike)}
    leaves |= {f"outside.{i}": size for i, size in enumerate(draw(st.lists(size, max_size=4)))}
    return component(leaves, [f"blocks.{b}" for b in range(blocks)], draw(st.integers(0, 20 * PAGE)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Component, dict[str, Any], dict[str, float] | None]:
    """A component, what is chosen for it apart from `weights`, and how long its leaves are at work."""
    what = draw(components())
    chosen = {
        "offload_to": draw(st.sampled_from(list(STORES))),
        "granularity": draw(st.sampled_from((None, *GRANULARITIES))),
    }
    times = st.floats(0, 10) | st.just(0.0)
    return what, chosen, {layer.name: draw(times) for layer in what.layers} if draw(st.booleans()) else None


def some_weights(what: Component) -> st.SearchStrategy[int]:
    return st.integers(1, what.bytes + 6 * PAGE * (len(what.layers) + 1))


# what moves together


BLOCKS = component(
    {"embed": 1, "blocks.1.up": 2, "blocks.1.down": 3, "blocks.10.up": 4, "blocks.2": 5, "out": 6},
    ["blocks.1", "blocks.2", "blocks.10"],
)


def test_leaves_move_one_by_one() -> None:
    assert group_layers(BLOCKS, "layer") == {layer.name: [layer.name] for layer in BLOCKS.layers}
    assert list(group_layers(BLOCKS, "layer")) == [layer.name for layer in BLOCKS.layers]


def test_the_leaves_of_a_block_move_together() -> None:
    assert group_layers(BLOCKS, "block") == {
        "embed": ["embed"],
        "blocks.1": ["blocks.1.up", "blocks.1.down"],
        "blocks.10": ["blocks.10.up"],  # whose name begins with that of another
        "blocks.2": ["blocks.2"],  # itself a leaf
        "out": ["out"],
    }
    assert list(group_layers(BLOCKS, "block")) == ["embed", "blocks.1", "blocks.10", "blocks.2", "out"]


def test_without_blocks_there_is_one_grain() -> None:
    what = component({"a": 1, "b.c": 2})
    assert group_layers(what, "block") == group_layers(what, "layer") == {"a": ["a"], "b.c": ["b.c"]}


@settings(deadline=None)
@given(what=components(), granularity=st.sampled_from(GRANULARITIES))
def test_every_leaf_moves_once(what: Component, granularity: Granularity) -> None:
    groups = group_layers(what, granularity)
    assert sorted(layer for inside in groups.values() for layer in inside) == sorted(
        layer.name for layer in what.layers
    )


# how much stays


@settings(deadline=None, max_examples=300)
@given(case=cases(), data=st.data())
def test_all_together_is_never_more_than_there_may_be(case: tuple[Component, dict[str, Any], Any], data: Any) -> None:
    what, chosen, seconds = case
    weights = data.draw(some_weights(what))
    small_bytes = what.bytes - sum(layer.bytes for layer in what.layers)
    try:
        plan = settle(what, seconds, weight_memory=weights, **chosen)
    except PlanError as error:
        least = error.facts["needed_bytes"]
        assert isinstance(least, int)
        assert least > weights
        return
    assert plan.ring_buffer is not None
    assert stay_bytes(what, plan) + plan.ring_buffer + small_bytes <= weights


@settings(deadline=None, max_examples=300)
@given(case=cases(), share=st.floats(0, 1.2), pages=st.integers(0, 10) | st.integers(0, 150))
@example(case=(layers(*[4] * 10), {}, None), share=0.3, pages=3)
def test_a_ring_that_is_asked_for_is_refused_or_kept_to(
    case: tuple[Component, dict[str, Any], Any], share: float, pages: int
) -> None:
    what, chosen, seconds = case
    weights, ring = 1 + int(share * what.bytes) + pages * PAGE, pages * PAGE
    small_bytes = what.bytes - sum(layer.bytes for layer in what.layers)
    try:
        plan = settle(what, seconds, weight_memory=weights, ring_buffer=ring, **chosen)
    except PlanError:
        return
    assert plan.ring_buffer is not None
    assert plan.ring_buffer <= ring
    assert stay_bytes(what, plan) + plan.ring_buffer + small_bytes <= weights


@settings(deadline=None, max_examples=300)
@given(case=cases(), data=st.data())
def test_the_ring_takes_the_largest_that_passes_through(case: tuple[Component, dict[str, Any], Any], data: Any) -> None:
    what, chosen, seconds = case
    weights = data.draw(st.none() | some_weights(what))
    try:
        plan = settle(what, seconds, weight_memory=weights, **chosen)
    except PlanError:
        assert weights is not None  # without a wish there is always a way
        return
    sizes = in_ring(what, plan)
    assert plan.resident_layers is not None
    assert plan.ring_buffer is not None
    assert list(plan.resident_layers) == [
        name for name in sizes if name in plan.resident_layers
    ]  # in the order of the model, each once
    assert plan.ring_buffer >= max(
        (size for name, size in sizes.items() if name not in plan.resident_layers), default=0
    )


@settings(deadline=None)
@given(case=cases(), data=st.data())
def test_what_is_settled_is_settled(case: tuple[Component, dict[str, Any], Any], data: Any) -> None:
    what, chosen, seconds = case
    weights = data.draw(st.none() | some_weights(what))
    try:
        plan = settle(what, seconds, weight_memory=weights, **chosen)
    except PlanError:
        return
    assert resolve_streaming(what, plan, seconds) == plan


@settings(deadline=None)
@given(case=cases())
def test_everything_stays_where_it_fits(case: tuple[Component, dict[str, Any], Any]) -> None:
    what, chosen, seconds = case
    chosen["granularity"] = chosen["granularity"] or "layer"
    small_bytes = what.bytes - sum(layer.bytes for layer in what.layers)
    sizes = in_ring(what, ComponentPlan(placement="stream", **chosen))
    whole = sum(sizes.values()) + small_bytes
    if not sizes:
        return
    plan = settle(what, seconds, weight_memory=whole, **chosen)
    assert (plan.resident_layers, plan.ring_buffer) == (tuple(sizes), 0)
    if len(sizes) > 1:
        plan = settle(what, seconds, weight_memory=whole - 1, **chosen)
        assert plan.resident_layers != tuple(sizes)


@settings(deadline=None, max_examples=200)
@given(case=cases(), data=st.data())
def test_with_more_weights_no_less_stays_but_for_one_parcel(
    case: tuple[Component, dict[str, Any], Any], data: Any
) -> None:
    """Which ones come late depends on the link that is imagined, so what stays may fill its room a little less well."""
    what, chosen, seconds = case
    chosen["granularity"] = chosen["granularity"] or "layer"
    few, many = sorted((data.draw(some_weights(what)), data.draw(some_weights(what))))
    try:
        before = settle(what, seconds, weight_memory=few, **chosen)
    except PlanError:
        return
    after = settle(what, seconds, weight_memory=many, **chosen)  # what was enough is enough
    sizes = in_ring(what, after)
    passing = [size for name, size in sizes.items() if name not in (after.resident_layers or ())]
    assert stay_bytes(what, after) > stay_bytes(what, before) - max(passing, default=1)


@settings(deadline=None)
@given(
    pages=st.integers(1, 20),
    count=st.integers(1, 40),
    weights=st.tuples(st.integers(1, 800), st.integers(1, 800)),
)
def test_of_equal_layers_with_more_weights_no_less_stays(pages: int, count: int, weights: tuple[int, int]) -> None:
    what = layers(*[pages] * count)
    few, many = sorted(weights)
    if few < min(pages, pages * count):
        return
    assert len(settle(what, weight_memory=few * PAGE).resident_layers or ()) <= len(
        settle(what, weight_memory=many * PAGE).resident_layers or ()
    )


def test_without_a_wish_few_of_the_largest_are_on_their_way() -> None:
    plan = settle(layers(*[3] * 20))
    assert (plan.granularity, plan.resident_layers, plan.ring_buffer) == ("layer", (), AHEAD * 3 * PAGE)
    plan = settle(layers(*[3] * AHEAD))
    assert (plan.resident_layers, plan.ring_buffer) == (tuple(f"l{i}" for i in range(AHEAD)), 0)


def test_what_is_larger_than_many_others_stays() -> None:
    plan = settle(layers(2, 100, 2, 2, 2, 2, 2))
    assert (plan.resident_layers, plan.ring_buffer) == (("l1",), AHEAD * 2 * PAGE)
    plan = settle(layers(2, 100, 2, 2, 2, 2, 2), weight_memory=110 * PAGE)
    assert plan.ring_buffer == AHEAD * 2 * PAGE
    assert "l1" in (plan.resident_layers or ())
    assert len(plan.resident_layers or ()) == 2


def test_what_is_larger_than_all_others_stays_in_little_room_too() -> None:
    """Or 112 pages come in each step, one after the other, instead of 12."""
    plan = settle(layers(2, 100, 2, 2, 2, 2, 2), weight_memory=104 * PAGE)
    assert (plan.resident_layers, plan.ring_buffer) == (("l1",), 4 * PAGE)


def test_between_one_and_all_that_it_wants_the_ring_gets_what_there_is() -> None:
    what = layers(*[2] * 20)
    assert [settle(what, weight_memory=n * PAGE).ring_buffer for n in (2, 3, 7, 8, 9, 10)] == [
        n * PAGE for n in (2, 3, 7, 8, 8, 8)
    ]
    assert [len(settle(what, weight_memory=n * PAGE).resident_layers or ()) for n in (7, 8, 9, 10, 12, 39)] == [
        0,
        0,
        0,
        1,
        2,
        15,
    ]


def test_what_is_small_and_always_there_counts() -> None:
    small_bytes = 5 * PAGE + 77
    plan = settle(layers(*[2] * 20, small_bytes=small_bytes), weight_memory=10 * PAGE + small_bytes)
    assert (plan.ring_buffer, len(plan.resident_layers or ())) == (8 * PAGE, 1)
    with pytest.raises(PlanError):
        settle(layers(*[2] * 20, small_bytes=small_bytes), weight_memory=2 * PAGE + small_bytes - 1)
    assert (
        settle(layers(*[2] * 20, small_bytes=small_bytes), weight_memory=2 * PAGE + small_bytes).ring_buffer == 2 * PAGE
    )


# too little, or wrong


def test_too_little_says_what_would_be_enough() -> None:
    small_bytes = 3 * 2**20
    what = layers(*[256] * 20, small_bytes=small_bytes)
    with pytest.raises(PlanError) as caught:
        settle(what, weight_memory=2 * 2**20)
    said = str(caught.value)
    assert "transformer" in said
    assert "2 MiB" in said  # what there is
    assert "3 MiB" in said  # what is loose
    assert "4,194,304 bytes" in said  # what would do, to the byte: rounded, it might not
    assert caught.value.facts == {"name": "transformer", "needed_bytes": 4 * 2**20}


@settings(deadline=None, max_examples=200)
@given(case=cases())
def test_what_is_said_to_be_enough_is_enough_and_a_byte_less_is_not(
    case: tuple[Component, dict[str, Any], Any],
) -> None:
    what, chosen, seconds = case
    if not what.layers:
        return
    try:
        settle(what, seconds, weight_memory=1, **chosen)
    except PlanError as error:
        least = error.facts["needed_bytes"]
    assert isinstance(least, int)
    plan = settle(what, seconds, weight_memory=least, **chosen)
    assert plan.ring_buffer is not None
    with pytest.raises(PlanError) as caught:
        settle(what, seconds, weight_memory=least - 1, **chosen)
    assert caught.value.facts["needed_bytes"] == least


def test_names_that_stay_must_exist() -> None:
    what = component({"blocks.0.up": PAGE, "blocks.0.down": PAGE}, ["blocks.0"])
    with pytest.raises(PlanError, match=r"unknown layer of transformer 'blocks.0.upp': did you mean 'blocks.0.up'\?"):
        settle(what, resident_layers=("blocks.0.upp",))
    with pytest.raises(PlanError, match=r"unknown layer of transformer 'blocks.0.up': did you mean 'blocks.0'\?"):
        settle(what, granularity="block", resident_layers=("blocks.0.up",))


def test_what_is_named_stays_and_the_ring_is_for_the_rest() -> None:
    what = layers(*[2] * 19, 5)
    plan = settle(what, resident_layers=("l0", "l3"))
    assert (plan.resident_layers, plan.ring_buffer) == (("l0", "l3"), AHEAD * 5 * PAGE)
    plan = settle(what, resident_layers=("l0", "l19"))
    assert plan.ring_buffer == AHEAD * 2 * PAGE
    assert settle(what, resident_layers=()).resident_layers == ()
    assert (
        settle(what, resident_layers=tuple(f"l{i}" for i in range(1, 20))).ring_buffer == 2 * PAGE
    )  # of one, no more than that
    assert settle(what, resident_layers=tuple(f"l{i}" for i in range(20))).ring_buffer == 0


def test_a_ring_too_small_for_what_passes_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"transformer: a ring of 16 KiB cannot take .* of 20 KiB"):
        settle(layers(2, 5, 2), resident_layers=("l0",), ring_buffer=4 * PAGE)
    assert settle(layers(2, 5, 2), resident_layers=("l0",), ring_buffer=5 * PAGE).ring_buffer == 5 * PAGE
    assert settle(layers(2, 5, 2), resident_layers=("l1",), ring_buffer=4 * PAGE).ring_buffer == 4 * PAGE


def test_a_ring_larger_than_the_room_takes_the_room() -> None:
    plan = settle(layers(*[4] * 10), weight_memory=12 * PAGE, ring_buffer=20 * PAGE)
    assert (plan.resident_layers, plan.ring_buffer) == ((), 12 * PAGE)


def test_a_ring_too_small_for_any_layer_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot take"):
        settle(layers(*[4] * 10), weight_memory=12 * PAGE, ring_buffer=3 * PAGE)


# grains


def test_blocks_move_whole_where_there_is_room_for_many() -> None:
    names = [f"blocks.{b}" for b in range(60)]
    what = component({f"{name}.{layer}": BARE + PAGE for name in names for layer in ("up", "down")}, names)
    enough = BLOCKS_FROM * 4 * PAGE
    assert settle(what, weight_memory=enough).granularity == "block"
    assert settle(what, weight_memory=enough - 1).granularity == "layer"
    assert settle(what).granularity == "layer"
    assert settle(what, weight_memory=enough, granularity="layer").granularity == "layer"
    assert settle(what, weight_memory=8 * PAGE, granularity="block").granularity == "block"
    block = settle(what, weight_memory=enough)
    assert set(block.resident_layers or ()) <= set(names)
    assert block.ring_buffer == AHEAD * 4 * PAGE


def test_blocks_are_not_taken_for_room_that_what_is_small_takes() -> None:
    """1,000 pages are small and always there: of what is left, a layer can pass through, and a block cannot."""
    what = component({f"blocks.0.{i}": BARE for i in range(8)}, ["blocks.0"], small_bytes=1000 * PAGE)
    assert settle(what, granularity="layer", weight_memory=1004 * PAGE).granularity == "layer"
    assert settle(what, weight_memory=1004 * PAGE).granularity == "layer"


# homes


def test_from_disks_come_whole_sectors() -> None:
    host = settle(layers(*[10] * 20), offload_to="cpu")
    disk = settle(layers(*[10] * 20), offload_to="disk")
    assert host.ring_buffer == AHEAD * 10 * PAGE
    assert disk.ring_buffer == AHEAD * (10 + SECTORS) * PAGE


def test_of_a_block_on_disk_each_leaf_has_its_sectors() -> None:
    what = component(
        {f"blocks.{b}.{i}": 2 * PAGE for b in range(20) for i in range(3)}, [f"blocks.{b}" for b in range(20)]
    )
    assert settle(what, offload_to="disk", granularity="block").ring_buffer == AHEAD * 3 * (2 + SECTORS) * PAGE


@settings(deadline=None)
@given(what=components(), granularity=st.sampled_from(GRANULARITIES))
def test_a_disk_needs_no_less_than_host_memory(what: Component, granularity: Granularity) -> None:
    if not what.layers:
        return
    least = {}
    for store in STORES:
        with pytest.raises(PlanError) as caught:
            settle(what, offload_to=store, granularity=granularity, weight_memory=1)
        least[store] = caught.value.facts["needed_bytes"]
    assert least["disk"] > least["cpu"]  # type: ignore[operator]


# what stays is spread


@settings(deadline=None, max_examples=200)
@given(
    pages=st.lists(st.integers(1, 30), max_size=30),
    more=st.integers(0, 60),
    capacity=st.integers(0, 900),
    times=st.none() | st.lists(st.floats(0, 5), min_size=30, max_size=30),
)
def test_no_more_stays_than_there_is_room_for(
    pages: list[int], more: int, capacity: int, times: list[float] | None
) -> None:
    sizes = {str(i): count * PAGE for i, count in enumerate(pages)}
    seconds = None if times is None else dict(zip(sizes, times, strict=False))
    ring = (max(pages, default=0) + more) * PAGE
    resident = choose_resident_layers(sizes, capacity * PAGE, ring, seconds)
    assert resident <= set(sizes)
    assert sum(sizes[name] for name in resident) <= capacity * PAGE
    assert (resident == set(sizes)) == (sum(pages) <= capacity)
    left = capacity * PAGE - sum(sizes[name] for name in resident)
    assert all(sizes[name] > left for name in sizes if name not in resident)  # no room is left that somebody could use


def test_what_takes_long_gives_time_for_what_follows() -> None:
    """Layers of equal size: those stay that follow upon quick ones, not those for which there was time to come."""
    sizes = {str(i): PAGE for i in range(40)}
    seconds = {str(i): 9.0 if i < 20 else 1.0 for i in range(40)}
    resident = choose_resident_layers(sizes, 10 * PAGE, 4 * PAGE, seconds)
    assert sum(int(name) >= 20 for name in resident) >= 9


# how long a step takes


def seconds_per_step(
    sizes: Mapping[str, int], seconds: Mapping[str, float], resident: Collection[str], ring: int, rate: float
) -> float:
    """Of a device that computes one after the other, and a link that brings `rate` bytes a second into a real ring.

    What passes is sent in the order of use, as soon as there is a place, and written when the last work there is done.
    """
    passing = [name for name in sizes if name not in resident]
    room, here = Ring(ring), {}  # what is there or on its way: its place, and when it has come
    link = device = 0.0
    sent, ends = 0, []

    def lease_next() -> tuple[str, Lease] | None:
        name = passing[sent % len(passing)] if passing else ""
        lease = room.take(sizes[name]) if passing and name not in here else None
        return None if lease is None else (name, lease)

    for _ in range(6):
        for name in sizes:
            while found := lease_next():
                link = max(link, found[1].after or 0.0) + sizes[found[0]] / rate
                here[found[0]] = found[1], link
                sent += 1
            lease, begin_load = here.pop(name, (None, 0.0))
            assert lease or name in resident, f"{name} is needed, and there was no place for it"
            device = max(device, begin_load) + seconds[name]
            if lease:
                room.give_back(lease, device)
        ends.append(device)
    return (ends[-1] - ends[-3]) / 2  # two steps, long after the first


def test_the_model_of_a_step_is_right_where_everybody_knows() -> None:
    sizes, seconds = {str(i): PAGE for i in range(10)}, {str(i): 1.0 for i in range(10)}
    assert seconds_per_step(sizes, seconds, sizes, 0, 1.0) == 10  # all stay
    assert seconds_per_step(sizes, seconds, (), 2 * PAGE, PAGE) == 10  # one comes while one works
    assert seconds_per_step(sizes, seconds, (), PAGE, PAGE) == 20  # one comes, then it works
    assert seconds_per_step(sizes, seconds, (), 4 * PAGE, PAGE / 3) == 30  # the link is slow
    assert seconds_per_step(sizes, seconds, ("1", "3", "5", "7", "9"), PAGE, PAGE) == 10


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(10, 50),
    leaves=st.integers(1, 8),
    share=st.floats(0, 0.99),
    speed=st.sampled_from([0.5, 0.9, 1.0, 1.1, 2.0]),
)
def test_a_step_takes_hardly_longer_than_it_must(
    seed: int, blocks: int, leaves: int, share: float, speed: float
) -> None:
    """Any choice that fits computes all, and brings all that has no place: no step is shorter than either takes."""
    dice = random.Random(seed)
    alike = [(dice.randint(64, 2048), dice.uniform(0.5, 2)) for _ in range(leaves)]
    sizes = {f"{b}.{i}": pages * PAGE for b in range(blocks) for i, (pages, _) in enumerate(alike)}
    seconds = {f"{b}.{i}": pages * slowness for b in range(blocks) for i, (pages, slowness) in enumerate(alike)}
    ring, total, work = AHEAD * max(sizes.values()), sum(sizes.values()), sum(seconds.values())
    capacity = int(share * total)
    if total - capacity < 24 * max(sizes.values()):  # of few, it matters which ones fit
        return
    rate = speed * (total - capacity) / work  # 1: the link takes as long as the device
    shortest = max(work, (total - capacity) / rate)
    resident = choose_resident_layers(sizes, capacity, ring, seconds)
    assert seconds_per_step(sizes, seconds, resident, ring, rate) <= 1.05 * shortest


def test_the_first_layers_would_be_the_wrong_ones_to_keep() -> None:
    sizes, seconds = {str(i): PAGE for i in range(40)}, {str(i): 1.0 for i in range(40)}
    resident = choose_resident_layers(sizes, 20 * PAGE, 4 * PAGE, seconds)
    assert seconds_per_step(sizes, seconds, resident, 4 * PAGE, PAGE / 2) == 40
    assert seconds_per_step(sizes, seconds, {str(i) for i in range(20)}, 4 * PAGE, PAGE / 2) > 50


@pytest.mark.parametrize("stay", [3, 10, 13, 20, 27, 30, 39])
@pytest.mark.parametrize("ring", [2, 3, 4])
def test_of_equal_layers_those_that_stay_are_as_good_as_evenly_apart(stay: int, ring: int) -> None:
    sizes, seconds = {str(i): PAGE for i in range(40)}, {str(i): 1.0 for i in range(40)}
    resident = choose_resident_layers(sizes, stay * PAGE, ring * PAGE)
    assert len(resident) == stay
    rate = (40 - stay) * PAGE / 40
    even = seconds_per_step(sizes, seconds, {str(i * 40 // stay) for i in range(stay)}, ring * PAGE, rate)
    assert seconds_per_step(sizes, seconds, resident, ring * PAGE, rate) <= 1.05 * even


@pytest.mark.parametrize(
    "stay", [pytest.param(13, marks=pytest.mark.xfail(strict=True, reason="filling up comes after spreading")), 20, 27]
)
def test_in_the_smallest_ring_they_are_spread_too(stay: int) -> None:
    """Nothing can come while what passes is at work: each that stays gives time for one."""
    sizes, seconds = {str(i): PAGE for i in range(40)}, {str(i): 1.0 for i in range(40)}
    rate = (40 - stay) * PAGE / 40
    best = seconds_per_step(sizes, seconds, {str(i * 40 // stay) for i in range(stay)}, PAGE, rate)
    resident = choose_resident_layers(sizes, stay * PAGE, PAGE, seconds)
    assert seconds_per_step(sizes, seconds, resident, PAGE, rate) <= 1.05 * best


@settings(deadline=None, max_examples=60)
@given(case=cases(), data=st.data(), speed=st.sampled_from([0.3, 1.0, 3.0]))
def test_whatever_is_settled_works(case: tuple[Component, dict[str, Any], Any], data: Any, speed: float) -> None:
    """The ring of every plan takes all that passes through, and no step is slower than without any overlap."""
    what, chosen, seconds = case
    weights = data.draw(st.none() | some_weights(what))
    try:
        plan = settle(what, seconds, weight_memory=weights, **chosen)
    except PlanError:
        return
    sizes = in_ring(what, plan)
    if not sizes:
        return
    work = {name: float(size) for name, size in sizes.items()}
    took = seconds_per_step(sizes, work, plan.resident_layers or (), plan.ring_buffer or 0, speed)
    passing = sum(size for name, size in sizes.items() if name not in (plan.resident_layers or ()))
    assert took <= (sum(work.values()) + passing / speed) * 1.0001
