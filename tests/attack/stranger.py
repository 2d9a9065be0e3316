"""A process without hf_posenc that loads checkpoints as strangers do, and answers with logits. Not a module: a script.

Lines of JSON come in, {"path", "auto", "inputs"}; for each one goes out, {"refused"} or {"logits"}, a file.
"""

import json
import os
import sys
import warnings

sys.modules["hf_posenc"] = None  # type: ignore[assignment]  # from here on, importing it fails
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

torch.set_num_threads(1)
warnings.simplefilter("ignore")
transformers.logging.set_verbosity(transformers.logging.CRITICAL)
transformers.logging.disable_progress_bar()


def answer(job: dict) -> dict:
    try:
        model = getattr(transformers, job["auto"]).from_pretrained(job["path"]).eval()
        with torch.no_grad():
            logits = model(**load_file(job["inputs"])).logits
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"[:300]}
    save_file({"logits": logits.contiguous()}, job["inputs"] + ".logits")
    return {"logits": job["inputs"] + ".logits"}


for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
