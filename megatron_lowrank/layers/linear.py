"""Low-rank pairs and the groups that fill megatron-core's four linear slots; the interpreter of the placement table.

A group holds the roles that share an input: `x -> c0 -> A -> c1 -> sigma -> c2 -> B -> c3` per role (CoLA eq. 3). Dense
roles of a group are one stock linear of megatron-core with their rows stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional

from megatron_lowrank.config import LowRankConfig, ModelConfig, activation_by_name
from megatron_lowrank.layers.canonical import Part, current_device, layer_prefix, mark_parameter, sharded_parts
from megatron_lowrank.layers.collectives import apply_op
from megatron_lowrank.names import role_key
from megatron_lowrank.placement import DENSE_PLANS, pair_plan
from megatron_lowrank.roles import ROLE_TABLE, Role, roles_of_slot

ByRole = dict[Role, torch.Tensor]


class LocalFactor(nn.Linear):
    """One factor on this rank's local shape: a plain matrix product that communicates nothing."""

    def __init__(self, in_features: int, out_features: int, *, config: TransformerConfig, name: str) -> None:
        super().__init__(in_features, out_features, bias=False, device=current_device(), dtype=config.params_dtype)

    def reset_parameters(self) -> None:
        """Nothing: `layers.init` draws every weight by its canonical name."""


class _SharedInput(torch.autograd.Function):
    """z_i = x W_i^T of several factors; the gradient of x is accumulated by the products themselves.

    Left to autograd, every branch would write its own gradient of x and two more passes would add them up.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(functional.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = [grad.flatten(0, -2) for grad in grads]
        grad_x = rows[0] @ weights[0]
        for grad, weight in zip(rows[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        flat = x.flatten(0, -2)
        return grad_x.view_as(x), *(grad.T @ flat for grad in rows)


def shared_input(x: torch.Tensor, factors: Sequence[nn.Module]) -> tuple[torch.Tensor, ...]:
    """Products of one input with several factors; plain local ones are computed together, others one by one."""
    if len(factors) > 1 and all(type(factor) is LocalFactor for factor in factors):
        return _SharedInput.apply(x, *(factor.weight for factor in factors))  # type: ignore[no-any-return,no-untyped-call]
    return tuple(factor(x) for factor in factors)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Which class fills each leaf of a spec; the specs are the same code for every backend."""

    factor: Callable[..., Any]
    """A or B on local shapes, no communication: `(in, out, *, config, name)`."""
    column_linear: Callable[..., Any]
    """Dense column-parallel linear, with megatron-core's keywords."""
    row_linear: Callable[..., Any]
    """Dense row-parallel linear."""
    norm: Any
    """Class of the norm slots."""
    core_attention: Any
    """Class of the attention slot."""


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What a group has to know of its layer; travels as `lr_plan` in a ModuleSpec's params."""

    layer: int
    """Global index from 0."""
    model: ModelConfig
    lowrank: LowRankConfig
    placement: str
    backend: Backend
    tp_group: dist.ProcessGroup


def keep_weight(weight: torch.Tensor) -> torch.Tensor:
    """Stock linears call this in place of an initialisation."""
    return weight


