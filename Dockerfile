# megatron_lowrank on NVIDIA's PyTorch image.
#
#   docker build -t megatron_lowrank .
#   docker build -t megatron_lowrank --build-arg NGC_TAG=25.09-py3 --build-arg MEGATRON_CORE=0.16.1 .
#   docker run --gpus all --ipc=host --user "$(id -u):$(id -g)" -v "$PWD/runs:/runs" megatron_lowrank \
#       torchrun --nproc-per-node 8 examples/pretrain.py --preset cola_1b_tp --out /runs/first ...
#
# Untested: this file has not been built or run in this project's CI, which has neither a container runtime nor a GPU.
# CI checks that its instructions parse, that what it copies exists, and that no line replaces torch. The folders of the
# CUDA compat library in the last check have not been looked up in an image either.

# 25.09 is the tag that megatron-core keeps as its long-term image, for 0.16 and for 0.19. It has Python 3.12.
ARG NGC_TAG=25.09-py3
FROM nvcr.io/nvidia/pytorch:${NGC_TAG}

# One exact release, of the generation that is tested with Python 3.12. The other one is tested with Python 3.11.
ARG MEGATRON_CORE=0.19.2

WORKDIR /opt/megatron_lowrank

# The image sets PIP_CONSTRAINT to a file of its own: installs that need another version of anything in it fail, and
# without it pip may replace NVIDIA's torch. So it is exchanged for a stricter list: everything that the image has
# stays at exactly the version that it has, and a conflict ends the build.
RUN pip list --format=freeze --exclude-editable > /opt/image_packages.txt \
    && grep -i '^torch==' /opt/image_packages.txt
ENV PIP_CONSTRAINT=/opt/image_packages.txt \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# Without dependencies, since these are torch, numpy and packaging, which the image has.
RUN pip install --no-deps "megatron-core==${MEGATRON_CORE}"

# Named one by one, so that neither a venv nor a run of the host gets in.
COPY setup.py pyproject.toml LICENSE ./
COPY megatron_lowrank ./megatron_lowrank
COPY examples ./examples
COPY tools ./tools
COPY slurm ./slurm

# The constraint is lifted for this one command: it would also bind the setuptools of the isolated build, and with
# --no-deps there is nothing that could be replaced.
RUN PIP_CONSTRAINT= pip install --no-deps .

# Of our requirements, only what the image lacks. Known to pip under another name counts as there if it can be imported
# (the images carry their own build of triton). A version that is too old is listed too, and then conflicts with the
# constraint, loudly. Wheels only: a source build could compile against the wrong torch.
RUN python -c "import importlib.metadata as m, importlib.util as u; \
from packaging.requirements import Requirement; \
name = lambda text: text.lower().replace('_', '-'); \
modules = {'pyyaml': 'yaml', 'megatron-core': 'megatron.core'}; \
have = {name(d.metadata['Name']): d.version for d in m.distributions()}; \
ours = [r for r in map(Requirement, m.requires('megatron-lowrank')) if not r.marker or r.marker.evaluate({'extra': ''})]; \
there = lambda r, n: r.specifier.contains(have[n], prereleases=True) if n in have else u.find_spec(modules.get(n, n)); \
print(*[r for r in ours if not there(r, name(r.name))], sep='\n')" > /opt/missing.txt \
    && cat /opt/missing.txt \
    && pip install --only-binary=:all: -r /opt/missing.txt

# Optional parts. apex: only NVIDIA's, which comes with the image or not at all; the package of that name in the public
# index is a different project. megatron-core does without. DALI: its package is named after the CUDA generation.
RUN (python -c "import amp_C, apex.optimizers" 2>/dev/null || echo "note: this image has no apex of NVIDIA's; nothing installed") \
    && (python -c "import nvidia.dali" 2>/dev/null \
        || pip install --only-binary=:all: "nvidia-dali-cuda$(python -c "import torch; print(torch.version.cuda.split('.')[0])")0")

# Whoever runs the container needs no rights in it: sources are readable, caches go where everyone may write. Results
# belong into a mounted folder (--out).
RUN chmod -R a+rX /opt/megatron_lowrank
ENV TRITON_CACHE_DIR=/tmp/triton \
    TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor \
    MPLCONFIGDIR=/tmp/matplotlib

# The build fails if torch is not the image's any more, or if something does not import. There is no driver during a
# build, and some builds of Transformer Engine want libcuda to import: the image's compat library serves for that.
# The last command runs the command line's parser and ends before it looks for a GPU.
RUN test "torch==$(python -c "import importlib.metadata as m; print(m.version('torch'))")" = "$(grep -i '^torch==' /opt/image_packages.txt)" \
    && LD_LIBRARY_PATH="${LD_LIBRARY_PATH}:/usr/local/cuda/compat/lib:/usr/local/cuda/compat/lib.real" \
       python -c "import megatron_lowrank, transformer_engine, megatron.core" \
    && python examples/pretrain.py --help > /dev/null
