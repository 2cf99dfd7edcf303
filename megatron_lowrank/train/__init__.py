"""The training loop: megatron-core's schedules, DDP, optimizer and scheduler, and what a run reports and survives.

Reading order: notices, failure, launch, batch, loss, optimizer, step, evaluate, throughput, console, plot, metrics,
guard, exit, folder, origin, summary, loop, generate

Nothing is imported here: `launch` has to install the CPU platform before anything imports megatron-core.
"""

import os

# Before torch is imported: when a rank is killed, its warnings are pages of C++ frames about a store that has gone.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
