"""Low-rank layers on megatron-core's slots.

Reading order: reference, collectives, canonical, init, norm, linear, mlp, attention, layer
"""
