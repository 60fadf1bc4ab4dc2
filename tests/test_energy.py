"""Counters of energy, by files in the kernel's format."""

from pathlib import Path

import pytest
import torch

from specbench import energy
from specbench.energy import EnergyMeter

CPU = torch.device("cpu")


@pytest.fixture
def zones(tmp_path, monkeypatch) -> Path:
    """Two packages, one with a zone of its own inside."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    for name, joules, reach in (("intel-rapl:0", 10, 100), ("intel-rapl:1", 90, 100), ("intel-rapl:0:0", 5, 100)):
        (tmp_path / name).mkdir()
        put(tmp_path, name, joules)
        (tmp_path / name / "max_energy_range_uj").write_text(f"{reach * 10**6}\n")
    return tmp_path


def put(home: Path, zone: str, joules: float) -> None:
    (home / zone / "energy_uj").write_text(f"{int(joules * 10**6)}\n")


def test_joules_are_those_of_all_packages_and_of_no_zone_twice(zones):
    with EnergyMeter(CPU) as meter:
        for zone, joules in (("intel-rapl:0", 12.5), ("intel-rapl:1", 91), ("intel-rapl:0:0", 7)):
            put(zones, zone, joules)
    assert meter.joules == pytest.approx(3.5)


def test_a_counter_that_began_anew_is_understood(zones):
    with EnergyMeter(CPU) as meter:
        put(zones, "intel-rapl:1", 4)
    assert meter.joules == pytest.approx(14)


def test_a_machine_that_does_not_count_has_no_joules(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    with EnergyMeter(CPU) as meter:
        pass
    assert meter.joules is None


def test_a_counter_that_can_no_longer_be_read_gives_none(zones):
    with EnergyMeter(CPU) as meter:
        (zones / "intel-rapl:1" / "energy_uj").unlink()
    assert meter.joules is None


def test_without_a_gpu_nothing_is_said_of_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert energy.gpu(energy.GPU_FACTS) == {}


def test_facts_of_a_gpu_are_read_in_their_order(monkeypatch, tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho '580.1, 1980 MHz, 700.00 W'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert energy.gpu(energy.GPU_FACTS) == {
        "driver_version": "580.1",
        "clocks.max.sm": "1980 MHz",
        "power.limit": "700.00 W",
    }
