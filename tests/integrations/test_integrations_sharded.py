"""Lightning, Fabric and Accelerate under FSDP2, on two processes; see sharded_frameworks.py."""

from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("accelerate")

from programs import ranks


@pytest.mark.slow
def test_shards_go_the_way_of_copies(tmp_path):
    ranks(2, Path(__file__).parent / "sharded_frameworks.py", tmp_path)
