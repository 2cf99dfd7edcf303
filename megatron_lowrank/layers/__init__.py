"""Low-rank layers on megatron-core's slots.

Reading order: reference, collectives, products, online_norm, recompute, canonical, init, norm, factors,
linear, mlp, attention, layer
"""
