"""Command line made from the dataclasses: a preset, a file, then dotted flags; the later wins."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import yaml

from megatron_lowrank.config.presets import preset, preset_names
from megatron_lowrank.config.run import SECTIONS, RunConfig


class UsageError(ValueError):
    """A command line that cannot become a run; the message is one line."""


def parse_run(argv: Sequence[str] | None = None, prog: str = "pretrain") -> RunConfig:
    """The run that a command line describes.

    Args:
        argv: Arguments without the program's name; default: the process's.
        prog: Program name for the help text.

    Raises:
        UsageError: an unknown name or a value that is not allowed; the message says what is.
        SystemExit: 0 after `--help`.
    """
    argv = _collect_lists(sys.argv[1:] if argv is None else argv)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--preset")
    early.add_argument("--config")
    try:
        known, _ = early.parse_known_args(argv)
        file = {} if known.config is None else _read_file(known.config)
        base = preset(known.preset or str(file.pop("preset", "debug")))
        # The file's values go through the same parser as flags, in front of them, so that both give the same errors.
        argv = [*_flags(file), *argv]
        given = _parser(prog, base).parse_args(argv).as_dict()
        given.pop("config", None)
        return RunConfig.from_dict(_plain(given))
    except UsageError:
        raise
    except argparse.ArgumentError as error:
        raise UsageError(_one_line(str(error), argv)) from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def fail(error: Exception, prog: str = "pretrain", code: int = 2) -> NoReturn:
    """Print one line and end the process."""
    print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    raise SystemExit(code)


class _Formatter(jsonargparse.DefaultHelpFormatter):
    """Defaults stay, Python's spelling of types goes: the choices and the text say what is allowed."""

    def _expand_help(self, action: argparse.Action) -> str:
        text = str(super()._expand_help(action))
        return re.sub(r"\(type: .*, default: (.*)\)$", r"(default: \1)", text)


class _Raising(jsonargparse.ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def _parser(prog: str, base: RunConfig) -> jsonargparse.ArgumentParser:
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Raising(
        prog=prog,
        usage=f"{prog} [--preset NAME] [--config FILE] [--out DIR] [--SECTION.FIELD VALUE ...]",
        description="Pre-train a low-rank (or dense) LLaMA with megatron-core. Start from --preset, change any field "
        "with a file (--config) or a flag such as --lowrank.rank 128; the later wins. Run under torchrun or srun for "
        f"more than one rank. The defaults shown are those of --preset {base.preset}; "
        "--preset NAME --help shows another's.",
        epilog="Examples: --lowrank.rank 0.25    --lowrank.rank_overrides '{mlp: 128, 3.q: 64}'    "
        "--lowrank.dense_layers '[0, 11]'    --data.path 0.7 data/a 0.3 data/b    "
        "--train.batch_ramp '[64, 64, 100000]'    --model.pad_token_id null",
        formatter_class=_Formatter,
        default_env=False,
        allow_abbrev=False,
    )
    parser.add_argument("--preset", default=base.preset, help=f"one of: {', '.join(preset_names())}")
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON file with any of the fields below")
    parser.add_argument("--out", default=base.out, help="folder of the run (config, metrics, events, checkpoints)")
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    for action in parser._actions:
        if action.dest in SECTIONS:  # `--model FILE`: one file for all sections is enough
            action.help = argparse.SUPPRESS
    defaults: dict[str, Any] = {}
    values = base.to_dict()
    for name in SECTIONS:
        for key, value in values[name].items():
            defaults[f"{name}.{key}"] = value
    parser.set_defaults(defaults)
    return parser


def _collect_lists(argv: Sequence[str]) -> list[str]:
    """`--data.path 0.3 a 0.7 b` as the parser's one list value, so that a blend is written as in Megatron-LM."""
    out: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        out.append(argument)
        if argument not in ("--data.path", "--data.valid_path") or (rest and rest[0].startswith("[")):
            continue
        words: list[str] = []
        while rest and not rest[0].startswith("--"):
            word = rest.pop(0)
            # A blend may come as one quoted word; any other blank belongs to a path.
            words += word.split() if re.match(r"[\d.]+(e-?\d+)?\s", word) else [word]
        if words:
            out.append(json.dumps(words))
    return out


def _read_file(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        if len(text) >= 1_000_000:
            raise UsageError(f"--config: {path} holds {len(text)} characters, allowed: fewer than 1000000")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: cannot read {path}: {error}") from None
    try:
        if "*" in text:
            _refuse_aliases(text, path)
        values = yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--config: {path} is neither YAML nor JSON: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"--config: {path} holds a {type(values).__name__}, allowed: a mapping of fields")
    # The run_config.json of a run's folder holds the config beside digest, versions and data.
    return values["config"] if isinstance(values.get("config"), dict) else values


def _flags(values: dict[str, Any]) -> list[str]:
    """Nested or dotted fields of a file as flags."""
    flags: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict) and key in SECTIONS:
            flags += _flags({f"{key}.{field}": item for field, item in value.items()})
        elif key == "config":
            raise UsageError("--config: a file cannot name another file, found the key 'config'")
        elif key in SECTIONS:
            raise UsageError(f"--config: {key} holds {value!r}, allowed: a mapping of its fields")
        else:
            flags.append(f"--{key}={_as_flag(str(key), value)}")
    return flags


