import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.types import RunMode
from hydra.utils import instantiate

from specbench.cli import conf_dir
from specbench.drafting import Drafter
from specbench.model import CausalLM
from specbench.prompts import PromptSet
from specbench.sampling import Sampling

GROUPS = ("target", "drafter", "dataset", "sampling", "tracker", "experiment")
MAKEFILE = Path(__file__).parent.parent / "Makefile"


def choices(group):
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def composed(*overrides):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", list(overrides))


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in GROUPS for name in choices(group)])
def test_every_choice_composes(choice):
    group = choice.partition("=")[0]
    cfg = composed(choice)
    assert group == "experiment" or "_target_" in cfg[group]


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_has_choices(group):
    assert choices(group)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_neox"])
def test_tiny_target_instantiates_in_each_family(family):
    cfg = composed("target=tiny", f"target.family={family}", "dtype=float32", "device=cpu")
    target = instantiate(cfg.target)
    assert isinstance(target, CausalLM)
    assert (target.name, target.context) == (f"tiny-{family}", cfg.target.context)


@pytest.mark.parametrize("name", [name for name in choices("drafter") if name != "small_lm"])
def test_drafter_instantiates(name):
    assert isinstance(instantiate(composed(f"drafter={name}").drafter), Drafter)


@pytest.mark.parametrize("name", choices("sampling"))
def test_sampling_instantiates(name):
    law = instantiate(composed(f"sampling={name}").sampling)
    assert isinstance(law, Sampling)
    assert law.greedy == (name == "greedy")


def test_builtin_prompts_instantiate_with_their_limit_and_seed():
    some = instantiate(composed("dataset=builtin", "dataset.limit=8", "dataset.seed=5", "seed=9").dataset)
    assert isinstance(some, PromptSet)
    assert some == instantiate(composed("dataset=builtin").dataset).sample(8, seed=5)


def test_experiments_that_sweep_do_so_by_themselves():
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        modes = {
            name: compose("config", [f"experiment={name}"], return_hydra_config=True).hydra.mode
            for name in choices("experiment")
        }
    swept = {name for name, mode in modes.items() if mode == RunMode.MULTIRUN}
    assert swept == {"draft_length", "batch", "sampling", "targets"}


@pytest.mark.parametrize("name", choices("experiment"))
def test_every_arm_of_an_experiment_instantiates(name):
    cfg = composed(f"experiment={name}")
    arms = {"asked for": cfg.drafter, **cfg.compare}
    assert {arm: isinstance(instantiate(config), Drafter) for arm, config in arms.items()} == dict.fromkeys(arms, True)


def test_every_make_target_is_explained():
    text = MAKEFILE.read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    explained = re.findall(r"^([\w-]+):.* ## \S", text, re.MULTILINE)
    assert sorted(explained) == sorted(phony.split())
