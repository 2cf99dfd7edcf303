"""Helpers for tests: ranks on gloo by fork, comparison with one tolerance table, and a counter of collectives.

Nothing in the package imports this folder; tests, benchmarks and tools do.

Reading order: compare.py, collectives.py, ranks.py, measure.py, bench.py, layer_costs.py, planned.py, plain_layer.py,
whole_model.py
"""
