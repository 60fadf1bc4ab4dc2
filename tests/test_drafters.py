import numpy as np
import pytest
import torch
from conftest import prompts, run, tiny
from transformers import AutoModelForCausalLM

from drafters.ngram import NGram
from drafters.none import NoDrafter
from drafters.oracle import Oracle
from drafters.scripted import Scripted
from drafters.small_lm import SmallLM, fit_vocabulary
from drafters.suffix import Suffix, SuffixTree, best_path
from specbench.drafting import Request
from specbench.errors import ConfigError
from specbench.model import CausalLM
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import byte_tokenizer


def draft(text, k=3, **options):
    return NGram(**options).continuation(np.array(text), k)


def test_ngram_copies_what_followed_the_longest_suffix():
    #                        1 2 -> 9          3 1 2 -> 7 (longer)        suffix 3 1 2
    assert draft([1, 2, 9, 9, 3, 1, 2, 7, 8, 8, 3, 1, 2], max_n=4) == [7, 8, 8]


@pytest.mark.parametrize(("match", "expected"), [("first", 7), ("latest", 9), ("most_frequent", 8)])
def test_ngram_match_is_the_one_asked_for(match, expected):
    text = [5, 7, 0, 5, 8, 0, 5, 8, 0, 5, 9, 0, 5]
    assert draft(text, k=1, max_n=1, match=match) == [expected]


def test_ngram_may_not_match_itself():
    assert draft([1, 2, 3, 4]) == []


def test_ngram_overlapping_repeat_continues():
    assert draft([4, 4, 4], k=2, max_n=2) == [4]


def test_ngram_respects_min_n():
    assert draft([1, 5, 2, 1], min_n=2) == []
    assert draft([1, 5, 2, 1], min_n=1) == [5, 2, 1]


def test_ngram_stops_at_an_end_token():
    drafter = NGram()
    drafter._end_ids = frozenset([0])
    assert drafter.continuation(np.array([1, 2, 0, 9, 1]), 3) == [2, 0]


@pytest.mark.parametrize("options", [{"min_n": 0}, {"min_n": 3, "max_n": 2}, {"match": "best"}])
def test_ngram_refuses_impossible_options(options):
    with pytest.raises(ConfigError, match=r"drafter\."):
        NGram(**options)


def tree(*texts, depth=6):
    made = SuffixTree(depth)
    for text in texts:
        made.extend(text)
        made.end()
    return made


def test_suffix_tree_counts_every_substring():
    made = tree([1, 2, 1, 2, 3])
    assert made.root.children[1].count == 2
    assert made.root.children[1].children[2].count == 2
    assert made.root.children[1].children[2].children[3].count == 1


def test_suffix_tree_grown_in_pieces_is_the_same():
    pieces = SuffixTree(6)
    for token in [1, 2, 1, 2, 3]:
        pieces.extend([token])
    pieces.end()
    assert pieces.root == tree([1, 2, 1, 2, 3]).root


def test_suffix_tree_is_no_deeper_than_asked():
    node, depth = tree([7] * 9, depth=3).root, 0
    while node.children:
        node, depth = node.children[7], depth + 1
    assert depth == 3


def test_suffix_does_not_run_over_the_end_of_a_text():
    assert 3 not in tree([1, 2], [3, 4]).root.children[2].children


def test_suffix_follows_the_most_frequent_child():
    made = tree([1, 2, 5, 1, 2, 6, 1, 2, 6])
    expected, path = best_path(made.matches([1, 2]), 1, factor=9, min_probability=0)
    assert path == [6]
    assert expected == pytest.approx(2 / 3)


def test_suffix_stops_where_the_path_becomes_unlikely():
    made = tree([1, 2, 5], [1, 2, 6], [1, 2, 6])
    assert best_path(made.matches([1]), 3, factor=9, min_probability=0.9) == (1.0, [2])


def test_suffix_drafts_longer_after_longer_matches():
    made = tree([1, 2, 3, 4, 5, 6])
    assert best_path(made.matches([9, 2]), 4, factor=1, min_probability=0)[1] == [3]
    assert best_path(made.matches([1, 2]), 4, factor=1, min_probability=0)[1] == [3, 4]


def test_suffixes_of_the_fed_text_are_found_without_looking():
    made = SuffixTree(4)
    made.extend([1, 2, 1, 2, 3, 1, 2])
    assert made.open_matches() == made.matches([1, 2, 3, 1, 2])


def drafted(lm, drafter, *names):
    """Drafts made for prompt "names[-1]" after the other prompts were decoded with the same drafter."""
    drafter.bind(lm)
    steps = []
    for name in names:
        _, steps = run(lm, drafter, [Request(name, lm.tokenizer(name).input_ids)])
    return [s.drafted for s in steps]


