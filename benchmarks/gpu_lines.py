"""The figures of a card: JSON lines that each stage of `make gpu` appends as it goes."""

import json
import os
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch


def figures_path() -> Path:
    """Return the file of this card's figures; `LORADOCK_GPU_FIGURES` names another directory."""
    directory = os.environ.get("LORADOCK_GPU_FIGURES", Path(__file__).parent)
    card = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    return Path(directory, f"gpu-{card}.json")


def append(stage: str, **figures: Any) -> None:
    """Append a line to the stage's figures, and print it; a stage that is ended keeps its lines."""
    line = json.dumps({"stage": stage, "at_s": round(time.time(), 1), **figures})
    with _lines_path().open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def collect() -> None:
    """Write the file of the card from all lines, by stage; the last run of a stage counts."""
    stages: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in _lines_path().read_text().splitlines():
        figures = json.loads(line)
        if figures.get("begins"):
            stages[figures["stage"]].clear()
        stages[figures["stage"]].append(figures)
    figures_path().write_text(json.dumps(stages, indent=1) + "\n")


def _lines_path() -> Path:
    return figures_path().with_suffix(".jsonl")
