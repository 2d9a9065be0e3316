"""What the programs that ask runtimes share; it imports nothing of this package, since it runs where that is not.

QUESTION.json is a list of {"model": path, "prompts": [[id, ...], ...]}; for each a line is written to ANSWERS.jsonl,
at once, with the log-probabilities of the token after each prompt, or with the error: a runtime may end its process.
"""

import json
import sys
from collections.abc import Callable


def main(probabilities: Callable[[str, list[list[int]]], list[list[float]]]) -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        questions = json.load(file)
    for question in questions:
        try:
            answer: dict[str, object] = {"probabilities": probabilities(question["model"], question["prompts"])}
        except Exception as error:  # whatever the runtime has against the model
            answer = {"error": f"{type(error).__name__}: {error}"}
        with open(sys.argv[2], "a", encoding="utf-8") as file:
            file.write(json.dumps(answer) + "\n")
