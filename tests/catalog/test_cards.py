"""The known cards' facts: well formed, plausible, and a few figures everybody knows."""

import json
import re
from importlib import resources
from typing import Any

import pytest

from tightfit.catalog.known import card_called, card_names, known_card
from tightfit.errors import InputError

FIELDS = {
    "title",
    "bytes",
    "compute_capability",
    "arithmetic_rates",
    "memory_rate",
    "link_rate",
    "link",
    "watts",  # board power; a laptop's: the most of NVIDIA's usual range
    "multiprocessors",
    "l2_bytes",
    "source",
}
OPTIONAL = {"nvlink_rate"}  # bytes per second each way to the other cards of its computer
RATE_OF_SIXTEEN_LANES = {"3.0": 12.0e9, "4.0": 25.0e9, "5.0": 50.0e9}
MIB, GIB = 2**20, 2**30
# float32 lanes of a multiprocessor, by compute capability
LANES = {"5.2": 128, "6.0": 64, "6.1": 128, "7.0": 64, "7.5": 64, "8.0": 64, "8.6": 128, "8.9": 128}
LANES |= {"9.0": 128, "10.0": 128, "12.0": 128}


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)), f"a key stands twice: {sorted(keys)}"
    return dict(pairs)


def read() -> dict[str, dict[str, Any]]:
    text = resources.files("tightfit.catalog").joinpath("cards.json").read_text(encoding="utf-8")
    cards: dict[str, dict[str, Any]] = json.loads(text, object_pairs_hook=distinct)
    return cards


CARDS = read()


def capability(card: dict[str, Any]) -> tuple[int, int]:
    major, minor = card["compute_capability"].split(".")
    return int(major), int(minor)


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_well_formed(name: str) -> None:
    card = CARDS[name]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    assert FIELDS <= set(card) <= FIELDS | OPTIONAL
    assert all(isinstance(card[field], str) and card[field] for field in ("title", "link", "source"))
    assert isinstance(card["bytes"], int)
    assert isinstance(card["memory_rate"], float)
    assert isinstance(card["link_rate"], float)
    assert all(type(card[field]) is int for field in ("watts", "multiprocessors", "l2_bytes"))
    assert re.fullmatch(r"\d+\.\d", card["compute_capability"])
    assert all(isinstance(rate, float) and rate > 0 for rate in card["arithmetic_rates"].values())


