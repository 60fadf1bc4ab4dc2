import subprocess
import sys
import time

from specbench.load import MachineLoad


def test_a_busy_machine_is_noticed():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with MachineLoad() as load:
            time.sleep(1.0)
    finally:
        busy.kill()
    assert load.others > 0.05


def test_our_own_work_is_not_held_against_us():
    own = []
    with MachineLoad() as load:
        end = time.perf_counter() + 1.0
        while time.perf_counter() < end:
            own.append(0)
    # whatever else runs here, our full core is not in it
    with MachineLoad() as idle:
        time.sleep(1.0)
    assert load.others < idle.others + 0.3


def test_a_quiet_machine_has_no_warning():
    assert MachineLoad(others=0.02, stolen=0.01, seconds=60).warning() is None


def test_a_busy_machine_has_one_once_it_was_busy_for_a_while():
    assert "took 30% of the processor" in MachineLoad(others=0.1, stolen=0.2, seconds=60).warning()
    assert MachineLoad(others=0.1, stolen=0.2, seconds=1).warning() is None
