"""Text on disk -> token files -> rows -> micro-batches of this data-parallel rank.

Reading order: tokenizers, cut, cache, files, out, documents, shards, prepare, rows, datasets, loader

Nothing is imported here: the workers of `prepare` need the first files only, and the last ones import megatron-core.
"""
