"""A folder of safetensors files with an index: which tensor is in which file, on reading and on writing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lowrank import disk
from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.convert.tensor_file import DTYPE_TAGS, TensorFile, TensorFileWriter, TensorSpec
from megatron_lowrank.messages import some

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ConvertError: MISSING_FILE, CORRUPT, or an I/O error.
    """
    try:
        value = disk.read_json(path)
    except FileNotFoundError as error:
        raise ConvertError("MISSING_FILE", f"{path} does not exist") from error
    except OSError as error:
        raise ConvertError.from_os_error(error) from error
    except disk.DamagedError as error:
        raise ConvertError.from_damage(error) from error
    if not isinstance(value, dict):
        raise ConvertError("CORRUPT", f"{path} holds no JSON object")
    return value


class ShardedReader:
    """The tensors of a folder. Opening reads and checks every header, but no tensor.

    Raises:
        ConvertError: MISSING_FILE, UNSAFE_PATH, UNSAFE_PICKLE, DUPLICATE, CORRUPT, MISSING_KEY, EXTRA_KEY.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checksums: dict[str, str] = {}
        self._files: dict[str, TensorFile] = {}
        weight_map = self._weight_map()
        for name in self._file_names(weight_map):
            file = TensorFile(folder / name)
            for tensor in file.specs:
                if tensor in self._files:
                    raise ConvertError("DUPLICATE", f"tensor {tensor} is in {self._files[tensor].path} and {file.path}")
                self._files[tensor] = file
        if weight_map is not None:
            self._compare(weight_map)
        self.specs: dict[str, TensorSpec] = {name: file.specs[name] for name, file in self._files.items()}

    def read(self, name: str) -> Tensor:
        """One tensor; its checksum is verified if `expect_checksums` gave one.

        Raises:
            ConvertError: CORRUPT, CHECKSUM.
        """
        tensor, digest = self._files[name].read(name)
        expected = self._checksums.get(name, digest)
        if expected != digest:
            where = f"tensor {name}, {self._files[name].path}"
            raise ConvertError("CHECKSUM", f"expected sha256 {expected}, found {digest} ({where})")
        return tensor

    def expect_checksums(self, checksums: dict[str, str]) -> None:
        """Verify these sha256 digests when the tensors are read."""
        self._checksums = checksums

    def _weight_map(self) -> dict[str, Any] | None:
        if not (self.folder / INDEX).is_file():
            return None
        if (self.folder / SINGLE).is_file():
            raise ConvertError("DUPLICATE", f"{self.folder} holds both {SINGLE} and {INDEX}; remove the stale one")
        weight_map = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConvertError("CORRUPT", f"{self.folder / INDEX} has no weight_map")
        return weight_map

    def _file_names(self, weight_map: dict[str, Any] | None) -> list[str]:
        if weight_map is None:
            if not (self.folder / SINGLE).is_file():
                pickles = [p.name for p in sorted(self.folder.glob("*")) if p.suffix in PICKLES]
                if pickles:
                    what = f"{some(pickles)}: a pickle may run code, weights are read from safetensors only"
                    raise ConvertError("UNSAFE_PICKLE", f"{what} ({self.folder})")
                raise ConvertError("MISSING_FILE", f"neither {SINGLE} nor {INDEX} is in {self.folder}")
            return [SINGLE]
        for name in weight_map.values():
            if not disk.is_bare_name(name):
                raise ConvertError("UNSAFE_PATH", f"entry {name!r} is no bare file name ({self.folder / INDEX})")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).suffix in PICKLES:
                raise ConvertError("UNSAFE_PICKLE", f"{name}: weights are read from safetensors only ({self.folder})")
            if not name.endswith(".safetensors"):
                raise ConvertError("UNSAFE_PATH", f"entry {name!r} is no .safetensors file ({self.folder / INDEX})")
            if not (self.folder / name).is_file():
                raise ConvertError("MISSING_FILE", f"shard {name} of {INDEX} is not in {self.folder}")
        return names

    def _compare(self, weight_map: dict[str, Any]) -> None:
        place = {name: file.path.name for name, file in self._files.items()}
        if lost := [name for name in weight_map if name not in place]:
            raise ConvertError("MISSING_KEY", f"{some(lost)}: in {INDEX} but in no shard ({self.folder})")
        if more := [name for name in place if name not in weight_map]:
            raise ConvertError("EXTRA_KEY", f"{some(more)}: in a shard but not in {INDEX} ({self.folder})")
        if moved := [name for name in place if place[name] != weight_map[name]]:
            raise ConvertError("CORRUPT", f"{some(moved)}: not in the shard that {INDEX} names ({self.folder})")


@dataclass(kw_only=True)
class WrittenShards:
    """What `write_shards` wrote, for the manifest."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File name -> bytes and sha256."""
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tensor name -> dtype, shape, file and sha256 of its data."""


def plan_shards(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Fill shards greedily in the given order; a tensor larger than the limit gets its own."""
    shards: list[list[TensorSpec]] = [[]]
    room = limit
    for spec in specs:
        if shards[-1] and spec.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(spec)
        room -= spec.nbytes
    return shards


def write_shards(
    folder: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    limit: int,
    single_name: str | None,
    progress: Callable[[str, int], None],
) -> WrittenShards:
    """Write tensors, which arrive in the order of the specs, and the index.

    Args:
        folder: an existing folder.
        specs: every tensor to come.
        tensors: the stream.
        limit: bytes of a shard.
        single_name: name of the file when one shard holds everything, and then no index is written; None: always an
            index.
        progress: called with name and bytes after each tensor.
    """
    shards = plan_shards(specs, limit)
    stream = iter(tensors)
    written = WrittenShards()
    single = single_name is not None and len(shards) == 1
    for number, shard in enumerate(shards, 1):
        file_name = single_name if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        assert file_name is not None
        writer = TensorFileWriter(folder / file_name, shard)
        try:
            for spec in shard:
                name, tensor = next(stream)
                digest = writer.write(name, tensor)
                written.tensors[name] = {
                    "dtype": DTYPE_TAGS[spec.dtype], "shape": list(spec.shape), "file": file_name, "sha256": digest
                }  # fmt: skip
                del tensor  # before the next one is read
                progress(name, spec.nbytes)
            written.files[file_name] = {"bytes": writer.bytes, "sha256": writer.close()}
        finally:
            writer.abort()
    if not single:
        index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
            "weight_map": {name: entry["file"] for name, entry in written.tensors.items()},
        }
        disk.write_json(folder / INDEX, index)
    return written
