"""Turns text into token files: python tools/prepare_data.py --input FILES_OR_FOLDERS --out PREFIX."""

from __future__ import annotations

import argparse
import sys

from megatron_lowrank import compat
from megatron_lowrank.data.documents import SUFFIXES
from megatron_lowrank.data.prepare import BadLineError, PrepareOptions, prepare


def parse(arguments: list[str] | None = None) -> PrepareOptions:
    """Options of the command line.

    Raises:
        ValueError: an option is out of range.
    """
    parser = argparse.ArgumentParser(
        prog="prepare_data", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--input", nargs="+", default=[], help=f"files or folders of {' '.join(SUFFIXES)}; none: pydoc_data.topics"
    )
    parser.add_argument("--out", required=True, help="prefix of the .bin, .idx and .json files")
    parser.add_argument("--tokenizer", choices=("byte", "hf", "sentencepiece"), default="byte", help="kind")
    parser.add_argument("--tokenizer-path", help="tokenizer.json (hf) or .model file (sentencepiece)")
    parser.add_argument("--eod-token", help="end-of-document token of --tokenizer hf, if it is not found by itself")
    parser.add_argument("--train-bpe", type=int, metavar="VOCAB", help="train a BPE on the input first")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--json-key", default="text", help="key of the text in a line of JSON")
    parser.add_argument("--strict", action="store_true", help="stop at the first line that is no document")
    parser.add_argument("--overwrite", action="store_true", help="replace results that exist")
    parser.add_argument("--shard-mib", type=float, default=64.0, help="MiB of text per shard")
    given = parser.parse_args(arguments)
    return PrepareOptions(
        out=given.out, input=tuple(given.input), tokenizer=given.tokenizer, tokenizer_path=given.tokenizer_path,
        eod_token=given.eod_token, train_bpe=given.train_bpe, workers=given.workers, json_key=given.json_key,
        strict=given.strict, overwrite=given.overwrite, shard_bytes=int(given.shard_mib * (1 << 20)), progress=True,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 0 on success, 1 when `--strict` stopped it or a worker died, 2 for bad arguments."""
    compat.silence_known_notices()
    try:
        record = prepare(parse(arguments))
    except (BadLineError, RuntimeError) as error:
        print(f"prepare_data: error: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"prepare_data: error: {error}", file=sys.stderr)
        return 2
    for example in record["bad_examples"]:
        print(f"bad line: {example}", file=sys.stderr)
    bad = sum(record["bad_lines"].values())
    print(
        f"{record['documents']} documents, {record['tokens']} tokens of {record['tokenizer']['kind']} "
        f"(vocabulary {record['vocab_size']}, {record['text_bytes'] / record['tokens']:.2f} bytes per token), unigram "
        f"entropy {record['unigram_entropy']:.4f} nats per token; left out: {bad} bad lines, "
        f"{record['empty_documents']} empty documents"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
