"""What all commands have in common."""

import pytest

from trtree.runtime.cli import EXIT_BAD_INPUT, run_command


@pytest.mark.parametrize(
    ("module", "fix"),
    [("triton.language", "pip install '.[gpu]'"), ("no_such", "pip install no_such")],
)
def test_a_package_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], module: str, fix: str
) -> None:
    def command() -> int:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    assert run_command(command, ()) == EXIT_BAD_INPUT
    package = module.partition(".")[0]
    assert capsys.readouterr().err == (
        f"error: this needs {package}, which is not installed; {fix}\n"
    )


def test_a_module_of_our_own_that_is_missing_is_a_bug() -> None:
    def command() -> int:
        raise ModuleNotFoundError("No module named 'trtree.x'", name="trtree.x")

    with pytest.raises(ModuleNotFoundError):
        run_command(command, ())