def test_suffix_with_run_memory_learns_and_reset_forgets(llama):
    learned = Suffix(memory="run")
    first = drafted(llama, learned, "hello there")
    assert len(drafted(llama, learned, "hello there")) < len(first)  # fewer rounds: it has seen this reply before
    learned.reset()
    assert drafted(llama, learned, "hello there") == first


def test_oracle_hit_rate_is_what_was_asked_for(llama):
    requests = [Request(f"p{i}", p) for i, p in enumerate(prompts(llama, 4))]
    stop = StopRule(200)
    replies, _ = run(llama, NoDrafter(), requests, k=0, stop=stop)
    known = [Request(r.uid, r.tokens, reply) for r, reply in zip(requests, replies, strict=True)]
    _, steps = run(llama, Oracle(hit_rate=0.6), known, k=1, stop=stop)
    accepted = sum(sum(s.accepted) for s in steps)
    proposed = sum(sum(s.proposed) for s in steps)
    assert abs(accepted / proposed - 0.6) < 4 * (0.6 * 0.4 / proposed) ** 0.5


@pytest.mark.parametrize("hit_rate", [-0.1, 1.1])
def test_oracle_refuses_impossible_rates(hit_rate):
    with pytest.raises(ConfigError, match="hit_rate"):
        Oracle(hit_rate=hit_rate)


@pytest.mark.parametrize("script", [[], [[2]], [[2, 3]], [[-1, 0]]])
def test_scripted_refuses_impossible_scripts(script):
    with pytest.raises(ConfigError, match=r"drafter\.script"):
        Scripted(script)


def with_vocabulary(lm, extra):
    """A model over the same tokenizer whose embedding table has ``extra`` more rows."""
    torch.manual_seed(3)
    config = type(lm.model.config)(**{**lm.model.config.to_dict(), "vocab_size": lm.vocab_size + extra})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return CausalLM(model, lm.tokenizer, name=f"padded by {extra}")


@pytest.mark.parametrize("extra", [-1, 5])
def test_small_lm_with_a_differently_padded_vocabulary_drafts(llama, extra):
    small = with_vocabulary(llama, extra)
    requests = [Request(f"p{i}", p) for i, p in enumerate(prompts(llama))]
    expected, _ = run(llama, NoDrafter(), requests, k=0)
    replies, steps = run(llama, SmallLM(small), requests, k=3)
    assert replies == expected
    assert all(0 <= t < llama.vocab_size for s in steps for row in s.drafted for t in row)


def test_vocabularies_are_cut_or_padded_with_impossible_tokens():
    logits = torch.zeros(1, 3)
    assert fit_vocabulary(logits, 2).shape == (1, 2)
    assert fit_vocabulary(logits, 5)[0, 3:].tolist() == [-torch.inf, -torch.inf]


def test_small_lm_refuses_another_tokenizer(llama):
    other = byte_tokenizer()
    other.add_tokens(["<odd>"])
    small = CausalLM(tiny("llama", seed=1).model, other, name="other")
    with pytest.raises(ConfigError, match=r"another tokenizer than target tiny-llama.*'<odd>'"):
        SmallLM(small).bind(llama)


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(temperature=1.0, repetition_penalty=1.5)])
def test_small_lm_samples_from_the_law_it_hands_on(llama, sampling):
    """Of many sampled drafts, the share that is each token's is what ``probs`` says."""
    drafter = SmallLM(tiny("llama", seed=1), proposal="sample")
    drafter.bind(llama)
    seen = []
    propose = drafter.propose
    drafter.propose = lambda batch, k: seen.append(propose(batch, k)) or seen[-1]
    tokens = prompts(llama, 1)[0]
    for start in range(4):
        run(llama, drafter, [Request(f"{start}-{i}", tokens) for i in range(64)], k=3, sampling=sampling)
    drawn, expected, variance = 0.0, 0.0, 0.0
    for d in seen:
        q = d.probs.gather(2, d.tokens[..., None]).double()
        assert (q > 0).all()
        # the probability of the token drawn has mean sum q^2 under the law that was claimed
        mean = d.probs.double().square().sum(-1)
        drawn += q.sum().item()
        expected += mean.sum().item()
        variance += (d.probs.double().pow(3).sum(-1) - mean.square()).sum().item()
    assert abs(drawn - expected) < 4 * variance**0.5


def test_small_lm_forgets_rejected_drafts(llama):
    """After any round its cache gives the same next draft as a fresh prefill of the committed text."""
    small = tiny("llama", seed=1)
    request = Request("p", prompts(llama, 1)[0])
    (reply,), steps = run(llama, SmallLM(small), [request], k=3)
    done = 0
    for step in steps:
        text = [*request.tokens, *reply[:done]]
        if step.round:
            assert step.drafted[0] == run(small, NoDrafter(), [Request("q", text)], k=0)[0][0][: len(step.drafted[0])]
        done += len(step.committed[0])
