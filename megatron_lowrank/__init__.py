"""Low-rank pre-training on megatron-core.

Reading order (a module imports only from lower ranks):

     0  compat.py, platform/   version differences, optional imports, CPU answers to CUDA calls
     1  placement.py, config/, estimate/
     2  layers/                reference, collectives, canonical parts, init, norm, linears, attention, MLP
     3  specs.py               config -> ModuleSpec
     3' data/                  tokenizers, documents on disk, rows, resumable loader
     4  model.py               config + groups -> GPTModel of this pipeline stage
     6  checkpoint/            names, sharded state, atomic store, retention
     7  train/                 launch, optimizer, step, evaluate, metrics, loop
     8  convert/               Hugging Face folders <-> ours
     -  testing/               forked ranks, comparison, collective counter
"""

__version__ = "0.1.0"
