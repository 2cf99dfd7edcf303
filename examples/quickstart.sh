#!/usr/bin/env bash
# Pre-trains a small CoLA model on real text on two CPU ranks (TP 2 with sequence parallelism), from install to sample.
#
#   bash examples/quickstart.sh [--dense] [--text PATH] [--out DIR] [--steps N]
#
#   --dense      train the dense control of the same shape in place of CoLA
#   --text PATH  a file or folder of .txt / .jsonl / .jsonl.gz / .jsonl.zst (default: the text of pydoc_data.topics)
#   --out DIR    results (default: runs/quickstart, or runs/quickstart-NAME with --text .../NAME)
#   --steps N    optimizer steps, at least 2 (default: 200)
#
# Safe to run twice: what is done is not done again; remove the folder to train anew.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."

fail() { echo "quickstart: error: $1" >&2; exit 2; }
absolute() { case $1 in /*) printf '%s' "$1" ;; *) printf '%s' "$here/$1" ;; esac; }

method=cola text="" out="" steps=200
while [ $# -gt 0 ]; do
    case $1 in
        --dense) method=dense ;;
        --text|--out|--steps)
            [ $# -ge 2 ] && [ -n "$2" ] || fail "$1 needs a value"
            case $1 in --out) out=$(absolute "$2") ;; --steps) steps=$2 ;; *) text=$(absolute "$2") ;; esac
            shift ;;
        -h|--help) sed -n '2,11s/^# \{0,1\}//p' examples/quickstart.sh; exit 0 ;;
        *) fail "unknown argument $1; allowed: --dense, --text PATH, --out DIR, --steps N" ;;
    esac
    shift
done
[[ $steps =~ ^[0-9]{1,9}$ ]] && [ "$steps" -ge 2 ] || fail "--steps: found '$steps', allowed: a number of at least 2"
[ -z "$text" ] || [ -e "$text" ] || fail "--text $text does not exist"
if [ -z "$out" ]; then
    name=$(basename "${text:-}") && name=${name%%.*}
    out=runs/quickstart${text:+-$name}
fi
mkdir -p "$out" 2>/dev/null && [ -w "$out" ] || fail "--out $out cannot be created or written"

source examples/setup_venv.sh
setup_venv .venv
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

say() { printf '\n== %s\n' "$1"; }

say "1/5 tokenising"
# Long .txt files are cut into several documents, so that one book can be split into training and validation text.
"$PY" tools/prepare_data.py ${text:+--input "$text"} --out "$out/data/text" --train-bpe 2048 --cut-text 20000

run=$out/$method
done_steps=$(cat "$run/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
if [ "$done_steps" -ge "$steps" ]; then
    say "2/5 and 3/5: $run is trained already ($done_steps steps); remove it to train anew"
else
    train() {
        "$PY" -m torch.distributed.run --standalone --nproc-per-node 2 examples/pretrain.py \
            --preset "${method}_quickstart" --out "$run" --data.path "$out/data/text" \
            --parallel.tensor_parallel_size 2 --train.steps "$steps" "$@"
    }
    first=$((steps * 9 / 10))
    if [ "$done_steps" -lt "$first" ]; then
        say "2/5 pre-training $method on 2 ranks (tensor parallel 2, sequence parallel, distributed optimizer)"
        train --train.exit_interval "$first"
    fi
    say "3/5 resuming from the checkpoint for the last steps"
    train
fi

say "4/5 sampling from the trained model (two million parameters and $steps steps: words, not prose)"
"$PY" tools/generate.py "$run/checkpoints" --prompt "The " --tokens 60 --seed 1 | tee "$run/sample.txt"

say "5/5 done: where everything lies"
"$PY" tools/summarize.py "$out"
again=(bash examples/quickstart.sh)
[ "$method" = dense ] || again+=(--dense)
[ -z "$text" ] || again+=(--text "$text")
[ "$steps" = 200 ] || again+=(--steps "$steps")
again+=(--out "$out")
quoted() { printf '%q ' "$@"; }
cat <<END

Next:
  the $([ "$method" = cola ] && echo "dense control:" || echo "CoLA model:   ")  $(quoted "${again[@]}")
  your own text:      bash examples/quickstart.sh --text PATH
  a published size:   $(quoted "$PY" examples/pretrain.py --help)    presets cola_60m to cola_7b
  TensorBoard:        $(quoted "$PY" -m tensorboard.main --logdir "$out")
END
