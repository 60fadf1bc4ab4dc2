"""Figures of runs, computed from their records. A file each for a question that a figure answers; ``gallery`` draws
all that some runs allow."""

from specbench.plots.acceptance import acceptance_by_position, accepted_lengths
from specbench.plots.batch_size import by_batch_size, throughput
from specbench.plots.categories import speedup_by_category
from specbench.plots.draft_length import by_draft_length
from specbench.plots.free_lunch import verify_cost
from specbench.plots.gallery import draw
from specbench.plots.predicted import predicted_against_measured
from specbench.plots.round_time import round_time
from specbench.plots.scaling import Learned, scaling
from specbench.plots.speedup import speedup_by_drafter

__all__ = [
    "Learned",
    "acceptance_by_position",
    "accepted_lengths",
    "by_batch_size",
    "by_draft_length",
    "draw",
    "predicted_against_measured",
    "round_time",
    "scaling",
    "speedup_by_category",
    "speedup_by_drafter",
    "throughput",
    "verify_cost",
]
