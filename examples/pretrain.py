"""Pre-trains a model: parse, launch, build, load, train.

    python examples/pretrain.py --preset cola_debug --data.path PREFIX --out runs/debug
    torchrun --nproc-per-node 8 examples/pretrain.py --preset cola_1b_tp --parallel.tensor_parallel_size 4 ...
    srun ... python examples/pretrain.py ...        with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT exported

The same command, started again, resumes. `--help` lists every field. Exit codes: 0 done, or saved and asked to stop;
2 the command line, the data or the launch is wrong; 3 the loss diverged; 1 anything else.
"""

from __future__ import annotations

import sys

from megatron_lowrank.config.cli import parse_run
from megatron_lowrank.train.failure import run_program
from megatron_lowrank.train.launch import launched


def main(arguments: list[str]) -> int:
    """Runs one rank; its exit code."""
    with launched(lambda: parse_run(arguments)) as run:
        # Only now: on a CPU, the platform layer has to be there before megatron-core is imported.
        from megatron_lowrank.train import loop

        job = loop.build(run)
        loop.load(job)
        result = loop.train(job)
    return result.exit_code


if __name__ == "__main__":
    run_program("pretrain", main, sys.argv[1:])
