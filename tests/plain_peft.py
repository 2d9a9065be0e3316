"""Loads adapters as a stranger does: PEFT and transformers alone, without hf_posenc. Not a test: a script for tests.

`python plain_peft.py BASE ADAPTER ...` prints one JSON object: for each adapter and way to load it "loads" or why not.
"""

import json
import os
import sys

sys.modules["hf_posenc"] = None  # type: ignore[assignment]  # from here on, importing it fails
os.environ["HF_HUB_OFFLINE"] = "1"

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def main(base, adapters):
    def original():
        return transformers.AutoModelForCausalLM.from_pretrained(base)

    ways = {
        "PeftConfig": peft.PeftConfig.from_pretrained,
        "PeftModel": lambda path: peft.PeftModel.from_pretrained(original(), path),
        "AutoPeftModel": peft.AutoPeftModelForCausalLM.from_pretrained,
        "AutoModel": transformers.AutoModelForCausalLM.from_pretrained,
        "load_adapter": lambda path: original().load_adapter(path),
    }
    found = {"versions": [peft.__version__, transformers.__version__]}
    for path in adapters:
        found[path] = {}
        for name, way in ways.items():
            try:
                way(path)
            except Exception as error:
                found[path][name] = f"{type(error).__name__}: {error}"
            else:
                found[path][name] = "loads"
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
