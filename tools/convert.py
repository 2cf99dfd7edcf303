#!/usr/bin/env python
"""Convert checkpoints: `import-hf SRC DST`, `export-hf SRC DST`, `inspect PATH`; `--help` lists the options."""

import sys

from megatron_lowrank.convert.cli import main

if __name__ == "__main__":
    sys.exit(main())