def _as_flag(key: str, value: Any) -> str:
    if key in ("data.path", "data.valid_path"):  # one prefix, or numbers in a blend, as natural as in a flag
        words = value if isinstance(value, list) else [value]
        return json.dumps([str(word) for word in words])
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"--config: {key} holds {str(value)[:60]!r}, a {type(value).__name__}, allowed: plain values"
        ) from None


class _StrictLoader(yaml.SafeLoader):
    """YAML whose keys are all different: the second of two equal keys would win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen if isinstance(key.value, str) else False:
                raise yaml.YAMLError(f"the key {key.value!r} is there twice (line {key.start_mark.line + 1})")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _refuse_aliases(text: str, path: str) -> None:
    """A few lines of nested aliases can stand for gigabytes; a config needs none."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        raise UsageError(f"--config: {path} uses YAML aliases (*name), allowed: plain values")


def _plain(value: Any) -> Any:
    """Namespaces and tuples of the parser as the plain values that `RunConfig.from_dict` takes."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _field_names() -> list[str]:
    names = [f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.__dataclass_fields__]  # type: ignore[attr-defined]
    return ["preset", "config", "out", *names]


def _one_line(message: str, argv: Sequence[str]) -> str:
    """A parser's error as one line that says what is allowed."""
    names = _field_names()
    for argument in argv:
        flag = argument.partition("=")[0]
        if not flag.startswith("--") or flag in ("--help", "-h"):
            continue
        name = flag[2:]
        # `--data.path+` appends to a list in the parser's own syntax.
        if name.rstrip("+") in names:
            continue
        near = difflib.get_close_matches(name, names, 1) or [
            n for n in names if n.split(".")[-1] == name.split(".")[-1]
        ]
        section = name.split(".")[0]
        allowed = ", ".join(n for n in names if n.split(".")[0] == section) or f"--{', --'.join(SECTIONS)} fields"
        hint = f"did you mean --{near[0]}? " if near else ""
        return f"unknown field --{name}; {hint}allowed: {allowed}"
    text = re.sub(r"\s+", " ", message).strip()
    missing = re.match(r"argument --([\w.]+): expected one argument", text)
    if missing and missing.group(1).partition(".")[0] in SECTIONS:
        return f"{missing.group(1)}: found no value, allowed: {_type_in_words(missing.group(1))}"
    found = re.search(r'[Kk]ey "([\w.]+)"', text)
    if found and found.group(1) in names:
        name = found.group(1)
        value = re.search(r"Got value: (.+?)(?: Does not|$)", text)
        shown = f"found {value.group(1).strip()}, " if value else ""
        return f"{name}: {shown}allowed: {_type_in_words(name)}"
    return text


def _type_in_words(name: str) -> str:
    section, _, key = name.partition(".")
    kind = str(SECTIONS[section].__dataclass_fields__[key].type)  # type: ignore[attr-defined]
    literal = re.findall(r"Literal\[([^\]]*)\]", kind)
    if literal:
        text: str = literal[0].replace('"', "").replace("'", "")
        return str(text) + (" or null" if "None" in kind else "")
    words = {
        "int": "an integer", "float": "a number", "str": "a text", "bool": "true or false", "None": "null",
        "tuple[str, ...]": "a list of texts", "tuple[int, ...]": "a list of integers",
        "tuple[int, int, int]": "three integers", "Mapping[str, int | float]": "a mapping such as '{mlp: 64}'",
        "tuple[Role, ...]": "a list of q, k, v, o, gate, up, down",
    }  # fmt: skip
    if kind in words:
        return words[kind]
    if "tuple[" in kind or "Mapping" in kind:
        return " or ".join(words.get(part.strip(), part.strip()) for part in re.split(r" \| (?=None$)", kind))
    return " or ".join(words.get(part.strip(), part.strip()) for part in kind.split("|"))


def dump(run: RunConfig) -> str:
    """The resolved config as JSON text, as `--config` reads it."""
    return json.dumps(run.to_dict(), indent=2)
