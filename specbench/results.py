"""Many records at once."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbench import record
from specbench.errors import ConfigError

log = logging.getLogger(__name__)


def runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The ``run.json`` of every record among ``paths`` (record folders, or folders that hold some), each with its
    ``folder``.

    What cannot be read (half of a record, another schema) is left out, with a line that names it. Raises ConfigError if
    nothing is left.
    """
    found, refused = [], []
    for folder in record.find(list(paths)):
        try:
            found.append({**record.read(folder), "folder": str(folder)})
        except ConfigError as error:
            refused.append(str(error))
    if not found:
        raise ConfigError(refused[0] if len(refused) == 1 else f"no record can be read: {'; '.join(refused)}")
    for reason in refused:
        log.warning("left out: %s", reason)
    return found
