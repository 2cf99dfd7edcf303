"""Opt-in platform layers: what megatron-core asks of CUDA, answered without a GPU.

Nothing in the package installs one by itself: tests and CPU runs call `cpu.install()` first, before megatron-core is
imported. Real jobs never do, and cannot: installation is refused where a CUDA device is visible.

Reading order: cpu.py
"""
