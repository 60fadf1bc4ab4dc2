"""A colour for each family of drafters: the same in every figure and on every page."""

from collections.abc import Mapping
from typing import Any

# Okabe-Ito, readable with colour-blindness, and two darker ones
COLOURS = {
    "none": "#999999",
    "ngram": "#E69F00",
    "suffix": "#D55E00",
    "small_lm": "#56B4E9",
    "eagle": "#0072B2",
    "eagle1": "#0072B2",
    "mtp": "#009E73",
    "medusa": "#F0E442",
    "dflash": "#CC79A7",
    "dspark": "#882255",
    "oracle": "#333333",
}
OTHER = "#777777"


def colour(run: Mapping[str, Any]) -> str:
    """That of a run's drafter."""
    return COLOURS.get(run["drafter"]["name"], OTHER)
