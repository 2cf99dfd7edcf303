"""Recompute between bottlenecks on a GPU: the path is the one that CPU tests run, the kernels are others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lowrank.config import preset


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["btp", "btp_sp"])
def test_latent_recompute_changes_nothing_in_bf16(placement: str) -> None:
    """One GPU: loss and gradients of a batch with and without recompute, deterministic kernels."""
    import torch.distributed as dist

    from megatron_lowrank.model import build_model
    from megatron_lowrank.testing.ranks import initialize

    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    initialize()
    run = preset("debug")
    run = replace(run, parallel=replace(run.parallel, placement=placement), train=replace(run.train, precision="bf16"))
    ids = torch.randint(0, 256, (2, 64), device="cuda")
    torch.use_deterministic_algorithms(True)
    results: list[list[torch.Tensor]] = []
    for policy in ("none", "latent", "latent_keep_attention"):
        model: Any = build_model(replace(run, train=replace(run.train, recompute=policy)))[0]
        logits = model(ids, torch.arange(64, device="cuda")[None], None)
        logits.float().square().mean().backward()
        results.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))
    dist.destroy_process_group()
