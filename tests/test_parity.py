"""Our networks against independent implementations: see parity.py."""

import pytest
import torch
from parity import CLOSE, FAMILIES, STORED, answers, folders


def test_every_family_with_an_implementation_elsewhere_has_a_case():
    assert {path.name.split("_")[0] for path in folders(STORED)} == set(FAMILIES)


@pytest.mark.parametrize("folder", folders(STORED), ids=lambda path: path.name)
def test_networks_are_those_of_others(folder):
    for name, (ours, theirs) in answers(folder).items():
        torch.testing.assert_close(ours, theirs, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
