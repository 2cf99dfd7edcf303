"""Turns text into token files: python tools/prepare_data.py --input FILES_OR_FOLDERS --out PREFIX."""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

from megatron_lowrank import compat
from megatron_lowrank.data.documents import SUFFIXES
from megatron_lowrank.data.prepare import PrepareOptions, prepare
from megatron_lowrank.messages import counted

EXAMPLES = """examples:
  python tools/prepare_data.py --input corpus/ more.jsonl.zst --out data/text --train-bpe 32000 --workers 8
  python tools/prepare_data.py --input book.txt --out data/book --tokenizer byte --cut-text 20000
"""


def parse(arguments: list[str] | None = None) -> PrepareOptions:
    """Options of the command line.

    Raises:
        ValueError: an option is out of range.
    """
    parser = argparse.ArgumentParser(
        prog="prepare_data", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--input", nargs="+", default=[], metavar="PATH",
        help=f"files or folders of {' '.join(SUFFIXES)} (default: the text of Python's pydoc_data.topics)",
    )  # fmt: skip
    parser.add_argument("--out", required=True, metavar="PREFIX", help="prefix of the .bin, .idx and .json files")
    parser.add_argument(
        "--tokenizer", choices=("byte", "hf", "sentencepiece"), default="byte", help="kind (default: %(default)s)"
    )
    parser.add_argument(
        "--tokenizer-path", metavar="FILE", help="tokenizer.json (hf) or .model file (sentencepiece), which these need"
    )
    parser.add_argument(
        "--eod-token", metavar="TOKEN", help="end-of-document token of --tokenizer hf, if it is not found by itself"
    )
    parser.add_argument(
        "--train-bpe", type=int, metavar="VOCAB", help="train a BPE of this many entries on the input first"
    )
    parser.add_argument(
        "--cut-text", type=int, metavar="BYTES",
        help="cut a .txt file longer than this into several documents, at line breaks, so that one book can be split "
        "into training and validation documents (default: a file is one document)",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="key of the text in a line of JSON (default: %(default)s)"
    )
    parser.add_argument("--strict", action="store_true", help="stop at the first line that is no document")
    parser.add_argument("--overwrite", action="store_true", help="replace results that exist")
    parser.add_argument(
        "--shard-mib", type=float, default=64.0, metavar="MIB", help="MiB of text per shard (default: %(default)g)"
    )
    given = parser.parse_args(arguments)
    if not 0 < given.shard_mib < 1 << 40:
        raise ValueError(f"--shard-mib: found {given.shard_mib}, allowed: more than 0")
    return PrepareOptions(
        out=given.out, input=tuple(given.input), tokenizer=given.tokenizer, tokenizer_path=given.tokenizer_path,
        eod_token=given.eod_token, train_bpe=given.train_bpe, workers=given.workers, json_key=given.json_key,
        cut_text=given.cut_text, strict=given.strict, overwrite=given.overwrite,
        shard_bytes=int(given.shard_mib * (1 << 20)), progress=True,
    )  # fmt: skip


def _warn(message: Warning | str, *_: Any) -> None:
    """One line, without the place in the source."""
    print(f"prepare_data: warning: {' '.join(str(message).split())}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 0 on success, 1 when a worker died, 2 for a bad argument, input or disk."""
    compat.silence_known_notices()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            # megatron-core 0.19 at its import; nothing here has ranks.
            warnings.filterwarnings("ignore", message="Could not determine rank")
            record = prepare(parse(arguments))
    except RuntimeError as error:
        print(f"prepare_data: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        text = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
        print(f"prepare_data: error: {text}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"prepare_data: error: {error}", file=sys.stderr)
        return 2
    for example in record["bad_examples"]:
        print(f"bad line: {example}", file=sys.stderr)
    bad = sum(record["bad_lines"].values())
    print(
        f"{counted(record['documents'], 'document')}, {counted(record['tokens'], 'token')} of "
        f"{record['tokenizer']['kind']} (vocabulary {record['vocab_size']}, "
        f"{record['text_bytes'] / record['tokens']:.2f} bytes per token), unigram entropy "
        f"{record['unigram_entropy']:.4f} nats per token; left out: {counted(bad, 'bad line')}, "
        f"{counted(record['empty_documents'], 'empty document')}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
