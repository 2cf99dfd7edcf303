"""The weights of a group: its A's, its B's, its dense matrices; how they are stacked, cut and named.

Factors compute nothing here beyond their products: what lies between A and B belongs to the group (`linear.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_lowrank.config import LowRankConfig, ModelConfig
from megatron_lowrank.layers.canonical import Part, current_device, mark_parameter
from megatron_lowrank.layers.collectives import apply_op, known_result
from megatron_lowrank.layers.online_norm import OnlineNorm, online_norm_down
from megatron_lowrank.layers.products import Branch, UpPlan, down, up
from megatron_lowrank.names import role_key
from megatron_lowrank.placement import DENSE_PLANS, Op, PairPlan
from megatron_lowrank.roles import ROLE_TABLE, Role

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Which class fills each leaf of a spec; the specs are the same code for every backend."""

    factor: Callable[..., Any] | None
    """A or B on local shapes as a module, no communication: `(in, out, *, config, name)`. None: bare weights, whose
    products are stacked and fused with their collectives (`products.py`)."""
    column_linear: Callable[..., Any]
    """Dense column-parallel linear, with megatron-core's keywords."""
    row_linear: Callable[..., Any]
    """Dense row-parallel linear."""
    norm: Any
    """Class of the norms."""
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
    entry: Op
    """What turns the residual as it arrives into this layer's layout."""
    exit: Op
    """What turns it back behind the last layer."""
    grouping: bool = True
    """Whether roles that share an input are computed and reduced together."""
    overlap: bool = False
    """Whether a bottleneck's gradient is reduced under the weight gradient's product."""
    recompute: str = "none"
    """Policy: none, latent, latent_keep_attention (`full` is megatron-core's own)."""
    latent_store: Literal["gathered", "sharded"] = "gathered"

    @property
    def size(self) -> int:
        """Ranks of the tensor-parallel group."""
        return dist.get_world_size(self.tp_group)

    @property
    def replays(self) -> bool:
        """Whether this layer keeps bottlenecks alone; one without any pair has nothing to keep them by."""
        return not self.lowrank.is_dense_layer(self.layer) and self.recompute.startswith("latent")

    def rank_of(self, role: Role) -> int:
        """R of a role in this layer."""
        return self.lowrank.rank_of(self.layer, role, self.model.hidden_size)


class Held(nn.Module):
    """One parameter, handed over by a call: megatron-core waits for a gathered parameter when its module is called."""

    def __init__(self, *shape: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=current_device()))

    def forward(self) -> torch.Tensor:
        """The parameter; `layers.init` has drawn it by its canonical name."""
        return self.weight

    def extra_repr(self) -> str:
        """Shape."""
        return str(tuple(self.weight.shape))


class DownFactors(MegatronModule):
    """A [R, in] of every low-rank role of a group, cut as c0..c1 of the placement table want; rows of roles stacked."""

    def __init__(self, roles: tuple[Role, ...], cells: PairPlan, plan: LayerPlan, config: TransformerConfig) -> None:
        super().__init__(config)
        self.cells, self.plan = cells, plan
        self.stacks = (roles,) if plan.grouping else tuple((role,) for role in roles)
        width_in, _ = plan.model.role_widths(roles[0])
        width_in = _local(width_in, cells.a_dim == 1, plan.size)
        self.widths = {role: _local(plan.rank_of(role), cells.a_dim == 0, plan.size) for role in roles}
        # Behind the online norm the products are part of its node, whatever the backend.
        self.bare = plan.backend.factor is None or cells.c1 == "g_norm"
        self.factors = nn.ModuleList(
            _factor(width_in, sum(self.widths[role] for role in stack), self.bare, plan, config,
                    f"{'_'.join(stack)}_down_proj")
            for stack in self.stacks
        )  # fmt: skip
        _mark(self.factors, cells.a_dim, config)

    def forward(self, x: torch.Tensor) -> Tensors:
        """z = c1(A x), one tensor per stack."""
        if self.bare:
            return down(x, [factor() for factor in self.factors], self.cells.c1, self.plan.tp_group)
        return tuple(apply_op(self.cells.c1, factor(x), self.plan.tp_group) for factor in self.factors)

    def after_norm(self, norm: OnlineNorm, x: torch.Tensor, gain: torch.Tensor) -> Tensors:
        """z = A rmsnorm(x) over a hidden-sharded x, one tensor per stack."""
        return online_norm_down(norm, x, gain, [factor() for factor in self.factors])

    def canonical_parts(self) -> list[Part]:
        """A of each role."""
        return [
            Part(key=role_key(role, "a"), parameter=_parameter(factor), axis=self.cells.a_dim, rows=rows)
            for stack, factor in zip(self.stacks, self.factors, strict=True)
            for role, rows in _rows(stack, self.widths)
        ]


