"""Makes confidences mean what they say: after training, a temperature for each position (DeepSeek-AI 2026, "DSpark").

Legend: N positions, K drafts.

The confidence of draft k is sigmoid(c_k / T_k). What a scheduler uses is their running product, how likely the first k
drafts are all accepted; so the T_k are found one after the other, each so that the product up to k is calibrated.
"""

import numpy as np

BINS = 15
TEMPERATURES = np.geomspace(0.2, 5.0, 65)


def calibrated(confidence: np.ndarray, accepted: np.ndarray) -> tuple[list[float], float, float]:
    """Temperatures of the K positions, and the calibration error of the running product without and with them.

    confidence [N, K]: logits. accepted [N, K]: how likely each draft is accepted if those before it are. Errors are
    means over the positions."""
    survival, before = np.cumprod(accepted, axis=1), np.ones(len(confidence))
    plain = np.cumprod(_sigmoid(confidence), axis=1)
    temperatures, errors = [], []
    for k in range(confidence.shape[1]):
        products = [before * _sigmoid(confidence[:, k] / t) for t in TEMPERATURES]
        found = [calibration_error(product, survival[:, k]) for product in products]
        best = int(np.argmin(found))
        before = products[best]
        temperatures.append(round(float(TEMPERATURES[best]), 4))
        errors.append(found[best])
    raw = [calibration_error(plain[:, k], survival[:, k]) for k in range(confidence.shape[1])]
    return temperatures, float(np.mean(raw)), float(np.mean(errors))


def calibration_error(said: np.ndarray, found: np.ndarray) -> float:
    """Expected calibration error (Guo et al. 2017): how far, in bins of equally many, the mean of what was ``said`` is
    from the mean of what was ``found``."""
    parts = [part for part in np.array_split(np.argsort(said, kind="stable"), BINS) if len(part)]
    return float(sum(len(part) * abs(said[part].mean() - found[part].mean()) for part in parts) / max(1, len(said)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
