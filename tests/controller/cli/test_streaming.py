"""`generate --image` against a stand-in: what it sends, and what it refuses before that."""

import pytest
from typer.testing import CliRunner

from controller.cli.exit_codes import ExitCode
from controller.cli.main import app
from messages import requests as rq
from tests.support.simulation.standin_controller import StandIn

PNG, JPEG = b"\x89PNG", b"\xff\xd8\xff"


@pytest.fixture
def controller(tmp_path):
    with StandIn(tmp_path) as stand_in:
        (tmp_path / "a.png").write_bytes(PNG)
        (tmp_path / "b.jpeg").write_bytes(JPEG)
        (tmp_path / "empty.png").touch()
        yield stand_in


def generate(controller, prompt, *images, stdin=None):
    options = [word for name in images for word in ("--image", str(controller.directory / name))]
    arguments = ["--dir", str(controller.directory), "generate", prompt, *options]
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments, input=stdin)


@pytest.mark.parametrize("prompt", ["<image> and <image>", "-"])
def test_images_go_with_the_text_in_their_order(controller, prompt):
    result = generate(controller, prompt, "b.jpeg", "a.png", stdin="<image> and <image>")
    assert result.exit_code == 0, result.output
    assert result.stdout == "one\n"
    (request,) = controller.requests(rq.Generate)
    assert request.prompt == rq.IllustratedPrompt("<image> and <image>", (JPEG, PNG))


@pytest.mark.parametrize(
    ("image", "told"), [("none.png", "does not exist"), (".", "directory"), ("empty.png", "empty")]
)
def test_an_image_that_is_none_is_wrong_usage(controller, image, told):
    result = generate(controller, "<image>", "a.png", image)
    assert result.exit_code == ExitCode.USAGE
    assert told in result.stderr
    assert not controller.received


def test_the_help_tells_of_placeholders():
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["generate", "--help"])
    assert "placeholder of the model" in result.stdout
    assert "--image" in result.stdout
