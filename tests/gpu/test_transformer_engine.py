"""The Transformer Engine backend: same spec, other leaves. Needs a GPU; everything else about it is the shared path."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_lowrank import compat
from megatron_lowrank.config import preset


def test_missing_transformer_engine_is_one_clear_error() -> None:
    """Runs everywhere: without Transformer Engine the error says what to install."""
    if compat.is_available("transformer_engine"):
        pytest.skip("Transformer Engine is installed, so there is no error to see")
    from megatron_lowrank.specs import transformer_engine_backend

    with pytest.raises(ImportError, match="NGC"):
        transformer_engine_backend()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["debug", "svd_debug", "dense_debug"])
def test_equals_the_local_backend(name: str) -> None:
    """Logits of one batch in bf16, one GPU: local backend against Transformer Engine."""
    if not compat.is_available("transformer_engine"):
        pytest.skip("Transformer Engine is not installed")
    import torch.distributed as dist

    from megatron_lowrank.model import build_model
    from megatron_lowrank.testing.ranks import initialize

    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    initialize()
    run = preset(name)
    run = replace(run, train=replace(run.train, precision="bf16"))
    other = replace(run, model=replace(run.model, transformer_impl="transformer_engine"))
    ids = torch.randint(0, 256, (2, 64), device="cuda")
    logits = [build_model(r)[0](ids, torch.arange(64, device="cuda")[None], None).float() for r in (run, other)]
    worst = (logits[0] - logits[1]).abs().max() / logits[0].abs().max()
    assert worst < 2e-2
    dist.destroy_process_group()
