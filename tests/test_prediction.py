import json
from pathlib import Path

import pytest

from specbench.errors import ConfigError
from specbench.prediction import Costs, best, elsewhere, explain, predict, speedup, survival, tokens_per_pass

REFERENCE = Path(__file__).parent.parent / "results/reference/verify_cost/verify_cost.json"

FLAT = Costs(plain=20.0, passes={1: 20.0, 2: 21.0, 3: 22.0, 4: 24.0, 5: 25.0}, drafts={1: 2.0, 2: 4.0, 3: 6.0, 4: 8.0})


def test_the_textbook_case_wins_with_four_tokens_a_round_and_loses_with_one_and_a_half():
    """20 ms a token plain; 4 drafts at 2 ms each and a verify pass of 25 ms."""
    wins, loses = [0.75] * 4, [0.125] * 4  # 4 and 1.5 tokens a round
    assert predict(wins, FLAT)[-1].tokens_per_pass == 4
    assert predict(wins, FLAT)[-1].speedup == pytest.approx(2.424, abs=1e-3)
    assert predict(loses, FLAT)[-1].tokens_per_pass == 1.5
    assert predict(loses, FLAT)[-1].speedup == pytest.approx(0.909, abs=1e-3)
    assert best(predict(loses, FLAT)).k == 0


def test_leviathans_formula_is_the_case_of_equal_acceptances_and_flat_cost():
    alpha, c, gamma = 0.8, 0.1, 5
    costs = Costs(1.0, dict.fromkeys(range(1, 7), 1.0), {k: c * k for k in range(1, 6)})
    found = predict([alpha**i for i in range(1, 6)], costs)[-1]
    assert found.speedup == pytest.approx((1 - alpha ** (gamma + 1)) / ((1 - alpha) * (c * gamma + 1)))


def test_survival_counts_all_rounds():
    assert survival([5, 3, 1, 1]) == [0.5, 0.2, 0.1]
    assert survival([4]) == []
    assert survival([0, 0]) == [0.0]
    # as the mean of what was accepted, and the target's own token
    assert tokens_per_pass(survival([5, 3, 1, 1]), 3) == pytest.approx(1 + (3 * 1 + 1 * 2 + 1 * 3) / 10)


def test_every_k_is_predicted_whose_costs_are_known():
    found = predict([0.5, 0.25, 0.125, 0.1], FLAT)
    assert [p.k for p in found] == [0, 1, 2, 3, 4]
    assert found[0].speedup == found[0].bound == 1
    assert found[0].break_even is None
    assert found[2].tokens_per_pass == 1.75
    assert found[2].seconds == 26
    assert found[2].speedup == pytest.approx(1.75 * 20 / 26)
    assert found[2].bound == pytest.approx(3 * 20 / 26)
    holes = Costs(20.0, {1: 20.0, 3: 22.0, 5: 25.0}, {1: 2.0, 2: 4.0})
    assert [p.k for p in predict([0.5, 0.25, 0.125, 0.1], holes)] == [0, 2]


def test_at_the_acceptance_that_breaks_even_the_speedup_is_one():
    for found in predict([0.5] * 4, FLAT)[1:]:
        alpha = found.break_even
        drafts = predict([alpha**i for i in range(1, 5)], FLAT)[found.k]
        assert drafts.speedup == pytest.approx(1)


def test_what_cannot_win_has_no_break_even():
    dear = Costs(20.0, {1: 20.0, 2: 21.0}, {1: 30.0})
    assert predict([0.9], dear)[1].break_even is None
    assert predict([0.9], dear)[1].bound < 1


def test_the_best_length_is_the_shortest_of_equals():
    costs = Costs(10.0, {1: 10.0, 2: 10.0, 3: 10.0}, {1: 5.0, 2: 10.0})
    found = predict([0.5, 0.25], costs)
    assert found[1].speedup == 1
    assert best(found).k == 0


