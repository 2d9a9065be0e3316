"""Loads checkpoints as a stranger does: transformers alone, without hf_posenc. Not a test: a script for tests to run.

`python -I plain_load.py jobs.json` prints one JSON object: for each job "exact", "wrong: ..." or "refused: ...".
"""

import json
import os
import sys

sys.modules["hf_posenc"] = None  # type: ignore[assignment]  # from here on, importing it fails
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def verdict(job: dict) -> str:
    """What became of one load, with `job["arguments"]`, of `job["path"]`."""
    arguments = dict(job["arguments"])
    if "dtype" in arguments:
        arguments["dtype"] = getattr(torch, arguments["dtype"])
    expected = load_file(job["expected"])
    try:
        model = getattr(transformers, job["auto"]).from_pretrained(job["path"], **arguments)
        with torch.no_grad():
            output = model(expected["ids"])
    except Exception as error:
        return f"refused: {type(error).__name__}: {error}"
    found = output.logits if "logits" in output else output.last_hidden_state
    if torch.equal(found, expected[job["key"]]):
        return "exact"
    return f"wrong: by {(found - expected[job['key']]).abs().max():.3g}"


def main() -> None:
    try:
        import hf_posenc  # noqa: F401
    except ImportError:
        pass
    else:
        raise SystemExit("hf_posenc can be imported here: this would prove nothing")
    with open(sys.argv[1], encoding="utf-8") as file:
        jobs = json.load(file)
    verdicts = {name: verdict(job) for name, job in jobs.items()}
    assert not [name for name in sys.modules if name.startswith("hf_posenc.")]
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main()
