"""The files of a checkpoint, and the way its tensors become those of a network.

Nothing is unpickled: weights are safetensors, or PyTorch files that are read as tensors alone (``weights_only``). Every
tensor of the network must be there, in its shape, and every tensor that is there must be of use: else an error lists
all that is wrong, and nothing is left as it was made."""

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafters.draft_model import DraftModel
from specbench import packaged
from specbench.errors import ConfigError
from specbench.targets import from_hub

READ = ("*.json", "*.safetensors", "*.bin", "*.pt")
USUAL = ("model.safetensors", "pytorch_model.bin")  # or an index of shards beside them
LISTED = 8  # names in an error, of each kind of wrong

# parts of our layers that checkpoints keep apart
MERGED = {"kv_proj": ("k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Source:
    """A checkpoint as it lies there: its ``config``, its ``tensors`` by name, and the SHA-256 of its ``files``."""

    name: str
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, str]

    def need(self, key: str, *within: str) -> Any:
        """A value of the configuration, in one of the dictionaries ``within`` or at the top. Raises ConfigError."""
        value = self.get(key, None, *within)
        if value is None:
            where = "".join(f"{name} or the top of " for name in within)
            raise ConfigError(f"drafter.checkpoint={self.name} does not say {key}, in {where}config.json")
        return value

    def get(self, key: str, default: Any = None, *within: str) -> Any:
        """As ``need``, with a default for what is not said."""
        for part in (*(self.config.get(name) or {} for name in within), self.config):
            if part.get(key) is not None:
                return part[key]
        return default

    def tensor(self, name: str, dimensions: int = 2) -> Tensor | None:
        """The tensor of this name, if there is one. Raises ConfigError for one of other ``dimensions``."""
        found = self.tensors.get(name)
        if found is not None and found.dim() != dimensions:
            raise ConfigError(
                f"drafter.checkpoint={self.name}: {name} is {[*found.shape]} and should have {dimensions} dimensions"
            )
        return found

    def has(self, pattern: str) -> bool:
        """Whether a tensor's whole name matches the regular expression ``pattern``."""
        return any(re.fullmatch(pattern, name) for name in self.tensors)

    def count(self, pattern: str) -> int:
        """How many different numbers stand where ``pattern`` has its group."""
        return len({match[1] for name in self.tensors if (match := re.match(pattern, name))})


@dataclass(frozen=True)
class Loaded:
    """A checkpoint understood: ``fields`` of the family's ``Spec``, and ``tensors`` by published name.

    names: our prefixes of names and the published ones, the first that fits counts. ids [Vd]: target ids of the draft
    vocabulary, None for all. unused: regular expressions of tensors that are not needed.
    """

    source: Source
    fields: dict[str, Any]
    names: Mapping[str, str]
    ids: Tensor | None = None
    unused: Sequence[str] = ()

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of the files, by name."""
        return self.source.files

    def fill(self, model: DraftModel) -> None:
        """Set all weights of ``model``. Raises ConfigError, listing whatever is missing, unexpected or misshapen."""
        missing, misshapen, used = [], [], set()
        state: dict[str, Tensor] = {}
        for name, own in model.state_dict().items():
            parts = published(name, self.names)
            used |= set(parts)
            absent = [part for part in parts if part not in self.source.tensors]
            if absent:
                missing += absent
                continue
            given = [self.source.tensors[part] for part in parts]
            shapes = [like.shape for like in (own.chunk(len(parts)) if len(parts) > 1 else [own])]
            off = [(part, g.shape, s) for part, g, s in zip(parts, given, shapes, strict=True) if g.shape != s]
            misshapen += [f"{part} is {[*found]} and should be {[*wanted]}" for part, found, wanted in off]
            if not off:
                state[name] = (torch.cat(given) if len(given) > 1 else given[0]).to(own.dtype)
        left = [n for n in self.source.tensors if n not in used and not any(re.fullmatch(p, n) for p in self.unused)]
        if missing or misshapen or left:
            found = [("missing", missing), ("of the wrong shape", misshapen), ("unexpected", left)]
            wrong = "; ".join(f"{kind}: {_few(names)}" for kind, names in found if names)
            raise ConfigError(
                f"drafter.checkpoint={self.source.name} does not fit its own configuration. Tensors {wrong}"
            )
        model.load_state_dict(state)
        model.head.ids = None if self.ids is None else self.ids.clone()


@dataclass(frozen=True)
class Written:
    """A checkpoint to be written: its ``config``, and its ``tensors`` by name."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def save(self, folder: Path) -> dict[str, str]:
        """Write it to ``folder``, which appears as a whole or not at all; returns the SHA-256 of its files.

        Raises ConfigError where there is something else already.
        """
        if folder.is_file() or (folder.exists() and any(folder.iterdir())):
            raise ConfigError(f"out={folder} is there already; give another folder, or remove it")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                dtype = next(tensor.dtype for tensor in self.tensors.values() if tensor.is_floating_point())
                config = {**self.config, "dtype": str(dtype).removeprefix("torch.")}
                (made / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
                save_file({name: t.contiguous() for name, t in self.tensors.items()}, made / "model.safetensors")
                if folder.exists():
                    folder.rmdir()
                made.rename(folder)
        except OSError as error:
            raise ConfigError(f"out={folder} cannot be written: {error}") from error
        return packaged.digests(folder, READ)


def read(path: str, keep: Callable[[Mapping[str, Any]], str] = lambda config: ".*") -> Source:
    """Open a folder or hub id. Only tensors are loaded whose whole name matches the expression that ``keep`` makes of
    the configuration, and only files that hold some are taken into account.

    Raises ConfigError for what is not there or cannot be read.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path.startswith((".", "/", "~")) or path.count("/") != 1:
            raise ConfigError(
                f"drafter.checkpoint={path}: there is no such folder; give one, or a hub id like org/name"
            )
        folder = from_hub(path, READ, f"drafter.checkpoint={path}", "copy the folder here and give its path")
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"drafter.checkpoint={path} has no config.json") from None
    except ValueError as error:
        raise ConfigError(f"drafter.checkpoint={path}: config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"drafter.checkpoint={path}: config.json is not a JSON object but a {type(config).__name__}")
    found = list(_tensors(folder, path, keep(config)))
    read = {"config.json", *(file.name for file, _, _ in found)}
    hashes = {name: packaged.file_sha256(folder / name) for name in sorted(read)}
    return Source(path, config, {key: value for _, key, value in found}, hashes)


def published(name: str, names: Mapping[str, str]) -> list[str]:
    """The published names of what is ``name`` in our model: several where we keep layers joined.

    >>> published("network.layers.0.mlp.gate_up_proj.weight", {"network.": ""})
    ['layers.0.mlp.gate_proj.weight', 'layers.0.mlp.up_proj.weight']
    """
    for ours, theirs in names.items():
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
            break
    for joint, parts in MERGED.items():
        if f".{joint}." in name:
            return [name.replace(f".{joint}.", f".{part}.") for part in parts]
    return [name]


def as_published(model: DraftModel, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The weights of ``model`` under their published names: the way back of ``Loaded.fill``."""
    tensors = {}
    for name, own in model.state_dict().items():
        if name == "head.ids":
            continue
        parts = published(name, names)
        for part, value in zip(parts, own.chunk(len(parts)), strict=True):
            tensors[part] = value.detach().contiguous().cpu()
    return tensors


def _tensors(folder: Path, name: str, keep: str) -> Iterator[tuple[Path, str, Tensor]]:
    """File, name and value of each tensor to be loaded."""
    files = _weight_files(folder, name, keep)
    if files is None:
        raise ConfigError(f"drafter.checkpoint={name} has no weights: neither *.safetensors nor *.bin nor *.pt")
    for file in files:
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as opened:
                    wanted = [key for key in opened.keys() if re.fullmatch(keep, key)]  # noqa: SIM118
                    yield from ((file, key, opened.get_tensor(key)) for key in wanted)
            else:
                held = torch.load(file, map_location="cpu", weights_only=True)
                if not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in held.items()):
                    raise ValueError("not all that it holds are tensors by name")
                yield from ((file, key, value) for key, value in held.items() if re.fullmatch(keep, key))
        except (OSError, SafetensorError, RuntimeError, AttributeError, ValueError) as error:
            raise ConfigError(f"drafter.checkpoint={name}: cannot read {file.name}: {error}") from error
        except Exception as error:  # an unpickler that refuses code says so by an error of its own
            raise ConfigError(
                f"drafter.checkpoint={name}: {file.name} holds more than tensors and is not opened; convert it to "
                f"safetensors ({type(error).__name__})"
            ) from error


def _weight_files(folder: Path, name: str, keep: str) -> list[Path] | None:
    """The shards of an index that hold tensors to be loaded, else the file of the usual name, else whatever there is;
    None where there is nothing."""
    for usual in USUAL:
        index = folder / f"{usual}.index.json"
        if index.exists():
            try:
                places = json.loads(index.read_text())["weight_map"].items()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"drafter.checkpoint={name}: {index.name} is not an index of weights") from error
            return [folder / file for file in sorted({file for key, file in places if re.fullmatch(keep, key)})]
        if (folder / usual).exists():
            return [folder / usual]
    found = sorted(folder.glob("*.safetensors")) or sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
    return found or None


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
