"""Command line of the converter: parse, open the source, stream it into a writer. No GPU and no process group."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from megatron_lowrank.convert.atomic import check_destination
from megatron_lowrank.convert.canonical import SHARD_BYTES, save_canonical
from megatron_lowrank.convert.errors import ConvertError
from megatron_lowrank.convert.formats import HF_FORMATS, WRITERS, Format, open_source
from megatron_lowrank.convert.hub import TensorSource, cast, finite
from megatron_lowrank.convert.report import ProgressReport, as_text, summarize
from megatron_lowrank.convert.shards import plan_shards

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: one line, with a code."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage over several lines."""
        raise ConvertError("USAGE", f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status (0 done, 2 bad input or usage, 3 verification failed, 4 I/O)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in arguments
    try:
        options = build_parser().parse_args(arguments)
        options.run(options)
    except ConvertError as error:
        if debug:
            raise
        print(f"convert: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        if debug:
            raise
        converted = ConvertError.from_os_error(error)
        print(f"convert: {converted}", file=sys.stderr)
        return converted.exit_status
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand."""
    parser = Parser(prog="convert", description="Convert checkpoints between Hugging Face folders and ours.")
    commands = parser.add_subparsers(required=True, metavar="SUBCOMMAND", parser_class=Parser)

    importer = commands.add_parser("import-hf", help="Hugging Face folder (CoLA, CoLA-M) -> canonical folder")
    importer.add_argument("--arch", choices=("auto", *HF_FORMATS), default="auto", help="default: told by the keys")
    _add_common(importer)
    importer.set_defaults(run=_import_hf)

    exporter = commands.add_parser("export-hf", help="canonical folder or training checkpoint -> Hugging Face folder")
    exporter.add_argument("--layout", choices=tuple(WRITERS), default="reference-cola",
                          help="reference-cola: loadable by the public CoLA code")  # fmt: skip
    _add_common(exporter)
    exporter.set_defaults(run=_export_hf)

    resharder = commands.add_parser("reshard", help="training checkpoint (the latest of a folder) -> canonical folder")
    resharder.add_argument("--to", choices=("canonical",), required=True, help="what to write: full, unsharded tensors")
    _add_common(resharder)
    resharder.set_defaults(run=_reshard)

    inspector = commands.add_parser("inspect", help="say what a folder holds; reads headers only")
    inspector.add_argument("path", type=Path, metavar="PATH")
    inspector.add_argument("--json", action="store_true", help="one JSON object")
    inspector.add_argument("--debug", action="store_true", help="show a traceback on errors")
    inspector.set_defaults(run=_inspect)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", type=Path, metavar="SRC")
    parser.add_argument("dst", type=Path, metavar="DST")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="cast once; default: every tensor keeps its dtype")
    parser.add_argument("--max-shard-size", type=_size, default=SHARD_BYTES, metavar="SIZE",
                        help="such as 5GB, the default")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace DST once the new folder is complete")
    parser.add_argument("--dry-run", action="store_true", help="check headers and space, print the plan, write nothing")
    parser.add_argument("--progress", choices=("auto", "plain", "none"), default="auto")
    parser.add_argument("--allow-nonfinite", action="store_true", help="go on over NaN and infinite weights")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")


def _import_hf(options: argparse.Namespace) -> None:
    allowed: tuple[Format, ...] = HF_FORMATS if options.arch == "auto" else (options.arch,)
    _convert(open_source(options.src, allowed, "import-hf"), save_canonical, options)


def _export_hf(options: argparse.Namespace) -> None:
    source = open_source(options.src, ("canonical", "training"), "export-hf")
    check, save = WRITERS[options.layout]
    check(source)
    _convert(source, save, options)


def _reshard(options: argparse.Namespace) -> None:
    _convert(open_source(options.src, ("training",), "reshard"), save_canonical, options)


def _convert(source: TensorSource, save: Callable[..., None], options: argparse.Namespace) -> None:
    for note in source.notes:
        print(f"convert: note: {note}", file=sys.stderr)
    source = source if options.allow_nonfinite else finite(source)
    source = source if options.dtype is None else cast(source, DTYPES[options.dtype])
    check_destination(options.dst, options.src, overwrite=options.overwrite, needed_bytes=source.nbytes)
    shards = len(plan_shards(source.specs, options.max_shard_size))
    what = f"{options.dst}: {len(source.specs)} tensors, {source.nbytes} bytes, {source.dtype}, {shards} shard(s)"
    if options.dry_run:
        print(f"would write {what}")
        return
    report = ProgressReport(options.progress, len(source.specs), source.nbytes)
    try:
        save(source, options.dst, overwrite=options.overwrite, shard_bytes=options.max_shard_size, progress=report)
    finally:
        report.close()
    print(f"wrote {what}")


def _inspect(options: argparse.Namespace) -> None:
    summary = summarize(options.path)
    print(json.dumps(summary, indent=2) if options.json else as_text(summary))


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed: a number with {', '.join(filter(None, UNITS))}")
    return int(float(match[1]) * unit)
