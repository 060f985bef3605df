"""Fixtures that several test files share. pytest puts this directory on sys.path: `import tiny`."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama with SmolLM2's chat template, as a model directory: read only."""
    from tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", "llama", "smollm2")