def test_titles_are_distinct() -> None:
    titles = [card["title"] for card in CARDS.values()]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_plausible(name: str) -> None:
    card = CARDS[name]
    assert card["bytes"] % (GIB // 2) == 0
    assert 2 * GIB <= card["bytes"] <= 192 * GIB
    assert 100e9 <= card["memory_rate"] <= 10e12
    assert card["link_rate"] < card["memory_rate"]


@pytest.mark.parametrize("name", CARDS)
def test_power_is_in_watts(name: str) -> None:
    card = CARDS[name]
    assert 10 <= card["watts"] <= 1200
    assert 1 <= card["watts"] / card["multiprocessors"] <= 15


@pytest.mark.parametrize("name", CARDS)
def test_multiprocessors_give_the_float32_rate_at_a_plausible_clock(name: str) -> None:
    card = CARDS[name]
    clock = card["arithmetic_rates"]["float32"] / (2 * LANES[card["compute_capability"]] * card["multiprocessors"])
    assert 1.1e9 <= clock <= 2.7e9
    derived = re.search(r"(\d+) (?:SMs|CUDA cores) × (\d\.\d+) GHz", card["source"])
    if derived is not None:
        counted = int(derived[1]) if "SMs ×" in derived[0] else int(derived[1]) // LANES[card["compute_capability"]]
        assert card["multiprocessors"] == counted
        assert clock == pytest.approx(float(derived[2]) * 1e9, rel=0.01)


@pytest.mark.parametrize("name", CARDS)
def test_the_second_level_cache_is_in_bytes_and_follows_the_generation(name: str) -> None:
    card = CARDS[name]
    assert card["l2_bytes"] % (MIB // 4) == 0
    if capability(card) < (8, 0) or card["compute_capability"] == "8.6":
        assert MIB // 4 <= card["l2_bytes"] <= 6 * MIB
    else:  # A100's kind, and from Ada Lovelace on
        assert 12 * MIB <= card["l2_bytes"] <= 128 * MIB
    assert card["l2_bytes"] < card["bytes"] / 200


@pytest.mark.parametrize("name", CARDS)
def test_new_facts_have_an_origin(name: str) -> None:
    card = CARDS[name]
    said = (f"{card['watts']} W", f"{card['multiprocessors']} SMs", f"{card['l2_bytes'] / MIB:g} MiB")
    assert [words for words in said if words not in card["source"]] == []
    assert ("tensorfloat32:" in card["source"]) is (capability(card) >= (8, 0))


@pytest.mark.parametrize("name", CARDS)
def test_rates_follow_the_generation(name: str) -> None:
    card = CARDS[name]
    rates = card["arithmetic_rates"]
    expected = {"float32", "float16"}
    if capability(card) >= (8, 0):
        expected |= {"bfloat16", "tensorfloat32"}
    if capability(card) >= (8, 9):
        expected.add("float8")
    assert set(rates) == expected
    assert 1e12 < rates["float32"] < 200e12
    assert rates["float16"] >= 0.9 * rates["float32"]
    assert rates.get("bfloat16", rates["float16"]) == rates["float16"]
    if "tensorfloat32" in rates:
        assert rates["tensorfloat32"] == pytest.approx(rates["float16"] / 2, rel=0.02)
    if "float8" in rates:
        assert rates["float8"] == pytest.approx(2 * rates["float16"], rel=0.02)


@pytest.mark.parametrize("name", CARDS)
def test_a_known_card_has_the_rates_of_dtypes_only(name: str) -> None:
    dtypes = {key.partition(".")[2] for key in known_card(name).arithmetic_rates}
    assert dtypes == set(CARDS[name]["arithmetic_rates"]) - {"tensorfloat32"}


@pytest.mark.parametrize("name", CARDS)
def test_the_link_rate_is_that_of_the_named_link(name: str) -> None:
    card = CARDS[name]
    if card["link"] == "NVLink-C2C":  # between the halves of a module: of 450 GB/s each way PCIe's share
        assert card["link_rate"] == pytest.approx(450e9 * 25 / 31.5, rel=0.01)
        return
    link = re.fullmatch(r"PCIe (\d\.0) x(8|16)", card["link"])
    assert link is not None
    assert card["link_rate"] == pytest.approx(RATE_OF_SIXTEEN_LANES[link[1]] * int(link[2]) / 16)


@pytest.mark.parametrize("name", CARDS)
def test_exchanges_between_cards_take_nvlink_or_the_host(name: str) -> None:
    card, known = CARDS[name], known_card(name)
    assert known.exchange_latency > 0
    assert known.exchange_rate is not None
    if "nvlink_rate" in card:
        assert capability(card) in ((7, 0), (8, 0), (9, 0), (10, 0))  # SXM modules
        assert known.exchange_rate > card["link_rate"]
    else:
        assert 0.4 * card["link_rate"] <= known.exchange_rate <= 0.6 * card["link_rate"]


@pytest.mark.parametrize("name", [name for name in CARDS if name.endswith("-laptop")])
def test_a_laptop_s_link_is_called_what_it_is(name: str) -> None:
    assert re.search(r"Eight lanes are (an assumption|inferred)", CARDS[name]["source"])


@pytest.mark.parametrize(
    ("name", "gib", "memory_rate", "kind", "rate"),
    [
        ("t4", 15, 320e9, "float16", 65e12),
        ("v100", 16, 900e9, "float16", 125e12),
        ("rtx2080ti", 11, 616e9, "float16", 53.8e12),
        ("rtx3060", 12, 360e9, "float32", 12.7e12),
        ("rtx3090", 24, 936e9, "float32", 35.6e12),
        ("rtx4090", 24, 1008e9, "bfloat16", 165.2e12),
        ("rtx4090", 24, 1008e9, "float8", 330.3e12),
        ("rtx5090", 32, 1792e9, "bfloat16", 209.5e12),
        ("rtx-a6000", 48, 768e9, "bfloat16", 154.8e12),
        ("a100-80gb", 80, 2039e9, "bfloat16", 312e12),
        ("h100", 80, 3.35e12, "bfloat16", 989.4e12),
        ("h200", 140, 4.8e12, "bfloat16", 989.4e12),
        ("h20", 95.5, 4.0e12, "bfloat16", 148e12),
        ("b200", 179, 7.67e12, "float8", 4500e12),
        ("a10g", 22.5, 600e9, "bfloat16", 70e12),
        ("a40", 45, 696e9, "bfloat16", 149.7e12),
        ("l20", 45, 864e9, "bfloat16", 118.7e12),
        ("rtx5060-laptop", 8, 384e9, "float32", 16.6e12),
        ("rtx-pro-6000", 95.5, 1792e9, "bfloat16", 503.8e12),
        ("rtx3090", 24, 936e9, "tensorfloat32", 35.6e12),
        ("a100-80gb", 80, 2039e9, "tensorfloat32", 156e12),
    ],
)
def test_well_known_figures(name: str, gib: float, memory_rate: float, kind: str, rate: float) -> None:
    card = CARDS[name]
    assert card["bytes"] == gib * GIB
    assert card["memory_rate"] == pytest.approx(memory_rate)
    assert card["arithmetic_rates"][kind] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("name", "watts", "multiprocessors", "cache"),
    [
        ("t4", 70, 40, 4 * MIB),
        ("v100", 300, 80, 6 * MIB),
        ("rtx2080ti", 250, 68, 5632 * 1024),
        ("rtx3090", 350, 82, 6 * MIB),
        ("rtx4060-laptop", 115, 24, 32 * MIB),
        ("rtx4090", 450, 128, 72 * MIB),
        ("rtx5090", 575, 170, 96 * MIB),
        ("a100-80gb", 400, 108, 40 * MIB),
        ("h100", 700, 132, 50 * MIB),
        ("h200", 700, 132, 60 * MIB),
        ("a10g", 300, 80, 6 * MIB),
        ("b200", 1000, 148, 253 * MIB // 2),
        ("rtx-pro-6000", 600, 188, 128 * MIB),
    ],
)
def test_well_known_power_and_caches(name: str, watts: int, multiprocessors: int, cache: int) -> None:
    card = CARDS[name]
    assert (card["watts"], card["multiprocessors"], card["l2_bytes"]) == (watts, multiprocessors, cache)


@pytest.mark.parametrize(("name", "own"), [("RTX 4090", "rtx4090"), ("a100 80GB", "a100-80gb"), ("rtx4090", "rtx4090")])
def test_a_name_may_be_written_otherwise(name: str, own: str) -> None:
    assert card_called(name) == own
    assert known_card(name).name == CARDS[own]["title"]


def test_no_two_cards_have_the_same_name_without_punctuation() -> None:
    assert [card_called(name.replace("-", "").upper()) for name in card_names()] == list(card_names())


def test_an_unknown_card_comes_with_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown card 'rtx4091': did you mean 'rtx4090'"):
        known_card("rtx4091")
