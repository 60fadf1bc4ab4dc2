"""How busy was the machine with other things while we measured? Contention makes a clock lie."""

import time
from dataclasses import dataclass
from types import TracebackType

import psutil

BUSY = 0.05  # share of the processor, used by others, above which timings should not be believed
BRIEF = 5.0  # seconds; of less, the shares are too coarse to warn of


@dataclass
class MachineLoad:
    """Context manager; afterwards ``others`` and ``stolen`` are shares, of all cores, of the ``seconds`` in between:
    what other processes used, and what a hypervisor gave to other machines (0 where the system does not tell)."""

    others: float = 0.0
    stolen: float = 0.0
    seconds: float = 0.0

    def __enter__(self) -> "MachineLoad":
        self._began = time.perf_counter()
        self._machine, self._own = psutil.cpu_times(), psutil.Process().cpu_times()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
        self.seconds = time.perf_counter() - self._began
        # guest time is counted inside user time already
        passed = {
            name: getattr(machine, name) - getattr(self._machine, name)
            for name in machine._fields
            if not name.startswith("guest")
        }
        total = sum(passed.values())
        if total <= 0:
            return
        idle = passed["idle"] + passed.get("iowait", 0.0)
        stolen = passed.get("steal", 0.0)
        ours = (own.user + own.system) - (self._own.user + self._own.system)
        self.stolen = stolen / total
        self.others = max(0.0, total - idle - stolen - ours) / total

    def warning(self) -> str | None:
        """What to tell the user, if the machine was busy."""
        if self.others + self.stolen <= BUSY or self.seconds < BRIEF:
            return None
        return (
            f"other work took {self.others + self.stolen:.0%} of the processor while this ran: "
            "its timings are unreliable; run it again (force=true) on a quiet machine"
        )
