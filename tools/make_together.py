"""tests/together/trials.py → bench/results/together.json and docs/works-together.md: what came of every trial.

python tools/make_together.py         # runs those that have no result yet, then writes the page
python tools/make_together.py --anew  # runs all
python tools/make_together.py --page  # only writes the page
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from diffusers.utils import logging  # noqa: E402

from together.trials import GROUPS  # noqa: E402
from together.ways import WAYS, outcome  # noqa: E402

PAGE = ROOT / "docs/works-together.md"
FACTS = ROOT / "bench/results/together.json"
HEAD = """# What works together

This page answers: what else can I do with a pipeline that follows a plan?

Each row was tried on a tiny Stable Diffusion (the `enable_cache` and `set_attention_backend` rows: on a tiny FLUX) in
three ways, and compared with the same calls of an untouched pipeline. *Level 3* and *budget* ran on a simulated card
that keeps the values of its tensors (there is no real card), the budget so small that the U-Net is streamed; *disk* ran
on the CPU, with all weights in files. "Before" and "after" mean `tightfit.fit`. Each row ends with `undo()` and one
more picture.

- **right**: every picture is that of the untouched pipeline; to the bit with weights on disk, to 5·10⁻⁶ on the card,
  whose kernels add in another order (to 10⁻⁵ where a LoRA is fused, which rounds weights).
- **refused**: an error of tightfit names what was asked for and what would help, and nothing has changed.
- **raw …**: an error of torch or diffusers, of this class.
- **–**: not tried with this version.

Calls of one fitted pipeline run one at a time; other threads wait. A budget is planned for anew at the first call after
a component was added, replaced or cast, or an adapter was loaded. A `module.to(device)` leaves the weights where the
plan wants them.
"""


def run(*, anew: bool) -> dict[str, str]:
    """Run the trials that have no result, and return all results, by group, trial and way."""
    facts: dict[str, str] = {} if anew or not FACTS.exists() else json.loads(FACTS.read_text())
    every = [
        (group, trial, way)
        for group, tried in GROUPS.items()
        for trial in tried
        for way in WAYS.values()
        if way.name in trial.only
    ]
    keys = [f"{group}: {trial.name}: {way.name}" for group, trial, way in every]
    facts = {key: facts[key] for key in keys if key in facts}
    for key, (_, trial, way) in zip(keys, every, strict=True):
        if key not in facts:
            facts[key] = outcome(trial, way)
            print(key, facts[key][:100], flush=True)
            FACTS.write_text(json.dumps({each: facts[each] for each in keys if each in facts}, indent=1) + "\n")
    return facts


def page(facts: dict[str, str]) -> str:
    lines = [HEAD]
    for group, tried in GROUPS.items():
        lines += [f"## {group}", "", f"|  | {' | '.join(way.title for way in WAYS.values())} |", "| --- " * 4 + "|"]
        said: dict[str, None] = {}
        for trial in tried:
            found = [facts.get(f"{group}: {trial.name}: {way}", "–") for way in WAYS]
            lines.append(f"| {trial.name} | {' | '.join(map(_word, found))} |")
            said.update({each: None for each in found if _word(each) == "refused"})
        lines += ["", *([*(f"> {each}" + "\n>" for each in _distinct(said)), ""] if said else [])]
    return "\n".join(lines).rstrip().removesuffix(">").rstrip() + "\n"


def _word(found: str) -> str:
    """The first word of an outcome; refusals begin with the name of an error."""
    first = found.partition(":")[0]
    return first if first in ("right", "wrong", "–") or first.startswith("raw ") else "refused"


def _distinct(said: dict[str, None]) -> list[str]:
    """Refusals that are not the same but for the device's name."""
    return list({each.replace("privateuseone:0", "cpu"): each for each in reversed(said)}.values())[::-1]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    only_page = "--page" in sys.argv
    PAGE.write_text(page(json.loads(FACTS.read_text()) if only_page else run(anew="--anew" in sys.argv)))
