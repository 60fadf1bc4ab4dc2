"""Our networks against independent implementations: see parity.py."""

from pathlib import Path

import pytest
import torch
from parity import CLOSE, FAMILIES, STORED, answers, folders

PROJECT = Path(__file__).parent.parent


def test_every_family_with_an_implementation_elsewhere_has_a_case():
    assert {path.name.split("_")[0] for path in folders(STORED)} == set(FAMILIES)


@pytest.mark.parametrize("folder", folders(STORED), ids=lambda path: path.name)
def test_networks_are_those_of_others(folder):
    for name, (ours, theirs) in answers(folder).items():
        torch.testing.assert_close(ours, theirs, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", ["networks", "vllm"])
def test_the_tables_in_the_docs_are_those_of_the_results(name):
    table = (PROJECT / f"results/parity/{name}.md").read_text(encoding="utf-8")
    assert table.count("\n") > 5
    assert table in (PROJECT / "docs/parity.md").read_text(encoding="utf-8")