class UpFactors(MegatronModule):
    """B [out, R] of every low-rank role of a group, cut as c2..c3 want; equal shapes stacked; and the biases."""

    def __init__(self, roles: tuple[Role, ...], cells: PairPlan, plan: LayerPlan, config: TransformerConfig) -> None:
        super().__init__(config)
        self.cells, self.plan, self.roles = cells, plan, roles
        ranks = {role: _local(plan.rank_of(role), cells.b_dim == 1, plan.size) for role in roles}
        widths = {role: plan.model.role_widths(role)[1] for role in roles}
        self.widths = {role: _local(width, cells.b_dim == 0, plan.size) for role, width in widths.items()}
        self.bare = plan.backend.factor is None
        stackable = plan.grouping and self.bare
        alike = itertools.groupby(roles, key=lambda role: (self.widths[role], ranks[role]) if stackable else role)
        self.stacks = tuple(tuple(stack) for _, stack in alike)
        self.factors = nn.ModuleList(
            _factor(ranks[stack[0]], sum(self.widths[r] for r in stack), self.bare, plan, config,
                    f"{'_'.join(stack)}_up_proj")
            for stack in self.stacks
        )  # fmt: skip
        _mark(self.factors, cells.b_dim, config)
        self.biases = nn.ModuleDict()
        for role in roles:
            if plan.model.role_has_bias(role):
                self.biases[role] = Held(_local(widths[role], cells.bias_dim == 0, plan.size), config=config)
                mark_parameter(_parameter(self.biases[role]), cells.bias_dim, config.sequence_parallel)
        self.branches = tuple(self._branches(ranks))

    def _branches(self, ranks: dict[Role, int]) -> Iterator[Branch]:
        # The bottlenecks lie as the A's are stacked: all in one buffer, or each in its own.
        start = 0
        for number, stack in enumerate(self.stacks):
            for role, rows in _rows(stack, self.widths):
                columns = (start, start + ranks[role]) if self.plan.grouping else (0, ranks[role])
                start += ranks[role]
                latent = 0 if self.plan.grouping else self.roles.index(role)
                yield Branch(latent=latent, columns=columns, weight=number, rows=rows or (0, self.widths[role]))

    def forward(self, latents: Tensors, whole: Tensors | None = None) -> Tensors:
        """B c2(h) of each role, before c3 and without bias.

        Args:
            latents: h as the A's are stacked.
            whole: c2(h), where it is there already.
        """
        group = self.plan.tp_group
        if self.bare:
            plan = UpPlan(branches=self.branches, op=self.cells.c2, group=group, overlap=self.plan.overlap)
            return up(plan, latents, [factor() for factor in self.factors], whole)
        if whole is None:
            moved = [apply_op(self.cells.c2, h, group) for h in latents]
        else:
            moved = [known_result(self.cells.c2, h, known, group) for h, known in zip(latents, whole, strict=True)]
        return tuple(
            factor(moved[branch.latent][..., slice(*branch.columns)].contiguous())
            for factor, branch in zip(self.factors, self.branches, strict=True)
        )

    def bias(self, role: Role) -> torch.Tensor | None:
        """The bias [out or out/t] of a role."""
        return self.biases[role]() if role in self.biases else None

    def canonical_parts(self) -> list[Part]:
        """B and bias of each role."""
        parts = [
            Part(key=role_key(role, "b"), parameter=_parameter(factor), axis=self.cells.b_dim, rows=rows)
            for stack, factor in zip(self.stacks, self.factors, strict=True)
            for role, rows in _rows(stack, self.widths)
        ]
        for role, held in self.biases.items():
            key = role_key(role, "bias")  # type: ignore[arg-type]
            parts.append(Part(key=key, parameter=_parameter(held), axis=self.cells.bias_dim))  # type: ignore[arg-type]
        return parts


