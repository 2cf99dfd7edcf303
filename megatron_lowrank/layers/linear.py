"""The groups that fill megatron-core's four linear slots; the interpreter of the placement table.

A group holds the roles that share an input: `x -> c0 -> A -> c1 -> sigma -> c2 -> B -> c3` per role (CoLA eq. 3). The
work goes in stages, because what is kept for backward lies between them: `latents` (norm, c0, A, c1) gives complete
bottlenecks, `outputs` (sigma, c2, B, c3) what the roles give. A column group owns the norm in front of it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowrank.config import activation_by_name
from megatron_lowrank.layers.canonical import Part, layer_prefix, mark_parameter, sharded_parts
from megatron_lowrank.layers.collectives import apply_op, apply_together, gather_to_keep, own_rows
from megatron_lowrank.layers.factors import DenseRoles, DownFactors, Held, LayerPlan, UpFactors
from megatron_lowrank.layers.online_norm import OnlineNorm
from megatron_lowrank.layers.recompute import Segment
from megatron_lowrank.placement import OPS, PLACEMENTS, pair_plan
from megatron_lowrank.roles import BLOCK_NORM, ROLE_TABLE, Role, roles_of_slot

Tensors = tuple[torch.Tensor, ...]


class LinearGroup(MegatronModule):
    """The roles that share one input; base of the four slots' classes, built and run by `attention.py` and `mlp.py`."""

    slot: str

    def __init__(self, config: TransformerConfig, lr_plan: LayerPlan) -> None:
        super().__init__(config)
        self.plan = lr_plan
        self.roles = roles_of_slot(self.slot)
        self.sigma = activation_by_name(lr_plan.lowrank.sigma)
        dense = tuple(role for role in self.roles if lr_plan.lowrank.is_dense(lr_plan.layer, role))
        pairs = tuple(role for role in self.roles if role not in dense)
        self.dense = DenseRoles(dense, lr_plan, config) if dense else None
        self.cells = pair_plan(lr_plan.placement, self.roles[0]) if pairs else None
        self.down: DownFactors | None = None
        self.up: UpFactors | None = None
        if self.cells is not None:
            # A before B: the distributed optimizer's buckets follow the order of registration.
            self.down = DownFactors(pairs, self.cells, lr_plan, config)
            self.up = UpFactors(pairs, self.cells, lr_plan, config)
        self.hidden_sharded = bool(pairs) and PLACEMENTS[lr_plan.placement].residual == "hidden" and lr_plan.size > 1

    def canonical_parts(self) -> list[Part]:
        """Parts of every role."""
        return [
            part for unit in (self.dense, self.down, self.up) if unit is not None for part in unit.canonical_parts()
        ]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Sharded state with one canonical key per role and factor, the same for every placement."""
        live = {id(parameter): name for name, parameter in self.named_parameters()}
        named = [(prefix + live[id(part.parameter)], part) for part in self.canonical_parts()]
        return sharded_parts(named, layer_prefix(prefix, self.slot), metadata, self.plan.tp_group)


class ColumnGroup(LinearGroup):
    """A group that reads the residual: x [S/t, B, H] -> one [S, B, out/t] per role, norm before and bias after."""

    def __init__(self, config: TransformerConfig, lr_plan: LayerPlan) -> None:
        super().__init__(config, lr_plan)
        self.norm_key = f"{BLOCK_NORM[ROLE_TABLE[self.roles[0]].block]}.weight"
        hidden, epsilon = lr_plan.model.hidden_size, lr_plan.model.norm_epsilon
        self.online: OnlineNorm | None = None
        self.norm_axis = PLACEMENTS[lr_plan.placement].norm_dim if self.cells is not None else None
        if self.cells is not None and self.cells.c1 == "g_norm":
            self.online = OnlineNorm(hidden_size=hidden, epsilon=epsilon, group=lr_plan.tp_group)
            self.norm: Any = Held(hidden // lr_plan.size, config=config)
            mark_parameter(self.norm.weight, self.norm_axis, config.sequence_parallel)
        else:
            self.norm = lr_plan.backend.norm(config=config, hidden_size=hidden, eps=epsilon)
        # Whole bottlenecks are kept, so that no replay has to gather them again.
        self.keeps_whole = (
            lr_plan.replays
            and lr_plan.latent_store == "gathered"
            and lr_plan.size > 1
            and self.cells is not None
            and OPS[self.cells.c2][0] is not None
        )

    def latents(self, x: torch.Tensor) -> Tensors:
        """What is kept for backward: z = c1(A c0(norm(x))) of each stack, then the outputs of dense roles.

        Args:
            x: The residual in megatron-core's shape [S/t, B, H] (hidden-sharded ones are viewed as [S, B, H/t]).
        """
        group = self.plan.tp_group
        if self.online is not None and self.down is not None:
            x = x.view(x.shape[0] * self.plan.size, x.shape[1], -1) if self.hidden_sharded else x
            return self.down.after_norm(self.online, x, self.norm())
        if self.down is None or self.cells is None:
            assert self.dense is not None
            return self.dense(self.norm(x))  # type: ignore[no-any-return]
        if self.dense is not None:
            # A dense role keeps its input, so there is nothing to rebuild.
            normed = self.norm(x)
            latents = self.to_keep(self.down(apply_op(self.cells.c0, normed, group)))
            return (*latents, *self.dense(normed))
        segment, op = Segment(self.plan.replays), self.cells.c0
        (normed,) = segment.run(lambda x: (apply_op(op, self.norm(x), group),), x)
        with segment.not_kept():
            return self.to_keep(self.down(normed))

    def to_keep(self, latents: Tensors) -> Tensors:
        """z of each stack in the form in which it is kept for backward."""
        return tuple(gather_to_keep(z, self.plan.tp_group) for z in latents) if self.keeps_whole else latents

    def outputs(self, kept: Tensors) -> dict[Role, torch.Tensor]:
        """y = c3(B c2(sigma(z))) of each low-rank role (CoLA eq. 3), without bias.

        Args:
            kept: z of each stack, as `to_keep` gives it.
        """
        assert self.up is not None and self.cells is not None
        whole: Tensors | None = None
        if self.keeps_whole:
            with torch.no_grad():
                whole = tuple(self.sigma(z) for z in kept)
            # The gradient of a row comes back to the rank that owns it, reduced, before it passes sigma.
            kept = tuple(own_rows(z, self.plan.tp_group) for z in kept)
        values = self.up(tuple(self.sigma(z) for z in kept), whole)
        if self.plan.grouping:
            values = apply_together(self.cells.c3, values, self.plan.tp_group)
        else:
            values = tuple(apply_op(self.cells.c3, y, self.plan.tp_group) for y in values)
        return dict(zip(self.up.roles, values, strict=True))

    def split(self, latents: Tensors) -> Tensors:
        """What `latents` gave -> outputs in the order of `roles`, bias added."""
        count = 0 if self.down is None else len(self.down.stacks)
        outputs = self.outputs(latents[:count]) if count else {}
        for role in outputs:
            bias = self.up.bias(role) if self.up is not None else None
            if bias is not None:
                outputs[role] = outputs[role] + bias
        if self.dense is not None:
            outputs.update(zip(self.dense.roles, latents[count:], strict=True))
        return tuple(outputs[role] for role in self.roles)

    def canonical_parts(self) -> list[Part]:
        """The norm, then every role."""
        return [Part(key=self.norm_key, parameter=self.norm.weight, axis=self.norm_axis), *super().canonical_parts()]


class QKVGroup(ColumnGroup):
    """Slot `linear_qkv`."""

    slot = "self_attention.linear_qkv"


class GateUpGroup(ColumnGroup):
    """Slot `linear_fc1`."""

    slot = "mlp.linear_fc1"


class RowGroup(LinearGroup):
    """A group that writes the residual: x [S, B, in/t] -> ([S/t, B, H], bias not added yet or None)."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """c0(x), the input of A; it belongs to the segment in front."""
        return x if self.cells is None else apply_op(self.cells.c0, x, self.plan.tp_group)

    @property
    def enters(self) -> bool:
        """Whether `enter` moves anything in the forward pass."""
        return self.cells is not None and OPS[self.cells.c0][0] is not None and self.plan.size > 1

    def latents(self, entered: torch.Tensor) -> Tensors:
        """What `enter` gave -> what is kept for backward: z = c1(A x), or a dense role's output."""
        if self.down is not None:
            return self.down(entered)  # type: ignore[no-any-return]
        assert self.dense is not None
        return self.dense(entered)  # type: ignore[no-any-return]

    def finish(self, latents: Tensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `latents` gave -> megatron-core's contract of a row slot; the residual add takes the bias, once."""
        if self.up is None or self.cells is None:
            assert self.dense is not None
            return latents[0], self.dense.bias
        (role,) = self.roles
        # sigma is rebuilt, c2 and B are not: their input is all that they save.
        segment = Segment(self.plan.replays and self.plan.lowrank.sigma != "identity")
        activated = segment.run(lambda *z: tuple(self.sigma(each) for each in z), *latents)
        with segment.not_kept():
            (out,) = self.up(activated)
        out = apply_op(self.cells.c3, out, self.plan.tp_group)
        bias = self.up.bias(role)
        if not self.hidden_sharded:
            return out, bias
        # In megatron-core's shape a cut bias would not line up with its columns.
        out = out if bias is None else out + bias
        return out.view(out.shape[0] // self.plan.size, out.shape[1], -1), None


class OutGroup(RowGroup):
    """Slot `linear_proj`."""

    slot = "self_attention.linear_proj"


class DownGroup(RowGroup):
    """Slot `linear_fc2`."""

    slot = "mlp.linear_fc2"