class LowRankPair(MegatronModule):
    """The weights of one role's pair, A [R, in] and B [out, R], cut over ranks as the placement table says.

    It computes nothing: the stages of a group run over the pairs of all its roles, because a placement may share one
    reduction among them, and what is kept for backward lies between two stages.
    """

    def __init__(self, role: Role, plan: LayerPlan, config: TransformerConfig) -> None:
        super().__init__(config)
        width_in, width_out = plan.model.role_widths(role)
        self.rank = plan.lowrank.rank_of(plan.layer, role, plan.model.hidden_size)
        self.role, self.cells = role, pair_plan(plan.placement, role)
        size = dist.get_world_size(plan.tp_group)
        a_out, a_in = _local((self.rank, width_in), self.cells.a_dim, size)
        b_out, b_in = _local((width_out, self.rank), self.cells.b_dim, size)
        # A before B: the distributed optimizer's buckets follow the order of registration.
        self.down_proj = plan.backend.factor(a_in, a_out, config=config, name=f"{role}_down_proj")
        self.up_proj = plan.backend.factor(b_in, b_out, config=config, name=f"{role}_up_proj")
        mark_parameter(self.down_proj.weight, self.cells.a_dim, config.sequence_parallel)
        mark_parameter(self.up_proj.weight, self.cells.b_dim, config.sequence_parallel)
        self.bias: nn.Parameter | None = None
        if plan.model.role_has_bias(role):
            width = width_out // size if self.cells.bias_dim == 0 else width_out
            self.bias = nn.Parameter(torch.empty(width, dtype=config.params_dtype, device=current_device()))
            mark_parameter(self.bias, self.cells.bias_dim, config.sequence_parallel)

    def canonical_parts(self) -> list[Part]:
        """A, B and the bias."""
        parts = [
            Part(key=role_key(self.role, "a"), parameter=self.down_proj.weight, axis=self.cells.a_dim),
            Part(key=role_key(self.role, "b"), parameter=self.up_proj.weight, axis=self.cells.b_dim),
        ]
        if self.bias is not None:
            parts.append(Part(key=role_key(self.role, "bias"), parameter=self.bias, axis=self.cells.bias_dim))
        return parts

    def extra_repr(self) -> str:
        """Role and rank."""
        return f"{self.role}, rank={self.rank}"


