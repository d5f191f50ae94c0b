"""The chain accepts what z-lab's published package accepts, round by round."""

from engines import ROOT
from trtree.build.options import read_options
from trtree.runtime.bench import against_dflash
from trtree.runtime.generate import read_prompts


def test_rounds_equal_the_published_packages() -> None:
    options = read_options(ROOT / "configs" / "demo.yaml")
    prompts = read_prompts(options.calibration_prompts)[:3]
    result = against_dflash.compare(options, prompts, 40)  # raises where rounds differ
    theirs, ours = result["dflash"], result["reference"]
    assert theirs["acceptance_length"] > 1.5
    assert abs(theirs["acceptance_length"] - ours["acceptance_length"]) < 0.5