def test_elsewhere_takes_passes_from_there_and_the_price_of_a_draft_from_here():
    there = {
        "cached": 8,
        "points": [{"batch": 1, "tokens": n, "cached": 8, "seconds": 2.0 + 0.5 * n} for n in (1, 2, 3)],
    }
    costs = Costs(plain=11.0, passes={1: 10.0, 2: 10.0, 3: 10.0}, drafts={1: 4.0, 2: 8.0}, rest=2.0)
    found = {p.k: p for p in elsewhere([0.5, 0.25], costs, there, 1)}
    assert found[2].seconds == pytest.approx(3.5 + 8.0 / 4 + 2.0 / 4)  # its step takes a quarter of ours
    assert found[2].speedup == pytest.approx(1.75 * (11.0 / 4) / 6.0)
    assert found[1].seconds == pytest.approx(3.0 + 1.0 + 0.5)
    assert found[0].speedup == 1


def test_on_the_same_machine_elsewhere_is_here():
    there = {
        "cached": 8,
        "points": [{"batch": 2, "tokens": n, "cached": 8, "seconds": s} for n, s in FLAT.passes.items()],
    }
    assert elsewhere([0.5, 0.2, 0.1, 0.0], FLAT, there, 2) == predict([0.5, 0.2, 0.1, 0.0], FLAT)


def test_a_batch_size_that_was_not_measured_there_is_refused_by_name():
    there = {"cached": 8, "points": [{"batch": 4, "tokens": 1, "cached": 8, "seconds": 1.0}]}
    with pytest.raises(ConfigError, match=r"batch_size=2 was not measured on the other machine; it has 4"):
        elsewhere([0.5], FLAT, there, 2)


def test_a_curve_as_the_script_writes_it_is_read():
    found = json.loads(REFERENCE.read_text())
    assert [p.k for p in elsewhere([0.5, 0.25], Costs(20.0, {1: 19.0}, {1: 1.0, 2: 2.0}), found, 1)] == [0, 1, 2]


def test_what_is_near_the_prediction_needs_no_explanation():
    found = predict([0.5] * 4, FLAT)[4]
    near = {"speedup": 1.09 * found.speedup, "tokens_per_pass": 3.0, "round": 30.0, "plain": 20.0}
    assert explain(found, FLAT, near) is None


def test_an_explanation_names_what_differs():
    found = predict([0.5] * 4, FLAT)[4]
    slow = {"speedup": speedup(3, 20.0, 49.5), "tokens_per_pass": 3.0, "round": 49.5, "plain": 20.0}
    words = "the measured speedup is -33% off the predicted one{}: its rounds took 50% more time than in the profile"
    assert explain(found, FLAT, slow) == words.format("")
    assert explain(found, FLAT, slow, [1.3, 1.9]) == words.format("")
    assert explain(found, FLAT, slow, [1.2, 1.9]) == words.format(", within what the profile can tell (1.20–1.90)")
    rows = {"speedup": 0.8 * found.speedup, "tokens_per_pass": 3.0, "round": 33.0, "plain": 20.0, "rows": 0.8}
    assert "its rounds held 20% less of the batch than plain decoding's" in (
        explain(found, FLAT, rows, [0.1, 9.0]) or ""
    )
    assert "within what" not in (explain(found, FLAT, rows, [0.1, 9.0]) or "")
    ends = {"speedup": speedup(2.4, 24.0, 33.0), "tokens_per_pass": 2.4, "round": 33.0, "plain": 24.0}
    assert explain(found, FLAT, ends) is None  # one makes up for the other
    both = {"speedup": speedup(2.4, 16.0, 33.0), "tokens_per_pass": 2.4, "round": 33.0, "plain": 16.0}
    assert explain(found, FLAT, both) == (
        "the measured speedup is -36% off the predicted one: plain decoding's rounds took 20% less time than in the "
        "profile; tokens per pass were 20% less than predicted, as texts end within a round"
    )
