"""In plain words: how each figure of a report was made."""

from __future__ import annotations

PROTOCOLS = {
    "last": "The same last tokens of every window are scored at every length, while the text before them grows. Only "
    "the context changes, so that easy or hard text, and tokens that stand near the beginning, cannot flatter a "
    "length.",
    "sliding": "A window moves over the text by its stride, and every token is scored once, with at least (window - "
    "stride) tokens before it. The mean is over tokens.",
    "whole": "Each document goes through the model in one pass, and all its tokens are scored. The first ones have "
    "little context, so that figures fall with the length even where nothing distant is used.",
    "yarn": "As the script of the YaRN paper does it, to compare with published tables: a BOS token before each "
    "window, and the mean of the windows' means, whatever their sizes.",
    "gap": "The positions of a passage end at the length; the text before it stands at their beginning.",
    "likelihood": "The right answer counts where the model finds it likelier than every distractor. Models that do "
    "not follow instructions, and tiny ones, can be measured so.",
    "generation": "The model writes its answer (greedy), and it counts where it is the right one.",
    "cosine": "Queries and documents become vectors, and a query counts where its own document is nearer to it, by "
    "cosine, than every other. A text that is longer than a model reads is cut where the model's tokenizer cuts it.",
    "paired": "The same texts go through the model with and without its patch.",
    "mteb": "Run through MTEB with its own documents and scoring. A text that is longer than the length, or than a "
    "model reads, is cut.",
    "lm-eval": "Run through lm-evaluation-harness with its own prompts and scoring. No prompt was cut; lengths are "
    "nominal, and the table has the tokens that prompts and answers really took.",
}

TASKS = {
    "perplexity": "The mean loss in nats per token; perplexity is its exponential.",
    "loss_by_position": "The loss of each position in the window, averaged in bins over all windows of one pass.",
    "shift": "The loss of the same passages, each after an unrelated text and a gap that is left in the positions "
    "alone, so that nothing but the distance changes; climb is how far it is above that at the shortest length, "
    "passage by passage.",
    "passkey": "A number hidden in filler (the template of Mohtashami & Jaggi), asked for at the end. An easy test: "
    "passing it shows that a place can be reached, not that a text is understood.",
    "multikey": "Many keys with values are hidden, and one is asked for: the others are distractors.",
    "multivalue": "One key with several values, all of which are asked for.",
    "json_kv": "The value of one key of a JSON object of random UUIDs (Lost in the Middle's prompt, HELMET's recall); "
    "what each value is likely without the object is taken off.",
    "first_sentence": "The text's first sentence is asked for, which separates models that all pass the passkey test.",
    "embed_passkey": "Documents of the same filler that hide a person's pass key each (as LongEmbed's), at depths "
    "spread over the text; a query names the person. All but the name is alike in all documents.",
    "embed_needle": "Documents of real text that hide a statement about a place each, at depths spread over the text; "
    "a query asks for it. Other documents speak of the same place, or say the like of others.",
    "similarity": "How far embeddings of short texts moved (cosine to those of the unpatched model), and whether a "
    "text's neighbours kept their order (rank correlation). At 1, a scheme costs nothing in the short.",
    "tax": "Loss with the scheme minus loss without it, on the same windows, at lengths that the model was trained "
    "for. Above zero, the scheme costs quality in the short.",
}

ERRORS = (
    "± and bands are one standard error of the mean over n independent samples (windows, documents or trials), after "
    "Agresti and Coull for shares of right answers, so that it does not vanish where all trials end alike; about two "
    "of them on either side are needed to call a difference real. Models on the same windows share their luck, so "
    "that differences between them are often surer than the bands suggest."
)


def task_title(task: str) -> str:
    """A task's name as a heading; a harness's own names stay as they are."""
    if task not in TASKS:
        return task
    named = {"multikey": "multi-key needles", "multivalue": "multi-value needles", "json_kv": "JSON keys"}
    return named.get(task, task.replace("_", " ")).capitalize()