class DenseRoles(MegatronModule):
    """Dense roles of one group as one stock linear; its rows are [q_local; k_local; v_local] on each rank."""

    def __init__(self, roles: tuple[Role, ...], plan: LayerPlan, config: TransformerConfig) -> None:
        super().__init__(config)
        self.roles, self.tp_group = roles, plan.tp_group
        widths = [plan.model.role_widths(role) for role in roles]
        self.kind = ROLE_TABLE[roles[0]].kind
        size = dist.get_world_size(plan.tp_group)
        self.widths = [out // size if self.kind == "column" else out for _, out in widths]
        has_bias = plan.model.role_has_bias(roles[0])
        shared: dict[str, Any] = {
            "config": config, "init_method": keep_weight, "bias": has_bias, "is_expert": False,
            "tp_group": plan.tp_group,
        }  # fmt: skip
        inputs, outputs = widths[0][0], sum(out for _, out in widths)
        if self.kind == "column":
            self.linear = plan.backend.column_linear(
                inputs, outputs, gather_output=False, skip_bias_add=False, **shared
            )
        else:
            self.linear = plan.backend.row_linear(inputs, outputs, input_is_parallel=True, skip_bias_add=True, **shared)

    def forward(self, x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Outputs by role, and the bias that is not added yet (row kind)."""
        out, bias = self.linear(x)
        return torch.split(out, self.widths, dim=-1), bias

    def canonical_parts(self) -> list[Part]:
        """W of each role (rows of the stock weight) and its bias."""
        cells = DENSE_PLANS[self.kind]
        parts: list[Part] = []
        for name, key, axis in (("weight", "dense", cells.w_dim), ("bias", "dense_bias", cells.bias_dim)):
            parameter = getattr(self.linear, name, None)
            if not isinstance(parameter, nn.Parameter) or not parameter.numel():
                continue
            start = 0
            for role, width in zip(self.roles, self.widths, strict=True):
                rows = None if len(self.roles) == 1 else (start, start + width)
                parts.append(Part(key=role_key(role, key), parameter=parameter, axis=axis, rows=rows))  # type: ignore[arg-type]
                start += width
        return parts


class LinearGroup(MegatronModule):
    """The roles that share one input; base of the four slots' classes.

    Called by megatron-core with two global sizes and keywords of its own, which differ between versions; everything of
    ours is in `lr_plan`. The work goes in three stages over all low-rank roles: `latents`, `activate`, `outputs`.
    """

    slot: str

    def __init__(self, *sizes: int, config: TransformerConfig, lr_plan: LayerPlan, **kwargs: Any) -> None:
        super().__init__(config)
        if kwargs.get("is_expert"):
            raise ValueError("low-rank linears: found is_expert=True, allowed: False (experts are not supported)")
        self.plan = lr_plan
        self.roles = roles_of_slot(self.slot)
        self.sigma = activation_by_name(lr_plan.lowrank.sigma)
        dense = tuple(role for role in self.roles if lr_plan.lowrank.is_dense(lr_plan.layer, role))
        self.dense = DenseRoles(dense, lr_plan, config) if dense else None
        self.pairs = nn.ModuleDict({r: LowRankPair(r, lr_plan, config) for r in self.roles if r not in dense})

    def low_rank_roles(self) -> Iterator[tuple[Role, LowRankPair]]:
        """The roles of this group that are pairs."""
        return cast("Iterator[tuple[Role, LowRankPair]]", iter(self.pairs.items()))

    def latents(self, x: torch.Tensor) -> ByRole:
        """z = c1(A c0(x)) of each role, complete sums: sigma of a sum is not the sum of sigmas."""
        pairs = dict(self.low_rank_roles())
        if not pairs:
            return {}
        # Roles of one group have the same cells, so they share the collective and the input.
        cells = next(iter(pairs.values())).cells
        x = apply_op(cells.c0, x, self.plan.tp_group)
        products = shared_input(x, [pair.down_proj for pair in pairs.values()])
        return {role: apply_op(cells.c1, z, self.plan.tp_group) for role, z in zip(pairs, products, strict=True)}

    def activate(self, latents: ByRole) -> ByRole:
        """h = sigma(z) of each role (CoLA eq. 3)."""
        return {role: self.sigma(latent) for role, latent in latents.items()}

    def outputs(self, latents: ByRole) -> ByRole:
        """y = c3(B c2(h)) of each role, without bias."""
        outputs: ByRole = {}
        for role, pair in self.low_rank_roles():
            latent = apply_op(pair.cells.c2, latents[role], self.plan.tp_group)
            outputs[role] = apply_op(pair.cells.c3, pair.up_proj(latent), self.plan.tp_group)
        return outputs

    def project(self, x: torch.Tensor) -> tuple[ByRole, torch.Tensor | None]:
        """Outputs of all roles without the bias of pairs, and the dense row bias."""
        outputs = self.outputs(self.activate(self.latents(x)))
        if self.dense is None:
            return outputs, None
        values, bias = self.dense(x)
        return {**outputs, **dict(zip(self.dense.roles, values, strict=True))}, bias

    def canonical_parts(self) -> list[Part]:
        """Parts of every role."""
        dense = self.dense.canonical_parts() if self.dense is not None else []
        return [*dense, *(part for _, pair in self.low_rank_roles() for part in pair.canonical_parts())]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Sharded state with one canonical key per role and factor, the same for every placement."""
        live = {id(parameter): name for name, parameter in self.named_parameters()}
        named = [(prefix + live[id(part.parameter)], part) for part in self.canonical_parts()]
        return sharded_parts(named, layer_prefix(prefix, self.slot), metadata, self.plan.tp_group)


class ColumnGroup(LinearGroup):
    """A group that reads the residual: x [S/t, B, H] -> one [S, B, out/t] per role, bias added."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs in the order of `roles`."""
        outputs, _ = self.project(x)
        for role, pair in self.low_rank_roles():
            if pair.bias is not None:
                outputs[role] = outputs[role] + pair.bias
        return tuple(outputs[role] for role in self.roles)


class QKVGroup(ColumnGroup):
    """Slot `linear_qkv`."""

    slot = "self_attention.linear_qkv"


class GateUpGroup(ColumnGroup):
    """Slot `linear_fc1`."""

    slot = "mlp.linear_fc1"


class RowGroup(LinearGroup):
    """A group that writes the residual: x [S, B, in/t] -> ([S/t, B, H], bias not added yet or None)."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Megatron-core's contract of a row slot; the residual add takes the bias, once."""
        outputs, dense_bias = self.project(x)
        role = self.roles[0]
        return outputs[role], next((pair.bias for _, pair in self.low_rank_roles()), dense_bias)


class OutGroup(RowGroup):
    """Slot `linear_proj`."""

    slot = "self_attention.linear_proj"


class DownGroup(RowGroup):
    """Slot `linear_fc2`."""

    slot = "mlp.linear_fc2"


def _local(shape: tuple[int, int], axis: int | None, size: int) -> tuple[int, int]:
    sides = list(shape)
    if axis is not None:
        assert sides[axis] % size == 0, f"{shape} is not divisible by {size} along {axis}; RunConfig refuses this"
        sides[axis] //= size
    return sides[0], sides[1]
