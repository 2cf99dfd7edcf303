"""The small programs: what is damaged or mistyped is one line, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from scripts import load_tool
from tokenizers import Tokenizer, models

from megatron_lowrank.config import DataConfig, preset
from megatron_lowrank.data.datasets import data_tokenizer
from megatron_lowrank.data.tokenizers import load_tokenizer

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def _run_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "run_config.json").write_text(json.dumps({"config": preset("debug").to_dict()}))
    lines = [
        {"kind": "train", "step": step, "loss": 5.0 - step, "time": {"tokens_per_second": 10.0}} for step in (1, 2)
    ]
    lines.append({"kind": "valid", "step": 2, "loss": 2.5, "unigram_entropy": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    "odd", [b"null\n", b'{"kind": "train", "st', b"\xff\xfe\n", b"[1]\n", b'{"kind": "train"}\n', b"[" * 9999]
)
def test_summarize_leaves_out_an_odd_line(odd: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summarize, run = load_tool("summarize"), _run_folder(tmp_path / "a")
    assert summarize.main([str(run)]) == 0
    expected = capsys.readouterr().out
    assert "3.000" in expected and "2.500" in expected
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(odd)
    assert summarize.main([str(run)]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (expected, f"summarize: warning: {run / 'metrics.jsonl'}: left out 1 damaged line\n")


@pytest.mark.parametrize(
    "damage",
    ["", "null", "[]", "{}", '{"config": 3}', '{"config": {"lowrank": {"method": "no"}}}', '{"config": {"lowr'],
)
def test_summarize_leaves_out_a_damaged_run(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summarize = load_tool("summarize")
    bad = _run_folder(tmp_path / "bad")
    (bad / "run_config.json").write_text(damage)
    assert summarize.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(f"error: {tmp_path} holds no run that can be read\n")
    _run_folder(tmp_path / "good")
    assert summarize.main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "good" in out and "bad" not in out
    assert err.startswith(f"summarize: warning: left out the run {bad}: run_config.json is damaged (")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--json", "a"], ["-x"], [], ["a", "b"], ["none"]])
def test_summarize_refuses_what_it_does_not_know(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert load_tool("summarize").main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("summarize: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        *(
            (tool, arguments, text)
            for tool in ("bench_step", "bench_placements")
            for arguments, text in (
                (["--preset", "nope"], "--preset: found 'nope'; allowed: "),
                (["--preset", "dense_60m"], "--preset: found dense_60m, which is dense already, "),
                (["--ratio", "7"], "--ratio: found 7, allowed: more than 0 and at most 1"),
                (["--rounds", "x"], "argument --rounds: invalid int value: 'x'"),
                (["--widht", "3"], "unrecognized arguments: --widht 3"),
                (["--json", "."], "--json: cannot write '.' (Is a directory)"),
                (["--json", "none/a.json"], "--json: cannot write 'none/a.json' (No such file or directory)"),
                (["--json", ""], "--json: cannot write '' (No such file or directory)"),
            )
        ),
        ("bench_step", ["--threads", "999999999"], "--threads: found 999999999, allowed: 1 to "),
        ("bench_placements", ["--ranks", "3"],
         "--ranks 3: parallel.tensor_parallel_size: found 3, which does not divide "),
        ("bench_placements", ["--ranks", "16"], "--ranks: found 16, allowed: 1 to 8"),
        ("bench_placements", ["--micro-batches", "0"], "--micro-batches: found 0, allowed: a positive integer"),
    ],
)  # fmt: skip
def test_benchmarks_refuse_before_they_measure(
    tool: str,
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{tool}.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        load_tool(tool).main()
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "") and err.startswith(f"{tool}: error: {text}")
    assert err.count("\n") == 1 and err.count("error") == 1


def test_bench_step_writes_versions_and_rows(tmp_path: Path) -> None:
    small = ["--width", "64", "--layers", "1", "--batch", "1", "--sequence", "8", "--rounds", "1", "--json"]
    command = [sys.executable, str(TOOLS / "bench_step.py"), *small, str(tmp_path / "a.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TOOLS.parent, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "a.json").read_text())
    assert {"python", "torch", "megatron_core", "megatron_lowrank"} < set(result) and len(result["rows"]) == 3


def _prepare(*arguments: str) -> int:
    return load_tool("prepare_data").main(list(arguments))  # type: ignore[no-any-return]


def _files(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


TEXT = '{"text": "abc"}\n'


@pytest.mark.parametrize(
    ("files", "arguments", "text"),
    [
        (["corpus.json"], "--input corpus.json --out corpus", "--out: corpus would overwrite the input corpus.json"),
        (["corpus.json"], "--input . --out ./corpus --overwrite", "--out: ./corpus would overwrite the input ./corpus"),
        (["a.parts/x.json"], "--input a.parts --out a", "--out: a would overwrite the input a.parts/x.json with a.par"),
        (["a.parts/x", "b.json"], "--input b.json --out a", "--out: a.parts, the folder for unfinished work, exists"),
        (["a.json", "b.json"], "--input b.json --out a", "--out: a.json exists and was not made by prepare_data; "),
        (["a.bin", "b.json"], "--input b.json --out a", "--out: a.bin exists and was not made by prepare_data; "),
        (
            ["a.json"],
            "--tokenizer hf --tokenizer-path a.json --out a",
            "--out: a would overwrite the input a.json with a.json",
        ),
        (["b.json"], "--input b.json --out new/", "--out: found 'new/', allowed: a prefix that ends in a name"),
        (["b.json"], "--input b.json --out=", "--out: found '', allowed: a prefix that ends in a name"),
        (["b.json"], "--input b.json --out new/.bin", "--out: found 'new/.bin', allowed: a prefix that ends"),
        (
            ["b.json"],
            "--input b.json --out new/a --train-bpe 9",
            "--train-bpe: found vocabulary 9, allowed: 257 or more",
        ),
        (["b.json"], "--input none.txt --out new/a", "--input: found no file or folder none.txt"),
        (["b.json"], "--input b.json --out b.json/a", "b.json/a.parts: Not a directory"),
    ],
)
def test_prepare_data_refuses_before_it_writes(
    files: list[str], arguments: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for file in files:
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text(TEXT)
    before = _files(tmp_path)
    assert _prepare(*arguments.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"prepare_data: error: {text}") and err.count("\n") == 1
    assert _files(tmp_path) == before


def test_prepare_data_of_its_own_output_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.json").write_text(TEXT)
    (tmp_path / "text.idx").touch()  # of another program: the text beside it is none of our results
    out = str(tmp_path / "out")
    common = ["--input", str(tmp_path), "--out", out, "--train-bpe", "258"]
    assert _prepare(*common) == 0
    before = _files(tmp_path)
    assert _prepare(*common) == 0 and _files(tmp_path) == before
    assert _prepare(*common, "--overwrite") == 0 and _files(tmp_path) == before
    assert "%|" not in capsys.readouterr().err  # no bar where nobody watches


def test_prepare_data_takes_regular_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text(TEXT)
    os.mkfifo(folder / "pipe.txt")
    (folder / "dangling.txt").symlink_to("nothing")
    (folder / "loop.txt").symlink_to("loop.txt")
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # pytest's own filter for megatron-core takes ours for one of its modules
        assert _prepare("--input", str(folder), "--out", str(tmp_path / "a")) == 0
    out, err = capsys.readouterr()
    assert out.startswith("1 document, ")
    odd = f"3 entries that are no regular file, the first {folder / 'dangling.txt'}"
    assert f"prepare_data: warning: --input: left out {odd}\n" in err
    for name, text in (("pipe.txt", "a pipe or device"), ("dangling.txt", "a link to nothing"), ("loop.txt", "a link")):
        assert _prepare("--input", str(folder / name), "--out", str(tmp_path / "b")) == 2
        assert f"error: --input: found {folder / name}, {text}" in capsys.readouterr().err
    (folder / "a.jsonl").unlink()
    assert _prepare("--input", str(folder), "--out", str(tmp_path / "b")) == 2
    assert not list(tmp_path.glob("b*"))


def test_prepare_data_names_the_place_of_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megatron_lowrank.data.prepare.write_shard", full)
    assert _prepare("--out", str(tmp_path / "a")) == 2
    assert capsys.readouterr().err == f"prepare_data: error: {tmp_path / 'a'}.parts: No space left on device\n"


def test_an_empty_vocabulary_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE()).save(str(path))
    with pytest.raises(ValueError, match=f"data.tokenizer_path: {path} has an empty vocabulary, allowed: "):
        load_tokenizer("hf", str(path))


def test_a_digest_that_does_not_match_is_said(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(TEXT)
    assert _prepare("--input", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "a")) == 0
    tokens = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(tokens[2:] + tokens[:2])
    with pytest.raises(ValueError, match="a.json does not tell of these files: its digest does not match .*a.idx"):
        data_tokenizer(DataConfig(path=(str(tmp_path / "a"),)))


@pytest.mark.parametrize(
    "arguments", [[], ["cuont"], ["count", "--tp", "x"], ["count", "--dp"], ["count", "--tpp", "2"]]
)
def test_plan_errors_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load_tool("plan").main(arguments)
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "") and err.startswith("plan: error: ") and err.count("\n") == 1
