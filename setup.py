"""Packaging. The version is read as text: nothing of the package is imported and no machine is probed."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "([^"]+)"$', (HERE / "megatron_lowrank/__init__.py").read_text(), re.M).group(1)

REQUIREMENTS = [
    # 2.6: what megatron-core 0.16 asks for; newer than 2.14 is not tested.
    "torch>=2.6,<2.15",
    # pip takes 0.16.x on Python 3.11 and 0.19.x on 3.12; both are tested.
    "megatron-core>=0.16,<0.20",
    # megatron-core imports these two without declaring them (dist_checkpointing's writer; from 0.18 on import).
    "psutil>=5.9",
    'triton>=3.0; python_version >= "3.12" and sys_platform == "linux"',
    "numpy>=1.26",
    "safetensors>=0.4.3,<1",
    "tokenizers>=0.20,<1",
    "sentencepiece>=0.2,<0.3",
    "zstandard>=0.22,<1",
    "tensorboard>=2.16,<3",
    "matplotlib>=3.8,<4",
    "tqdm>=4.66,<5",
    "PyYAML>=6,<7",
    "jsonargparse[signatures]>=4.40,<5",
]
EXTRAS = {
    # Transformer Engine builds against the torch that is there: install it with --no-build-isolation.
    "te": ["transformer-engine[pytorch]>=2.4"],
    # DALI's own upper bound on packaging; without it pip may back off to an old DALI.
    "dali": ["nvidia-dali-cuda120>=1.51", "packaging<=26.3"],
    "hf": ["transformers>=4.47,<6"],
    "dev": [
        "pytest>=8,<10",
        "pytest-timeout>=2.3,<3",
        "hypothesis>=6.100,<7",
        "ruff>=0.6,<1",
        "mypy>=1.11,<3",
        "types-PyYAML",
        "types-tqdm",
    ],
}

setup(
    name="megatron-lowrank",
    version=VERSION,
    description="Low-rank LLM pre-training on megatron-core: CoLA, SVD pairs and dense controls in one table",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_lowrank", "megatron_lowrank.*"]),
    package_data={"megatron_lowrank": ["py.typed"]},
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
)
