"""The seven projections of a decoder layer, one row each: where they sit and what they share. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["q", "k", "v", "o", "gate", "up", "down"]
Block = Literal["attn", "mlp"]
GroupKind = Literal["column", "row"]
"""`column`: a group that reads the residual; `row`: one that writes it."""


@dataclass(frozen=True, kw_only=True)
class RoleInfo:
    """One row of the role table."""

    slot: str
    """Module path of megatron-core's slot below a layer; roles of one slot share their input."""
    branch: str
    """Suffix of the role's canonical names where the slot holds several roles."""
    block: Block
    """Half of the layer."""
    kind: GroupKind
    """Side of the residual."""


ROLE_TABLE: dict[Role, RoleInfo] = {
    "q": RoleInfo(slot="self_attention.linear_qkv", branch=".q", block="attn", kind="column"),
    "k": RoleInfo(slot="self_attention.linear_qkv", branch=".k", block="attn", kind="column"),
    "v": RoleInfo(slot="self_attention.linear_qkv", branch=".v", block="attn", kind="column"),
    "o": RoleInfo(slot="self_attention.linear_proj", branch="", block="attn", kind="row"),
    "gate": RoleInfo(slot="mlp.linear_fc1", branch=".gate", block="mlp", kind="column"),
    "up": RoleInfo(slot="mlp.linear_fc1", branch=".up", block="mlp", kind="column"),
    "down": RoleInfo(slot="mlp.linear_fc2", branch="", block="mlp", kind="row"),
}
"""In the order of the forward pass."""

ROLES: tuple[Role, ...] = tuple(ROLE_TABLE)
BLOCKS: tuple[Block, ...] = ("attn", "mlp")
BLOCK_NORM: dict[Block, str] = {"attn": "input_layernorm", "mlp": "pre_mlp_layernorm"}
"""The norm in front of a block's column group."""


def roles_of_slot(slot: str) -> tuple[Role, ...]:
    """Roles that fill one slot, in order."""
    return tuple(role for role, row in ROLE_TABLE.items() if row.slot == slot)


def roles_of_block(block: Block) -> tuple[Role, ...]:
    """Roles of one half of the layer, in order."""
    return tuple(role for role, row in ROLE_TABLE.items() if row.block == block)