class DenseRoles(MegatronModule):
    """Dense roles of one group as one stock linear; its rows are [q_local; k_local; v_local] on each rank."""

    def __init__(self, roles: tuple[Role, ...], plan: LayerPlan, config: TransformerConfig) -> None:
        super().__init__(config)
        self.roles, self.tp_group = roles, plan.tp_group
        widths = [plan.model.role_widths(role) for role in roles]
        self.kind = ROLE_TABLE[roles[0]].kind
        self.widths = {
            role: _local(width, self.kind == "column", plan.size)
            for role, (_, width) in zip(roles, widths, strict=True)
        }
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

    def forward(self, x: torch.Tensor) -> Tensors:
        """Outputs by role; a row linear leaves its bias to whoever adds the residual."""
        out, _ = self.linear(x)
        return torch.split(out, list(self.widths.values()), dim=-1)

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of a row linear, which the residual add takes."""
        return self.linear.bias if self.linear.bias is not None and self.linear.bias.numel() else None  # type: ignore[no-any-return]

    def canonical_parts(self) -> list[Part]:
        """W of each role (rows of the stock weight) and its bias."""
        cells = DENSE_PLANS[self.kind]
        parts: list[Part] = []
        for name, key, axis in (("weight", "dense", cells.w_dim), ("bias", "dense_bias", cells.bias_dim)):
            parameter = getattr(self.linear, name, None)
            if not isinstance(parameter, nn.Parameter) or not parameter.numel():
                continue
            for role, rows in _rows(self.roles, self.widths):
                parts.append(Part(key=role_key(role, key), parameter=parameter, axis=axis, rows=rows))  # type: ignore[arg-type]
        return parts


def keep_weight(weight: torch.Tensor) -> torch.Tensor:
    """Stock linears call this in place of an initialisation."""
    return weight


def _factor(width_in: int, width_out: int, bare: bool, plan: LayerPlan, config: TransformerConfig, name: str) -> Any:
    if bare:
        return Held(width_out, width_in, config=config)
    assert plan.backend.factor is not None, "a backend without a module for factors has bare ones"
    return plan.backend.factor(width_in, width_out, config=config, name=name)


def _mark(factors: nn.ModuleList, axis: int | None, config: TransformerConfig) -> None:
    for factor in factors:
        mark_parameter(_parameter(factor), axis, config.sequence_parallel)


def _parameter(holder: Any) -> nn.Parameter:
    return holder.weight  # type: ignore[no-any-return]


def _rows(stack: tuple[Role, ...], widths: dict[Role, int]) -> Iterator[tuple[Role, tuple[int, int] | None]]:
    """Each role and its rows in the stacked parameter; None: it has the parameter to itself."""
    start = 0
    for role in stack:
        yield role, None if len(stack) == 1 else (start, start + widths[role])
        start += widths[role]


def _local(width: int, cut: bool, size: int) -> int:
    assert not cut or width % size == 0, f"{width} is not divisible by {size}; RunConfig refuses this"
    return width // size if cut else width
