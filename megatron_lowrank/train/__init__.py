"""The training loop: megatron-core's schedules, DDP, optimizer and scheduler, and what a run reports and survives.

Reading order: failure, notices, launch, batch, loss, optimizer, step, evaluate, throughput, console, plot, metrics,
guard, exit, folder, origin, summary, loop, generate

Nothing is imported here: `launch` has to install the CPU platform before anything imports megatron-core.
"""
