"""What the commands share: one JSON document, whatever is in it."""

import json

from exportkit.commands.shared import print_json


def test_what_json_does_not_have_is_text(capsys):
    print_json({"mask": float("-inf"), "nested": [float("nan"), 1.5, "é"]})
    assert json.loads(capsys.readouterr().out) == {"mask": "-Infinity", "nested": ["NaN", 1.5, "é"]}
