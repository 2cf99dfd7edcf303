"""Low-rank pre-training on megatron-core.

Reading order (a module imports only from lower ranks; `tests/test_import_order.py` holds the table):

     0  compat.py, disk.py, messages.py, platform/
                               versions and optional imports, files, wording, CPU answers to CUDA calls
     1  roles.py, placement.py, config/, names.py, estimate/
                               the seven projections, how they are cut, what a run is, its parameters and costs
     2  layers/                reference, collectives, canonical parts, init, norm, linears, attention, MLP, layer
     3  specs.py               config -> ModuleSpec
     3' data/                  tokenizers, documents on disk, rows, resumable loader
     4  model.py               config + groups -> GPTModel of this pipeline stage
     6  checkpoint/            sharded state, atomic store, retention
     7  convert/               Hugging Face folders <-> ours
     8  train/                 launch, optimizer, step, evaluate, metrics, loop
     -  testing/               forked ranks, comparison, collective counter
"""

__version__ = "0.1.0"
