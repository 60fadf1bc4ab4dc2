"""Tokens per second of a user and of all."""

from specbench.throughput import Speeds, of_method, of_plain


def run(batch_size, plain_round, plain_total, interval=(1.5, 2.0)):
    found = {
        "tokens_per_pass": 2.0,
        "round_seconds": 0.05,
        "decode_tokens_per_s": 150.0,
        "speedup_ci95": interval,
        "baseline_round_seconds": plain_round,
        "baseline_decode_tokens_per_s": plain_total,
    }
    return {"config": {"batch_size": batch_size}, "metrics": found}


def test_a_user_gets_a_row_and_its_interval_is_that_of_the_speedup():
    assert of_method(run(4, 0.04, 100.0)) == Speeds(per_user=40.0, total=150.0, limits=[150.0, 200.0])
    assert of_method(run(4, 0.04, 100.0, interval=None)).limits is None


def test_plain_decoding_is_the_median_of_the_baselines_of_its_batch_size():
    runs = [run(4, 0.04, 100.0), run(4, 0.02, 90.0), run(1, 0.01, 99.0), run(4, 0.05, 10.0), run(8, None, None)]
    found = of_plain(runs)
    assert list(found) == [1, 4]
    assert found == {1: Speeds(100.0, 99.0), 4: Speeds(25.0, 90.0)}
