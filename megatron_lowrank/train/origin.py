"""Where a run begins: its own checkpoint, another one, weights alone, or nothing; found before the data is opened.

How many rows a run needs, and what its schedule is, depend on the rows behind it. So the position is read first
(`find_origin`), and the tensors when there is a model to put them into (`load_origin`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_lowrank.checkpoint import latest, load_checkpoint
from megatron_lowrank.checkpoint.agree import on_every_rank, on_rank_0
from megatron_lowrank.checkpoint.files import resolve
from megatron_lowrank.checkpoint.read import check_architecture, read_train_state
from megatron_lowrank.checkpoint.state import reset_main_parameters, unwrap
from megatron_lowrank.config import RunConfig, TrainConfig
from megatron_lowrank.convert.canonical import open_canonical
from megatron_lowrank.convert.description import DESCRIPTION
from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.convert.hub import TensorSource, finite
from megatron_lowrank.model import load_full_tensors
from megatron_lowrank.train.batch import Batches
from megatron_lowrank.train.folder import checkpoint_folder


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a run begins; equal on every rank."""

    source: Path | None = None
    """Checkpoint or canonical folder; None: initial weights."""
    own: bool = False
    """Whether it is a checkpoint of this very run."""
    weights_only: bool = False
    """Whether its weights alone are taken."""
    canonical: bool = False
    """Whether it is a canonical folder."""
    step: int = 0
    """Optimizer steps behind the run."""
    rows: int = 0
    """Rows behind the run."""
    batches: Batches | None = None
    """Batches of the steps behind it; None at step 0."""

    def batches_of(self, train: TrainConfig) -> Batches:
        """Rows of the steps behind the run, and of those to come with the batch of its config."""
        return Batches.of(train) if self.batches is None else self.batches.resumed(train, self.step, self.rows)


def find_origin(run: RunConfig) -> Origin:
    """The run's own newest checkpoint, else `checkpoint.load`, else initial weights. Collective over the world.

    The run's own come first, so that a job that is started again with the same command goes on.

    Raises:
        AgreedError: `checkpoint.load` is no checkpoint, or a position cannot be read.
    """
    return on_rank_0(lambda: _find(run), what="looking for a checkpoint")


def _find(run: RunConfig) -> Origin:
    own, load = latest(checkpoint_folder(run)), run.checkpoint.load
    if own is not None:
        return _position(own, own=True)
    if load is None:
        return Origin()
    if (Path(load) / DESCRIPTION).is_file():
        if not run.checkpoint.load_weights_only:
            raise ValueError(
                f"checkpoint.load: {load} is a canonical folder, which holds weights alone; allowed: with "
                "checkpoint.load_weights_only"
            )
        return Origin(source=Path(load), weights_only=True, canonical=True)
    found = resolve(load)
    return Origin(source=found, weights_only=True) if run.checkpoint.load_weights_only else _position(found, own=False)


def _position(path: Path, *, own: bool) -> Origin:
    state = read_train_state(path)
    try:
        step, rows, batches = state["step"], state["loader"]["consumed_rows"], Batches.from_state(state["batches"])
        return Origin(source=path, own=own, step=int(step), rows=int(rows), batches=batches)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not tell where its run was ({error!r}); allowed: checkpoints of the training loop, or "
            "checkpoint.load_weights_only"
        ) from error


def load_origin(
    origin: Origin,
    run: RunConfig,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> dict[str, Any]:
    """Reads what `find_origin` has found into live objects; the train state of a checkpoint, else {}. Collective.

    Raises:
        AgreedError: it cannot be read, or belongs to another architecture.
    """
    if origin.source is None:
        return {}
    if origin.canonical:
        load_canonical_weights(origin.source, run, chunks)
        reset_main_parameters(optimizer)
        return {}
    return load_checkpoint(origin.source, run, chunks, optimizer, scheduler, weights_only=origin.weights_only)


def load_canonical_weights(folder: Path, run: RunConfig, chunks: Sequence[Any]) -> None:
    """Copies the weights of a canonical folder into a model of any layout, one full tensor at a time. Collective.

    Args:
        folder: As `tools/convert.py import-hf` writes it; every rank has to see it.
        run: Its architecture has to be the folder's.
        chunks: The model's chunks on this rank, wrapped for DDP or not.

    Raises:
        AgreedError: the folder is damaged, or has another architecture.
    """

    def load() -> None:
        try:
            source = finite(open_canonical(folder))
            alone = RunConfig(model=source.model, lowrank=source.lowrank, train=TrainConfig(sequence_length=1))
            check_architecture(folder, alone.architecture(), run.architecture())
            load_full_tensors([unwrap(chunk) for chunk in chunks], _Tensors(source))  # type: ignore[arg-type]
        except ConvertError as error:
            raise ValueError(str(error)) from error

    on_every_rank(load, what=f"loading the weights of {folder}")


class _Tensors(Mapping[str, Tensor]):
    """The tensors of a source, each read when it is asked for."""

    def __init__(self, source: TensorSource) -> None:
        self._read, self._names = source.read, [spec.name for spec in source.specs]

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
