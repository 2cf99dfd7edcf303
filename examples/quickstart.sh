#!/usr/bin/env bash
# Pre-trains a small CoLA model on real text on two CPU ranks (TP 2 with sequence parallelism), from install to sample.
#
#   bash examples/quickstart.sh [--dense] [--text PATH] [--out DIR] [--steps N]
#
#   --dense      train the dense control of the same shape in place of CoLA
#   --text PATH  a file or folder of .txt / .jsonl / .jsonl.gz / .jsonl.zst (default: the text of pydoc_data.topics)
#   --out DIR    results (default: runs/quickstart)
#   --steps N    optimizer steps, at least 2 (default: 200)
#
# Safe to run twice: a finished run is trained anew only when its folder is gone.
set -euo pipefail
cd "$(dirname "$0")/.."

method=cola text=() out=runs/quickstart steps=200
usage() { sed -n '2,10s/^# \{0,1\}//p' "$0"; }
while [ $# -gt 0 ]; do
    case $1 in
        --dense) method=dense ;;
        --text|--out|--steps)
            [ $# -ge 2 ] || { echo "quickstart: error: $1 needs a value" >&2; exit 2; }
            case $1 in --out) out=$2 ;; --steps) steps=$2 ;; *) text=(--input "$2") ;; esac
            shift ;;
        -h|--help) usage; exit 0 ;;
        *) echo "quickstart: error: unknown argument $1; allowed: --dense, --text PATH, --out DIR, --steps N" >&2; exit 2 ;;
    esac
    shift
done
if ! [[ $steps =~ ^[0-9]{1,9}$ ]] || [ "$steps" -lt 2 ]; then
    echo "quickstart: error: --steps: found '$steps', allowed: a number of at least 2" >&2
    exit 2
fi
if [ ${#text[@]} -gt 0 ] && ! [ -e "${text[1]}" ]; then
    echo "quickstart: error: --text ${text[1]} does not exist" >&2
    exit 2
fi
mkdir -p "$out" 2>/dev/null || { echo "quickstart: error: --out $out cannot be created" >&2; exit 2; }

source examples/setup_venv.sh
setup_venv .venv
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

say() { printf '\n== %s\n' "$1"; }

say "1/5 tokenising"
"$PY" tools/prepare_data.py "${text[@]}" --out "$out/data/text" --train-bpe 2048

run=$out/$method
flags=(--preset "${method}_quickstart" --out "$run" --data.path "$out/data/text" --parallel.tensor_parallel_size 2
       --train.steps "$steps")
train() { "$PY" -m torch.distributed.run --standalone --nproc-per-node 2 examples/pretrain.py "${flags[@]}" "$@"; }

say "2/5 pre-training $method on 2 ranks (tensor parallel 2, sequence parallel, distributed optimizer)"
train --train.exit_interval $((steps * 9 / 10))

say "3/5 resuming from the checkpoint for the last steps"
train

say "4/5 sampling from the trained model"
"$PY" tools/generate.py "$run/checkpoints" --prompt "The " --tokens 60 --seed 1 | tee "$run/sample.txt"

say "5/5 done: where everything lies"
"$PY" tools/summarize.py "$out"
other=dense; [ "$method" = cola ] || other=cola
cat <<END

Next:
  ${other/cola/CoLA}, same shape, same text:   bash examples/quickstart.sh$([ "$other" = dense ] && echo " --dense")$([ "$out" = runs/quickstart ] || echo " --out $out")
  your own text:                bash examples/quickstart.sh --text PATH --out runs/mine
  a published size:             $PY examples/pretrain.py --help     (presets cola_60m ... cola_7b)
  TensorBoard:                  $PY -m tensorboard.main --logdir $out
END
