"""The canonical folder: what is written is what is read, in pieces, atomically, and readable by the library."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lowrank.config import LowRankConfig, ModelConfig
from megatron_lowrank.convert import ConvertError, Source, load_canonical, read_canonical, write_canonical
from megatron_lowrank.convert.atomic import atomic_folder
from megatron_lowrank.convert.description import read_description
from megatron_lowrank.convert.shards import ShardedReader, plan_shards
from megatron_lowrank.convert.tensor_file import TensorFile, TensorFileWriter, TensorSpec
from megatron_lowrank.names import canonical_parameters

MODEL = ModelConfig(num_layers=2, hidden_size=24, ffn_hidden_size=40, num_query_groups=2, vocab_size=19,
                    attention_bias=True, pad_token_id=None)  # fmt: skip
LOWRANK = LowRankConfig(method="svd", rank=0.5, rank_overrides={"v": 3, "1.up": 9}, dense_layers=(0,),
                        dense_roles=("k",), latent_activation="gelu")  # fmt: skip


def random_tensors(model: ModelConfig = MODEL, lowrank: LowRankConfig = LOWRANK, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {p.name: torch.randn(p.shape, generator=generator) for p in canonical_parameters(model, lowrank)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_round_trip_of_configs_and_tensors(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["decoder.final_layernorm.weight"] = tensors["decoder.final_layernorm.weight"].bfloat16()
    source = Source(kind="training", exact=False, init_from="dense_svd_warm_start", metadata={"step": 12})
    write_canonical(tmp_path / "a", MODEL, LOWRANK, tensors, source, seed=7, shard_bytes=3000)
    model, lowrank, stream = read_canonical(tmp_path / "a")
    assert (model, lowrank) == (MODEL, LOWRANK)
    assert_same(dict(stream), tensors)
    description = read_description(tmp_path / "a")
    assert (description.source, description.seed, description.dtype) == (source, 7, "mixed")
    assert description.versions["torch"] == torch.__version__
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    shards = [name for name in names if name.startswith("model-")]
    assert len(shards) > 2 and shards[-1] == f"model-{len(shards):05d}-of-{len(shards):05d}.safetensors"
    rest = [name for name in names if name not in shards]
    assert rest == ["COMPLETE", "lowrank_config.json", "manifest.json", "model.safetensors.index.json"]
    assert os.listdir(tmp_path) == ["a"]


def test_the_library_reads_our_files_and_we_read_its(tmp_path: Path) -> None:
    tensors = {
        "f": torch.randn(3, 5), "b": torch.randn(4).bfloat16(), "scalar": torch.tensor(2.5), "none": torch.empty(0, 3),
        "ids": torch.arange(5), "h": torch.randn(2, 2).half(), "d": torch.randn(7).double(), "é": torch.ones(1),
    }  # fmt: skip
    specs = [TensorSpec(name=n, shape=tuple(t.shape), dtype=t.dtype) for n, t in tensors.items()]
    writer = TensorFileWriter(tmp_path / "ours.safetensors", specs)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    assert_same({name: load_file(tmp_path / "ours.safetensors")[name] for name in tensors}, tensors)
    save_file(tensors, tmp_path / "theirs.safetensors")
    file = TensorFile(tmp_path / "theirs.safetensors")
    assert_same({name: file.read(name)[0] for name in tensors}, tensors)


def test_tensors_may_arrive_one_by_one(tmp_path: Path) -> None:
    tensors = random_tensors()
    write_canonical(tmp_path / "a", MODEL, LOWRANK, iter(tensors.items()), dtypes=torch.float32)
    assert_same(load_canonical(tmp_path / "a"), tensors)
    backwards = reversed(tensors.items())
    with pytest.raises(ConvertError, match="MISSING_KEY"):
        write_canonical(tmp_path / "b", MODEL, LOWRANK, backwards, dtypes=torch.float32)
    with pytest.raises(ConvertError, match="SHAPE"):
        write_canonical(tmp_path / "b", MODEL, LOWRANK, iter(tensors.items()), dtypes=torch.float64)
    with pytest.raises(ValueError, match="dtypes"):
        write_canonical(tmp_path / "b", MODEL, LOWRANK, iter(tensors.items()))
    assert os.listdir(tmp_path) == ["a"]


def test_tied_embeddings_have_no_output_layer(tmp_path: Path) -> None:
    tied = replace(MODEL, tie_embeddings=True)
    write_canonical(tmp_path / "a", tied, LOWRANK, random_tensors(tied))
    assert "output_layer.weight" not in load_canonical(tmp_path / "a")
    with pytest.raises(ConvertError, match="EXTRA_KEY"):
        write_canonical(tmp_path / "b", tied, LOWRANK, random_tensors())


def test_shards_are_filled_in_order_and_a_large_tensor_is_alone() -> None:
    specs = [TensorSpec(name=str(i), shape=(n,), dtype=torch.int8) for i, n in enumerate((4, 5, 30, 1, 2))]
    assert [[s.name for s in shard] for shard in plan_shards(specs, 10)] == [["0", "1"], ["2"], ["3", "4"]]


def test_an_existing_folder_stays_unless_it_is_overwritten(tmp_path: Path) -> None:
    old, new = random_tensors(seed=1), random_tensors(seed=2)
    write_canonical(tmp_path / "a", MODEL, LOWRANK, old)
    with pytest.raises(ConvertError, match="EXISTS"):
        write_canonical(tmp_path / "a", MODEL, LOWRANK, new)
    assert_same(load_canonical(tmp_path / "a"), old)

    def breaks_off() -> Iterator[tuple[str, Tensor]]:
        yield from list(new.items())[:5]
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="broke"):
        write_canonical(tmp_path / "a", MODEL, LOWRANK, breaks_off(), dtypes=torch.float32, overwrite=True)
    assert_same(load_canonical(tmp_path / "a"), old)
    write_canonical(tmp_path / "a", MODEL, LOWRANK, new, overwrite=True)
    assert_same(load_canonical(tmp_path / "a"), new)
    assert os.listdir(tmp_path) == ["a"]


def test_without_a_name_exchange_the_old_folder_is_renamed_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_lowrank.convert.atomic._exchange", lambda first, second: False)
    for content in ("old", "new"):
        with atomic_folder(tmp_path / "a", overwrite=True) as folder:
            (folder / "config.json").touch()
            (folder / "one.safetensors").write_text(content)
    assert (tmp_path / "a" / "one.safetensors").read_text() == "new" and os.listdir(tmp_path) == ["a"]


def _write_for_ever(folder: Path) -> None:
    torch.set_num_threads(1)
    versions = [random_tensors(seed=seed) for seed in (1, 2)]
    for round_number in range(10_000):
        write_canonical(folder, MODEL, LOWRANK, versions[round_number % 2], overwrite=True, shard_bytes=3000)


def test_a_killed_writer_leaves_the_old_folder_or_the_new_one(tmp_path: Path) -> None:
    versions = [random_tensors(seed=seed) for seed in (1, 2)]
    folder = tmp_path / "a"
    write_canonical(folder, MODEL, LOWRANK, versions[0])
    for moment in range(10):
        child = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(folder,))
        child.start()
        time.sleep(0.05 + 0.013 * moment)
        assert child.pid is not None and child.is_alive()
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        found = load_canonical(folder)  # checks completeness and every checksum
        assert any(all(torch.equal(found[name], one[name]) for name in one) for one in versions)


def test_a_flipped_bit_in_a_tensor_is_seen(tmp_path: Path) -> None:
    write_canonical(tmp_path / "a", MODEL, LOWRANK, random_tensors())
    file = tmp_path / "a" / "model-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConvertError, match="CHECKSUM") as caught:
        load_canonical(tmp_path / "a")
    assert caught.value.exit_status == 3


def test_the_description_is_bound_to_what_it_meant(tmp_path: Path) -> None:
    """A default that changes later must not re-interpret the file."""
    write_canonical(tmp_path / "a", MODEL, LOWRANK, random_tensors())
    path = tmp_path / "a" / "lowrank_config.json"
    values = json.loads(path.read_text())
    values["resolved"]["mlp_activation"] = "drop"
    path.write_text(json.dumps(values))
    with pytest.raises(ConvertError, match=r"CONFIG.*mlp_activation: 'drop' in the file, 'keep' from its fields"):
        read_description(tmp_path / "a")


def test_memory_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """While reading, no earlier tensor is alive."""
    write_canonical(tmp_path / "a", MODEL, LOWRANK, random_tensors())
    alive = 0

    class Counted:
        def __init__(self) -> None:
            nonlocal alive
            alive += 1

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in ((p.name, p) for p in canonical_parameters(MODEL, LOWRANK)):
            tensor = torch.zeros(parameter.shape)
            tensor.tag = Counted()  # type: ignore[attr-defined]
            assert alive <= 2  # the one before may live until its place is taken
            yield name, tensor

    write_canonical(tmp_path / "b", MODEL, LOWRANK, counted(), dtypes=torch.float32)
    assert ShardedReader(tmp_path / "b").specs.keys() == random_tensors().keys()
