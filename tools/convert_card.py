"""Convert the cards of models from before the first release: `python tools/convert_card.py MODEL/config.json …`.

Format 1 knew classes as its only condition, and the kind stood for the sampler. Format 2 named the sampler, with its
second_time next to it, and repeated a truncated model's t_min as t_prime. Format 3 knew no companion.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tcm.foundation.files import write_text


def converted(card: dict[str, Any]) -> dict[str, Any]:
    """The card in format 4."""
    card = {"sampler": "heun" if card["kind"] == "diffusion" else "consistency"} | card
    if card["format"] == 1:
        classes = card.pop("classes", 0)
        card |= {"format": 2, "condition": {"kind": "classes", "count": classes} if classes else None}
    if card["format"] == 2:
        t_2 = {"second_time": card.get("second_time", 1.0)} if card["sampler"] == "consistency" else {}
        card = {key: value for key, value in card.items() if key not in ("t_prime", "second_time")}
        card["sampler"] = {"kind": card["sampler"]} | t_2
    return card | {"format": 4}


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        write_text(file, json.dumps(converted(json.loads(file.read_text("utf-8"))), indent=2) + "\n")
